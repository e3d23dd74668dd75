#!/bin/bash
# What happens around the launch: modules, caches, nodes, what the job prints, how it ends. Only sourced; nothing here is edited.

set -euo pipefail

fail() { # MESSAGE [EXIT CODE]. 3, the default, means as for train.py: nothing was started.
    echo "error: $1" >&2
    exit "${2:-3}"
}

# Packages in ~/.local, or in a PYTHONPATH of yours, would come before the environment's. Modules may set it anew.
# https://docs.python.org/3/using/cmdline.html#envvar-PYTHONNOUSERSITE
unset PYTHONPATH
export PYTHONNOUSERSITE=1

# MODULE...: loads them one after the other, since what exists can depend on what is loaded. Sets loaded, their names.
load_modules() {
    local name
    loaded=$*
    command -v module >/dev/null || fail "no module command: is this Frontier?"
    set +u # module functions read unset variables
    module --quiet reset || fail "module reset failed: log in anew"
    for name in "$@"; do
        module is-avail "$name" || fail "no module $name; there is: $(module -t avail "${name%%/*}" 2>&1 | grep -v ':$' |
            tr '\n' ' ' || true)- edit modules= in job.sl and run ./install.sh again"
        module load "$name" || fail "module load $name failed (above): edit modules= in job.sl and run ./install.sh again"
    done
    set -u
    # The libraries of cpe/26.03: it is not Frontier's default, and the system's own would be taken.
    # https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#installing-pytorch
    export LD_LIBRARY_PATH=${CRAY_LD_LIBRARY_PATH:-}:${LD_LIBRARY_PATH:-}
}

# ---- for jobs ---------------------------------------------------------------------------------------------------

# How often Slurm has started this job again, and how often it may: a job that can never end must not come back for ever.
restarts=${SLURM_RESTART_COUNT:-0} max_restarts=20
# Bash evaluates what stands in a variable that it computes with, commands too: whole numbers alone.
for name in SLURM_RESTART_COUNT SLURM_JOB_NUM_NODES SLURM_NTASKS_PER_NODE SLURM_CPUS_PER_TASK; do
    value=${!name:-0}
    [[ $value =~ ^(0|[1-9][0-9]{0,17})$ ]] || fail "$name=$(printf %q "${value:0:80}"), but should be a whole number"
done

# Sets variables for the ranks, and environment. Makes every node ready: cache directories, the packed environment on its NVMe.
prepare_job() {
    # Caches of compiled kernels, in each node's /tmp: on NFS, in the home directory, MIOpen meets disk I/O errors. The name has
    # user and job, so that two jobs on a node do not meet.
    # https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#multinode-scripts
    local caches=/tmp/$USER-$SLURM_JOB_ID
    export MIOPEN_USER_DB_PATH=$caches/miopen MIOPEN_CUSTOM_CACHE_DIR=$caches/miopen
    # What --compile writes.
    # https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_configuration_tutorial.html
    export TORCHINDUCTOR_CACHE_DIR=$caches/inductor TRITON_CACHE_DIR=$caches/triton

    # What your own training downloads (HF_HOME holds HF_DATASETS_CACHE): on Orion, since the home directory has 50 GB.
    # https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#dataset-cache
    export HF_HOME=${HF_HOME:-$PWD/cache/huggingface} TORCH_HOME=${TORCH_HOME:-$PWD/cache/torch}

    # Compute nodes reach the internet through this proxy only. all_proxy=socks:// is left out: httpx, which Hugging Face uses,
    # refuses it; with httpx[socks] it takes socks5://. no_proxy is without OLCF's "*." and "/8": Python does not read them.
    # https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#proxy-settings
    unset all_proxy ALL_PROXY
    export http_proxy=http://proxy.ccs.ornl.gov:3128/ https_proxy=http://proxy.ccs.ornl.gov:3128/
    export ftp_proxy=ftp://proxy.ccs.ornl.gov:3128/ no_proxy=localhost,127.0.0.1,.ccs.ornl.gov,.frontier.olcf.ornl.gov

    # Under sbatch --export=NONE srun would start the ranks without PATH and the variables above.
    # https://slurm.schedmd.com/sbatch.html#OPT_export
    export SLURM_EXPORT_ENV=ALL

    # What sbatch has taken along from a shell in another job: srun would bind by that job's mask, and refuse its words of memory.
    # https://slurm.schedmd.com/srun.html#SECTION_INPUT-ENVIRONMENT-VARIABLES
    unset "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_PER_@}"
    # And share out the GPUs of that one (salloc --gpus=8): what the ranks get is said below, to srun.
    unset SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_GPUS_PER_SOCKET
    unset SLURM_GPU_BIND SLURM_NTASKS_PER_GPU SLURM_CPUS_PER_GPU

    # Users of MPI on GPUs export 1. With 1 MPI would end every rank at its start: install.sh builds mpi4py without the library
    # that 1 needs (GTL). The core hands no tensor to MPI.
    # https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#mpich-gpu-support-enabled
    export MPICH_GPU_SUPPORT_ENABLED=0

    # CPU threads of a rank: its own cores.
    # https://docs.pytorch.org/docs/stable/threading_environment_variables.html
    export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

    local before=$SECONDS packed=''
    environment=$PWD/env
    if [[ -e env.tar.gz ]]; then # ./install.sh --pack
        packed=/mnt/bb/$USER/env-$SLURM_JOB_ID
        environment=$packed
        [[ -d /mnt/bb/$USER ]] || fail "no /mnt/bb/$USER on $HOSTNAME: submit with --constraint=nvme, or remove env.tar.gz"
        # --preserve keeps times and modes, --force overwrites what an earlier start has left. After a failure the nodes hold
        # parts of files, so its exit code counts. https://docs.olcf.ornl.gov/software/python/sbcast_conda.html
        sbcast --preserve --force env.tar.gz "$packed.tar.gz" ||
            fail "a node did not get env.tar.gz (above): submit again, or remove env.tar.gz"
    else
        [[ -x env/bin/python ]] || fail "no environment at $PWD/env: run ./install.sh first"
    fi
    # One process on each node, with all cores of its ranks, for unpacking; a node that fails ends it. srun --help
    srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="$((SLURM_NTASKS_PER_NODE * SLURM_CPUS_PER_TASK))" \
        --kill-on-bad-exit=1 ./node.sh "$packed" || fail "a node could not be made ready (above): submit again"
    prepare_seconds=$((SECONDS - before))
}

# The four lines at the top of the log.
describe_job() {
    local versions hosts
    versions=$("$environment/bin/python" -c '
from importlib.metadata import version
from platform import python_version
print(f"python={python_version()}", *(f"{name}={version(name)}" for name in ("torch", "mpi4py", "ddp-core")))
' 2>&1) || fail "$environment is not whole (${versions##*$'\n'}): run ./install.sh again"
    # mpi4py does not survive another MPI, nor PyTorch another ROCm.
    [[ $(<"$environment/.install") == *" | $loaded | "* ]] ||
        fail "$environment is unfinished, or was made with other modules than $loaded: run ./install.sh again, as before"
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    echo "job=$SLURM_JOB_ID restarts=$restarts slurm=$(srun --version) $versions"
    echo "nodes=$SLURM_JOB_NUM_NODES ranks=$SLURM_NTASKS ranks_per_node=$SLURM_NTASKS_PER_NODE" \
        "cores_per_rank=$SLURM_CPUS_PER_TASK gpus_per_node=${SLURM_GPUS_ON_NODE:-unknown}"
    echo "hosts=${hosts//$'\n'/,} master=${hosts%%$'\n'*}:free" # rank 0 chooses the port
    echo "environment=$environment prepare_seconds=$prepare_seconds rccl_net=$NCCL_NET rccl_plugin=${NCCL_NET_PLUGIN:-none}"
}

# CODE [ARGUMENT of job.sl]...: the ranks' exit code ends the job. After 75 (stopped and saved) the job comes back.
finish() {
    local code=$1 resume job
    shift
    ((code == 75)) || exit "$code"
    # The last job of an array has the array's own number, by which all would be requeued: 36_3 names one of them.
    # https://slurm.schedmd.com/job_array.html
    job=$SLURM_JOB_ID
    [[ ${SLURM_ARRAY_JOB_ID:-} != "$job" ]] || job+=_$SLURM_ARRAY_TASK_ID
    # The command that resumes by hand, without --fresh, which would put aside what this job has done.
    resume="sbatch job.sl $(printf '%q ' --run-dir "runs/$SLURM_JOB_ID" "$@")"
    resume="to resume, with the other options that this job had: ${resume/ --fresh / }"
    if [[ ${SLURM_JOB_QOS:-} == debug ]]; then
        # https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#debug-quality-of-service-class
        echo "stopped and saved. OLCF prohibits chains of debug jobs, so this one does not come back; $resume"
    elif ((restarts >= max_restarts)); then
        echo "error: stopped and saved, but this was restart $restarts of $max_restarts (max_restarts); $resume" >&2
    else
        # Printed first: the requeue ends this shell. "Incomplete" leaves a cancelled job cancelled.
        echo "stopped and saved: job $SLURM_JOB_ID goes back into the queue, and resumes when it starts"
        scontrol requeue Incomplete "$job" ||
            echo "error: Slurm did not requeue the job (above); $resume" >&2
    fi
    exit 75
}
