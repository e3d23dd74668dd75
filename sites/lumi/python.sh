#!/bin/bash -l
# One Python in the container, that sees all the GPUs it was given: to try things, or to train as one process.
#
#   srun --nodes=1 --ntasks=1 --gpus=8 ./python.sh -c 'import torch; print(torch.cuda.device_count())'
#   srun --nodes=1 --ntasks=1 --gpus=1 ./python.sh train.py --epochs 3
#
# in an allocation, as from salloc, or with --account, --partition and --time of its own.

set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# CPU threads: a GCD's share of the cores, unless srun --cpus-per-task said more. By itself PyTorch takes all it sees: 112.
# https://docs.pytorch.org/docs/stable/threading_environment_variables.html
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-7}

mkdir -p "$MIOPEN_USER_DB_PATH" "$MIOPEN_CUSTOM_CACHE_DIR" "$TORCHINDUCTOR_CACHE_DIR" "$TRITON_CACHE_DIR"
exec singularity exec "${singularity_flags[@]}" "$image" "$python" "$@"
