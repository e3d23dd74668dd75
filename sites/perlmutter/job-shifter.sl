#!/bin/bash -l
# perlmutter: one rank per A100 on the nodes of Perlmutter, in NERSC's PyTorch container. Beside job.sl it differs in `image`,
# the modules of Shifter, and where Python is.
#
#   sbatch job-shifter.sl [flags of train.py]          submit, from this directory
#   sbatch job-shifter.sl --run-dir runs/JOB [flags]   resume what job JOB left
#   scancel --signal=USR1 JOB                          save now, stop, and go back into the queue
#   METRICS="tensorboard wandb" sbatch job-shifter.sl  write metrics beside the training (README.md)
#
# -l above: a login shell has shifter in its PATH, however the job was submitted.

# ---- your project: the lines to edit ----------------------------------------------------------------------------

# EDIT: the project that pays, as in Iris.
# https://docs.nersc.gov/jobs/policy/
#SBATCH --account=m1234

# EDIT: what kind of job. debug starts soon and is short; regular is for production; preempt is charged less and may be
# stopped for others, which costs this program nothing: it comes back and goes on; shared is for 1 or 2 GPUs of a node.
# https://docs.nersc.gov/jobs/policy/ https://docs.nersc.gov/jobs/examples/#preemptible-jobs
#SBATCH --qos=debug

# EDIT: nodes with GPUs; "gpu&hbm80g", in quotes, for those whose GPUs have 80 GB in place of 40.
# https://docs.nersc.gov/jobs/policy/ (hbm80g: unverified, seen in public job scripts)
#SBATCH --constraint=gpu

# EDIT: nodes; ranks = nodes x 4 must divide the global batch (96 unless a flag says otherwise).
# https://slurm.schedmd.com/sbatch.html#OPT_nodes
#SBATCH --nodes=2

# EDIT: time limit of one start; a run that needs more of them is requeued and goes on. debug allows 30 minutes, regular
# and shared 2 days. https://github.com/doe-iri/iri-facility-api-python/issues/49
#SBATCH --time=00:30:00

# ---- Perlmutter: nothing to edit from here on, but `image` when NERSC has a newer one ------------------------------

# One rank for each of the four A100.
# https://github.com/NERSC/sc25-dl-tutorial/blob/6f7a074964e8015e371bc4aefa80d1f1de7e4d3b/submit_pm_dp.sh
#SBATCH --ntasks-per-node=4

# All GPUs of a node. Per node, not per task: each rank sees all four and takes its own, because GPUs that are hidden
# from each other have kept NCCL from copying directly between them. https://github.com/NVIDIA/nccl/issues/1066
# https://github.com/NERSC/sc25-dl-tutorial/blob/6f7a074964e8015e371bc4aefa80d1f1de7e4d3b/submit_pm_dp.sh
#SBATCH --gpus-per-node=4

# A quarter of the node a rank: its CPU has 64 cores, and Slurm counts the 2 hardware threads of each.
# https://github.com/NERSC/sc25-dl-tutorial/blob/6f7a074964e8015e371bc4aefa80d1f1de7e4d3b/submit_pm_dp.sh
#SBATCH --cpus-per-task=32

# Names the log, below.
# https://slurm.schedmd.com/sbatch.html#OPT_job-name
#SBATCH --job-name=train

# Beside this script: a job whose log directory does not exist dies without a word.
# https://slurm.schedmd.com/sbatch.html#OPT_output
#SBATCH --output=%x-%j.out

# A requeued job writes to the same log; truncating it would erase what happened before.
# https://slurm.schedmd.com/sbatch.html#OPT_open-mode
#SBATCH --open-mode=append

# After a node failure or a preemption Slurm starts this script again, under the same job id.
# https://slurm.schedmd.com/sbatch.html#OPT_requeue
#SBATCH --requeue

# USR1 to every rank 120 s before the time limit (Slurm may be 60 s early): they agree, save and exit with 75. Without
# "B:", which would send it to this shell, that has nothing to do but to wait for them.
# https://slurm.schedmd.com/sbatch.html#OPT_signal
#SBATCH --signal=USR1@120

set -euo pipefail

fail() {
    echo "error: $1" >&2
    exit 3 # as train.py: nothing was started
}

# SIGTERM, of a preemption or of scancel, is for the ranks. Should it come to this shell too, it waits for them all the same.
trap 'echo "SIGTERM: waiting for the ranks to save"' TERM

# How often Slurm has started this job again; it is not set in the first start.
# https://slurm.schedmd.com/sbatch.html#OPT_SLURM_RESTART_COUNT
restarts=${SLURM_RESTART_COUNT:-0}
# It goes back into the queue at most so often: a job that can never end shall not come back for ever.
max_restarts=20

# sbatch has copied this script elsewhere, so the files beside it are found from the directory of submission.
[[ -f train.py ]] || fail "no train.py in $PWD: submit from the site's directory, or with sbatch --chdir=DIR"
# Its Python is the image's, which this node does not have: it is a link that leads somewhere in the container only.
python=$PWD/.venv-shifter/bin/python
[[ -e .venv-shifter/.install ]] || fail "no virtual environment at $PWD/.venv-shifter: run ./install.sh --shifter first"

# NERSC's build of NVIDIA's container of January 2026, with CUDA 13. install.sh reads this line: the same image.
# https://docs.nersc.gov/machinelearning/pytorch/#containers
image=nersc/pytorch:26.01.01

container=(
    shifter

    # Named here and not in an #SBATCH line, so that this script and the same words by hand do one thing; Slurm knows
    # --image only where Shifter has a plugin in it.
    # https://github.com/NERSC/shifter/blob/692d38cd6e35994bcd6e653df314abe1f34d0a6f/doc/command/shifter.rst
    --image="$image"

    # What the node adds to the image: the driver's libraries, and NCCL with the plugin that carries it over Slingshot,
    # for CUDA 13; an image with CUDA 12, as 25.06.01, wants gpu,nccl-plugin. Without the second NCCL goes over TCP.
    # https://github.com/NERSC/sc25-dl-tutorial/blob/6f7a074964e8015e371bc4aefa80d1f1de7e4d3b/submit_pm_dp.sh
    # (nccl-cu13-plugin: unverified, seen in public job scripts of 2026)
    --module="gpu,nccl-cu13-plugin"
)

# Under sbatch --export=NONE srun would start the ranks without PATH and without the variables below; the manual says so.
# https://slurm.schedmd.com/sbatch.html#OPT_export
export SLURM_EXPORT_ENV=ALL

# Of packages in ~/.local, which Shifter mounts and `pip install --user` fills, none: they were built for another Python, and
# would come before what install.sh has put into .venv-shifter.
# https://docs.python.org/3/using/cmdline.html#envvar-PYTHONNOUSERSITE
export PYTHONNOUSERSITE=1

# CPU threads of a rank: its cores, which Slurm counts twice. What was exported at submission stands.
# https://docs.pytorch.org/docs/stable/threading_environment_variables.html
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((SLURM_CPUS_PER_TASK + 1) / 2))}

# How libfabric learns that memory it has registered was given back: the default monitor hangs under NCCL (unverified why).
# https://github.com/NERSC/sc25-dl-tutorial/blob/6f7a074964e8015e371bc4aefa80d1f1de7e4d3b/submit_pm_dp.sh
export FI_MR_CACHE_MONITOR=userfaultfd

# Rank 0 runs on the job's first node. The node list is compressed ("nid[001001-001002]"), and scontrol expands it.
# https://slurm.schedmd.com/scontrol.html#OPT_hostnames
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*}

# Rank 0's port, from the job id: two jobs on a node take the same one only if their ids differ by a multiple of 10000,
# and then the ranks notice. 20000-29999 is below the ports that Linux hands to outgoing connections, 32768-60999.
# https://docs.kernel.org/networking/ip-sysctl.html
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

train_flags=(
    # Named, not found: a node without a working GPU is an error, never a slow run on its CPU.
    # python train.py --help
    --device cuda

    # A requeued job keeps its id, and so finds its run again. A first start refuses an older run; --run-dir overrides this.
    # python train.py --help
    --new-run-dir "runs/$SLURM_JOB_ID"
)

srun_flags=(
    # srun of Slurm 22.05 and 23.02 does not take it from the job, and a rank would not be held to its quarter of the node.
    # https://github.com/SchedMD/slurm/blob/slurm-22-05-0-1/RELEASE_NOTES
    --cpus-per-task="$SLURM_CPUS_PER_TASK"

    # Each rank stays on its own cores, the first on 0-15: what the order of the GPUs in export_DDP_vars.sh counts on.
    # https://slurm.schedmd.com/srun.html#OPT_cpu-bind
    --cpu-bind=cores

    # A rank that died alone ends the job, in place of the time limit.
    # https://slurm.schedmd.com/srun.html#OPT_kill-on-bad-exit
    --kill-on-bad-exit=1

    # Ranks that are left 60 s after the first one ended, well or not, hang: end them.
    # https://slurm.schedmd.com/srun.html#OPT_wait
    --wait=60
)

versions=$("${container[@]}" "$python" -c '
from importlib.metadata import version
from platform import python_version
print(f"python={python_version()}", *(f"{name}={version(name)}" for name in ("torch", "ddp-core")))
' 2>&1) || fail "$image does not start, or $PWD/.venv-shifter is not whole (${versions##*$'\n'}): run ./install.sh --shifter again"
echo "job=$SLURM_JOB_ID restarts=$restarts slurm=$(srun --version) $versions image=$image"
echo "nodes=$SLURM_JOB_NUM_NODES ranks=$SLURM_NTASKS ranks_per_node=$SLURM_NTASKS_PER_NODE cores_per_rank=$SLURM_CPUS_PER_TASK gpus_per_node=${SLURM_GPUS_PER_NODE:-0}"
echo "hosts=${hosts//$'\n'/,} master=$MASTER_ADDR:$MASTER_PORT"

# Metrics, if they were asked for: a process beside the ranks, on this node, which reads what rank 0 writes.
metrics=''
if [[ -n ${METRICS:-} ]]; then
    read -r -a backends <<<"$METRICS"
    run_dir=$("${container[@]}" "$python" -m ddp_core.find_run "${train_flags[@]}" "$@")
    "${container[@]}" "$python" metrics.py --follow "${backends[@]/#/--}" "$run_dir" &
    metrics=$!
fi

code=0
# What the user passed comes last: of a flag given twice, the last one counts.
# shellcheck disable=SC2016 # "$@" is for the shell of the rank
srun "${srun_flags[@]}" "${container[@]}" bash -c 'source ./export_DDP_vars.sh && exec "$@"' rank \
    "$python" train.py "${train_flags[@]}" "$@" || code=$?

# It has 20 s to write what is left, and whether it could is of no consequence here.
if [[ -n $metrics ]]; then
    kill -TERM "$metrics" 2>/dev/null || true
    for ((second = 0; second < 20; second++)); do
        kill -0 "$metrics" 2>/dev/null || break
        sleep 1
    done
    if kill -KILL "$metrics" 2>/dev/null; then echo "metrics: ended after 20 s, before all was written"; fi
fi
((code == 75)) || exit "$code"

# 75: stopped early and saved, on all ranks. A job that is still RUNNING for Slurm, as in the grace time of a preemption, goes
# back into the queue; one that was cancelled is COMPLETING, and stays cancelled.
state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) || state=unknown
# The command that resumes by hand. Without --fresh, which would put aside what this job has done.
resume="sbatch job-shifter.sl $(printf '%q ' --run-dir "runs/$SLURM_JOB_ID" "$@")"
resume=${resume/ --fresh / }
if ((restarts >= max_restarts)); then
    echo "error: stopped and saved, but this was restart $restarts of $max_restarts (max_restarts); to resume: $resume" >&2
elif [[ $state != RUNNING ]]; then
    echo "stopped and saved: job $SLURM_JOB_ID is $state and does not come back; to resume: $resume"
else
    # Said before: the requeue ends this shell.
    echo "stopped and saved: job $SLURM_JOB_ID goes back into the queue, and resumes when it starts"
    scontrol requeue Incomplete "$SLURM_JOB_ID" || echo "error: Slurm did not requeue the job (above); to resume: $resume" >&2
fi
exit 75
