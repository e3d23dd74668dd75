#!/bin/bash
# What one rank needs before Python starts: mpiexec runs `rank.sh COMMAND...` once a rank, and COMMAND takes its place.
# It sets only what differs from rank to rank or must be made on every node; all else is job.pbs's.

set -euo pipefail

# Both mean "save and stop" to train.py, but are deadly before it listens; that they are ignored is inherited. job.pbs sends
# USR1 again and again, and TERM is what a launcher sends when another rank has failed: this one shall still say why.
trap '' USR1 TERM

# Caches are made on every node by whichever rank is first, under a name that no other job has: nothing is removed.
mkdir -p "$NODE_DIR/neo" "$NODE_DIR/inductor" "$NODE_DIR/triton"

# Rank 0 runs on the node of job.pbs, which signals it directly; it keeps this number when COMMAND takes over.
if ((PALS_RANKID == 0)); then
    echo "$$" >"$NODE_DIR/rank0"
fi

# Neighbouring ranks share a tile, and each sees that one alone, as device 0. With a rank a tile no mask is set: all twelve
# are visible, and the rank takes the one with its local rank.
if ((RANKS_PER_DEVICE > 1)); then
    # As ALCF's script for several ranks a tile does.
    # https://docs.alcf.anl.gov/aurora/data-science/frameworks/pytorch/
    export ZE_AFFINITY_MASK=$((PALS_LOCAL_RANKID / RANKS_PER_DEVICE))
fi

exec "$@"
