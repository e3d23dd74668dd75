#!/bin/bash
# What RCCL and libfabric need with a network plugin that ./install.sh --build-plugin has built. The module rccl-net-plugin
# sets the like by itself, and job.sl sources this file in its place:  source rccl-env.sh LIBRARY
# The values are OLCF's, who recommends them strongly, the reasons mostly HPE's, whose network it is.

set -euo pipefail

# The plugin's file. Without it RCCL would look for a plugin elsewhere, and find none.
# https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#manual-rccl-network-plugin-configuration-not-recommended
export NCCL_NET_PLUGIN=$1

# A ring of GCDs may leave a node by another of its four network cards than it came in by: faster in large jobs.
# https://github.com/HewlettPackard/shs-ccl-docs/blob/438fcce/rccl/rccl_tuning_guide.md
export NCCL_CROSS_NIC=1

# The network card reads and writes a GCD's memory itself. The first one to take away from a job that hangs or crashes, as
# an older text of OLCF's says of it.
# https://github.com/HewlettPackard/shs-ccl-docs/blob/438fcce/rccl/rccl_tuning_guide.md
export NCCL_NET_GDR_LEVEL=PHB

# RCCL's own first connections, over all four Slingshot interfaces; hsn0 alone, if they hang.
# https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#manual-rccl-network-plugin-configuration-not-recommended
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3

# GCDs may reach all of each other's memory over PCIe.
# https://github.com/HewlettPackard/shs-ccl-docs/blob/438fcce/rccl/rccl_tuning_guide.md
export HSA_FORCE_FINE_GRAIN_PCIE=1

# How libfabric notices that memory which it has registered is gone. Never memhooks, which can deadlock with the plugin.
# https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#manual-rccl-network-plugin-configuration-not-recommended
export FI_MR_CACHE_MONITOR=kdreg2

# libfabric does not call ROCm to register its buffers in host memory, which can deadlock with RCCL.
# https://github.com/HewlettPackard/shs-ccl-docs/blob/438fcce/rccl/rccl_tuning_guide.md
export FI_CXI_DISABLE_HOST_REGISTER=1

# Room for many operations that are done, and for many that are on their way: large jobs need it.
# https://github.com/HewlettPackard/shs-ccl-docs/blob/438fcce/rccl/rccl_tuning_guide.md
export FI_CXI_DEFAULT_CQ_SIZE=131072
export FI_CXI_DEFAULT_TX_SIZE=2048

# Long messages go by another protocol, faster in large jobs. The job needs --network=disable_rdzv_get for it.
# https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#alternative-rendezvous-protocol
export FI_CXI_RDZV_PROTO=alt_read

# Messages of every size go that way, and no part of one before the receiver is ready. They belong to alt_read.
# https://github.com/HewlettPackard/shs-ccl-docs/blob/438fcce/rccl/rccl_tuning_guide.md
export FI_CXI_RDZV_EAGER_SIZE=0
export FI_CXI_RDZV_THRESHOLD=0
export FI_CXI_RDZV_GET_MIN=0

# The network card matches messages, and software does when the card has no more room for it.
# https://github.com/HewlettPackard/shs-ccl-docs/blob/438fcce/rccl/rccl_tuning_guide.md
export FI_CXI_RX_MATCH_MODE=hybrid
