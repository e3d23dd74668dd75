#!/bin/bash -l
# A network plugin of your own, for a ROCm that the module rccl-net-plugin does not know. OLCF recommends the module.
#
#   ./plugin.sh               after ./install.sh, and after rccl-net-plugin was taken out of modules= in job.sl: builds
#                             aws-ofi-nccl 1.19.2 into env/aws-ofi-nccl. Then ./install.sh --pack again, if you pack
#   source plugin.sh FILE     in job.sl, which finds the plugin there: sets what the module would set

set -euo pipefail

if [[ ${BASH_SOURCE[0]} != "$0" ]]; then
    # OLCF's values, strongly recommended there; README explains those that somebody may want to change.
    # https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#manual-rccl-network-plugin-configuration-not-recommended
    export NCCL_NET_PLUGIN=$1 NCCL_CROSS_NIC=1 NCCL_NET_GDR_LEVEL=PHB NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
    export HSA_FORCE_FINE_GRAIN_PCIE=1 FI_MR_CACHE_MONITOR=kdreg2 FI_CXI_DISABLE_HOST_REGISTER=1
    export FI_CXI_DEFAULT_CQ_SIZE=131072 FI_CXI_DEFAULT_TX_SIZE=2048 FI_CXI_RX_MATCH_MODE=hybrid
    export FI_CXI_RDZV_PROTO=alt_read FI_CXI_RDZV_EAGER_SIZE=0 FI_CXI_RDZV_THRESHOLD=0 FI_CXI_RDZV_GET_MIN=0
    return
fi

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=common.sh
source "$here/common.sh"
modules=()
# Of job.sl that line alone, which shellcheck cannot follow.
# shellcheck source=/dev/null
source <(grep '^modules=' "$here/job.sl")

release=https://github.com/aws/aws-ofi-nccl/releases/download/v1.19.2/aws-ofi-nccl-1.19.2.tar.gz
libfabric=/opt/cray/libfabric/2.3.1
[[ -x $here/env/bin/python ]] || fail "no environment at $here/env: run ./install.sh first"
load_modules "${modules[@]}"
[[ -n ${ROCM_PATH:-} ]] || fail "ROCM_PATH is not set: is rocm among the modules of job.sl?"
[[ -d $libfabric ]] || fail "no $libfabric; there is: $(echo /opt/cray/libfabric/*) - edit libfabric= in plugin.sh"

prefix=$(cd -P "$here/env" && pwd)/aws-ofi-nccl
rm -rf "$prefix"
sources=$(mktemp -d)
trap 'rm -rf "$sources"' EXIT
echo "fetching and building $release (minutes)"
curl --fail --silent --show-error --location "$release" | tar -xz -C "$sources" || fail "not fetched (above): check the network" 1
# With the system's libfabric and for AMD's GPUs, as OLCF builds it; into the environment, so that it is packed with it.
# https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#manual-rccl-network-plugin-configuration-not-recommended
(
    cd "$sources"/aws-ofi-nccl-*/ &&
        CC=gcc ./configure --with-libfabric="$libfabric" --with-rocm="$ROCM_PATH" --prefix="$prefix" >configure.out &&
        make >make.out && make install >install.out
) && [[ -e $prefix/lib/librccl-net.so ]] || fail "aws-ofi-nccl could not be built (above)" 1
echo "built $prefix/lib/librccl-net.so, which job.sl takes from now on; remove $prefix to go back to the module"
