#!/bin/bash
# Settings for large jobs. job.pbs sources this beyond 16 nodes, or with -v LARGE_SCALE=yes. $1: the nodes of the job.

set -euo pipefail

# ALCF lists these to be tried; all are untried here. Left out of its list: CCL_ALLREDUCE_SCALEOUT and CCL_BCAST
# (https://github.com/argonne-lcf/user-guides/issues/894: NaN losses at scale, and to be removed), and
# FI_MR_CACHE_MONITOR=disabled, which contradicts its minimal set. So is FI_CXI_OFLOW_BUF_SIZE=8388608: the system's own value
# is larger, 12582912 (users' notes, August 2026).
# In their order: a longer completion queue, against "Cassini Event Queue overflow detected", and how full it may be before
# senders wait; matching in software when the network card's list is full.
# Seconds between mpiexec's questions whether a node lives, and for the answer; seconds for all ranks to meet. How much GPU
# memory of other ranks is kept mapped.
# https://docs.alcf.anl.gov/aurora/data-science/frameworks/oneCCL/
export FI_CXI_DEFAULT_CQ_SIZE=1048576
export FI_CXI_CQ_FILL_PERCENT=30
export FI_CXI_RX_MATCH_MODE=hybrid
export PALS_PING_PERIOD=240
export PALS_RPC_TIMEOUT=240
export CCL_KVS_CONNECTION_TIMEOUT=600
export CCL_ZE_CACHE_OPEN_IPC_HANDLES_THRESHOLD=1024

if (($1 > 1024)); then
    # The ranks find each other by MPI: ALCF may need it beyond 1024 nodes. It fails unless MPI was started, as train.py does
    # (a user saw both in September 2026).
    # https://docs.alcf.anl.gov/aurora/data-science/frameworks/frameworks/
    export CCL_KVS_MODE=mpi
fi
