#!/bin/bash
# What one rank needs before Python starts: mpiexec runs `rank.sh RANKS_PER_DEVICE COMMAND...`, and COMMAND takes its place.

set -euo pipefail

ranks_per_device=$1 && shift

# Both mean "save and stop" to train.py, but would kill it before it listens; that they are ignored is inherited.
trap '' USR1 TERM

# Bash evaluates what stands in a variable that it computes with, commands too: whole numbers alone.
if [[ ! $PALS_RANKID/$PALS_LOCAL_RANKID =~ ^(0|[1-9][0-9]{0,8})/(0|[1-9][0-9]{0,8})$ ]]; then
    echo "error: PALS_RANKID or PALS_LOCAL_RANKID is no whole number: start this by mpiexec, as job.pbs does" >&2
    exit 3
fi

# Caches are made on every node by whichever rank is first, under a name that no other job has. Code is loaded from there: the
# folder is this user's alone, and not what somebody made before.
if ! mkdir -m 700 "$NODE_DIR" 2>/dev/null && [[ $(stat -c '%u %a %F' "$NODE_DIR") != "$UID 700 directory" ]]; then
    echo "error: $NODE_DIR on $HOSTNAME is not this user's alone (mode 700): remove it, or submit a new job" >&2
    exit 3
fi
mkdir -p "$NODE_DIR/neo" "$NODE_DIR/inductor" "$NODE_DIR/triton"

# common.sh signals rank 0 by this number, which it keeps when COMMAND takes over.
((PALS_RANKID > 0)) || echo "$$" >"$NODE_DIR/rank0"

if [[ -n ${TORCH_LIB:-} ]]; then
    # Where common.sh found that torch does not load without.
    # https://docs.alcf.anl.gov/aurora/system-updates/
    export LD_LIBRARY_PATH=$TORCH_LIB:${LD_LIBRARY_PATH:-}
fi

if ((ranks_per_device > 1)); then
    # Neighbouring ranks share a tile, and each sees that one alone, as device 0, as in ALCF's script. With one rank a tile
    # there is no mask: a rank sees all twelve and takes the one with its local rank.
    # https://docs.alcf.anl.gov/aurora/data-science/frameworks/pytorch/
    export ZE_AFFINITY_MASK=$((PALS_LOCAL_RANKID / ranks_per_device))
fi

exec "$@"
