#!/bin/bash -l
# One Python in the container (conda-python-simple in LUMI's older containers): to try things, or to train as one process.
#
#   srun --nodes=1 --ntasks=1 --cpus-per-task=56 --gpus=8 ./python.sh -c 'import torch; print(torch.cuda.device_count())'
#   srun --nodes=1 --ntasks=1 --cpus-per-task=7 --gpus=1 ./python.sh train.py --epochs 3
#
# in an allocation, as from salloc, or with --account, --partition and --time of its own.

set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# CPU threads: as srun --cpus-per-task says. Without it Slurm gives one core, and PyTorch would start a thread for each of 64.
# https://docs.pytorch.org/docs/stable/threading_environment_variables.html
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

# Compilers load code from there: it is this user's alone, and not what somebody made before.
mkdir -m 700 "$cache" 2>/dev/null || [[ $(stat -c '%u %a %F' "$cache") == "$UID 700 directory" ]] ||
    fail "$cache on $HOSTNAME is not this user's alone (mode 700): remove it"
mkdir -p "$MIOPEN_USER_DB_PATH"
exec singularity exec "${singularity_flags[@]}" "$image" "$python" "$@"
