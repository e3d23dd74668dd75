#!/bin/bash
# What surrounds the launch: modules, Python, the first lines of the log, the way back into the queue. Only sourced.
# shellcheck disable=SC2034,SC2154 # it reads what job.sl has set (modules, software, launcher, program, ...), and sets more

set -euo pipefail

fail() { # exit code, message
    echo "error: $2" >&2
    exit "$1"
}

# Bash evaluates what stands in a variable that it computes with, commands too: whole numbers alone.
for name in SLURM_{RESTART_COUNT,JOB_ID,JOB_NUM_NODES,NTASKS,NTASKS_PER_NODE,CPUS_PER_TASK}; do
    value=${!name:-0}
    [[ $value =~ ^(0|[1-9][0-9]{0,17})$ ]] || fail 3 "$name=$(printf %q "${value:0:80}"), but should be a whole number"
done

# Those of job.sl's line modules=(...), and no others: with other modules the same Python may find other libraries.
# Nor what your shell has in PYTHONPATH, which would come before the virtual environment's packages.
load_modules() {
    unset PYTHONPATH
    ((${#modules[@]})) || return 0
    [[ $(type -t module) == function ]] || fail 3 "no module command on $HOSTNAME: use bash -l, or empty modules=() in job.sl"
    set +u # module functions read unset variables
    { module purge && module load "${modules[@]}"; } || fail 3 "a module did not load (above): edit modules=() in job.sl"
    set -u
}

# Checks what was asked for. Sets venv, and run_python: the command that starts its Python, in the image where there is one.
prepare() {
    local install
    [[ ${SLURM_JOB_NUM_NODES:-} ]] || fail 3 "job.sl is a batch script: submit it with sbatch"
    load_modules
    # With --ntasks alone Slurm decides how many ranks a node has, and may put all of them on one.
    ((${SLURM_NTASKS:-0} == SLURM_JOB_NUM_NODES * ${SLURM_NTASKS_PER_NODE:-0})) ||
        fail 3 "ntasks=${SLURM_NTASKS:-none} leaves open how many ranks a node has: pass sbatch --nodes and --ntasks-per-node"
    [[ ${SLURM_CPUS_PER_TASK:-} ]] || fail 3 "job.sl has lost its line --cpus-per-task"
    [[ $launcher == srun || $launcher == torchrun ]] || fail 3 "launcher=$launcher, but should be srun or torchrun"
    case $software in
    venv) venv=$PWD/.venv install=./install.sh ;;
    "apptainer --nv" | "apptainer --rocm") venv=$PWD/.venv-apptainer install="./install.sh --image IMAGE" ;;
    *) fail 3 "software=$software, but should be venv, apptainer --nv or apptainer --rocm" ;;
    esac
    [[ -f $program ]] || fail 3 "program=$program, but there is no such file in $PWD"
    [[ -e $venv/.install ]] || fail 3 "no virtual environment at $venv: run $install first"
    [[ $(<"$venv/.install") == *"modules=(${modules[*]})" ]] ||
        fail 3 "$venv is unfinished, or was made with other modules than (${modules[*]}): run $install again"
    run_python=("$venv/bin/python")
    [[ $software != venv ]] || return 0
    command -v apptainer >/dev/null || fail 3 "no apptainer on $HOSTNAME: add its module to modules=()"
    local flags=(
        # --nv or --rocm: the driver's libraries and devices in the image.
        "${software#apptainer }"
        # This directory, which not every cluster shows in an image by itself; the one of --data-dir wants another such line.
        # https://apptainer.org/docs/user/latest/bind_paths_and_mounts.html
        --bind "$PWD"
        # And the ranks start in it. apptainer exec --help
        --pwd "$PWD"
    )
    run_python=(apptainer --quiet exec "${flags[@]}" image.sif "${run_python[@]}")
}

# Instead of the ranks, srun starts a torchrun on each node, with the cores of all its ranks.
use_torchrun() {
    tasks_per_node=1 cores=$((SLURM_CPUS_PER_TASK * SLURM_NTASKS_PER_NODE))
    local flags=(
        # All nodes: fewer would start without the others. torchrun --help
        --nnodes="$SLURM_JOB_NUM_NODES"
        # Ranks on each. torchrun --help
        --nproc-per-node="$SLURM_NTASKS_PER_NODE"
        # The torchruns meet at the first node, and need no other service. torchrun --help
        --rdzv-backend=c10d
        # Where that is. The ranks' own port is a free one, which torchrun tells them. torchrun --help
        --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"
        # Other jobs, and other starts of this one, do not join. torchrun --help
        --rdzv-id="$SLURM_JOB_ID.$restarts"
        # A failed rank is Slurm's to start again: torchrun would do it for every cause. torchrun --help
        --max-restarts=0
        # What it starts is a command, not a Python file. torchrun --help
        --no-python
    )
    # TERM: torchrun sends it when another rank has failed, and would end one that has not yet said what is wrong. Not by
    # `env --ignore-signal`, which RHEL 8's coreutils do not know. https://www.gnu.org/software/coreutils/
    # shellcheck disable=SC2016 # "$@" is for the shell of the rank
    command=("${run_python[@]}" agent.py "${flags[@]}" sh -c 'trap "" TERM && exec "$@"' rank "$venv/bin/python" "$program")
}

# How often Slurm has started this job again, and how often it may: a job that can never end must not come back for ever.
# https://slurm.schedmd.com/sbatch.html#OPT_SLURM_RESTART_COUNT
restarts=${SLURM_RESTART_COUNT:-0} max_restarts=20

# The first lines of the log.
describe_job() {
    local versions
    versions=$("${run_python[@]}" -c '
from importlib.metadata import version
from platform import python_version
print(f"python={python_version()}", *(f"{name}={version(name)}" for name in ("torch", "ddp-core")))
' 2>&1) || fail 3 "$venv is not whole (${versions##*$'\n'}): run ./install.sh again"
    echo "job=$SLURM_JOB_ID restarts=$restarts slurm=$(srun --version) ${versions##*$'\n'}"
    echo "software=${software%% *} launcher=$launcher program=$program modules=${modules[*]:-none}"
    echo "nodes=$SLURM_JOB_NUM_NODES ranks=$SLURM_NTASKS ranks_per_node=$SLURM_NTASKS_PER_NODE" \
        "cores_per_rank=$SLURM_CPUS_PER_TASK gpus_per_node=${SLURM_GPUS_PER_NODE:-0}"
    echo "hosts=${hosts//$'\n'/,} master=$MASTER_ADDR:$MASTER_PORT"
    printf -v began '%(%s)T' -1 # the ranks start now
}

# The end of job.sl: the ranks' exit code, and job.sl's arguments.
finish() {
    local code=$1 record resume job
    shift
    # Apptainer without setuid mounts the image by a process, squashfuse, that Slurm's USR1 ends with all others of the step but
    # the ranks. They save, but leave with a bus error, 135, when their libraries are gone; what rank 0 wrote last is the truth,
    # unless an earlier start has written it.
    if [[ $software != venv && $code -eq 135 ]]; then
        record=$("${run_python[@]}" -m ddp_core.find_run "${train_flags[@]}" "$@")/run.jsonl && [[ -e $record ]] || exit "$code"
        (($(stat -c %Y "$record") < began)) || [[ $(tail -n 1 "$record") != *'"exit_code":75'* ]] || code=75
    fi
    ((code == 75)) || exit "$code"

    # The last job of an array has the array's own number, by which all would be requeued: 36_3 names one of them.
    # https://slurm.schedmd.com/job_array.html
    job=$SLURM_JOB_ID
    [[ ${SLURM_ARRAY_JOB_ID:-} != "$job" ]] || job+=_$SLURM_ARRAY_TASK_ID
    # 75: stopped early and saved, on all ranks. This shell has not seen the USR1; a SIGTERM, as from scancel, has ended it
    # before it comes here, and "Incomplete" keeps even then a cancelled job from coming back.
    # The command that resumes by hand. Without --fresh, which would put aside what this job has done.
    resume="sbatch job.sl $(printf '%q ' --run-dir "runs/$SLURM_JOB_ID" "$@")"
    resume="to resume, with the other options that this job had: ${resume/ --fresh / }"
    if ((restarts >= max_restarts)); then
        echo "error: stopped and saved, but this was restart $restarts of $max_restarts; $resume" >&2
    else
        # Said before: the requeue ends this shell.
        echo "stopped and saved: job $SLURM_JOB_ID goes back into the queue, and resumes when it starts"
        scontrol requeue Incomplete "$job" || echo "error: Slurm did not requeue it (above); $resume" >&2
    fi
    exit 75
}
