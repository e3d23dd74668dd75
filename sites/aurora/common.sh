#!/bin/bash
# The module and its PyTorch, for job.pbs and install.sh; for job.pbs how the ranks are watched, and when they are started again.
# Only sourced. For other modules edit modules=, then run install.sh again.

set -euo pipefail

fail() {
    echo "error: $1" >&2
    exit 3 # as train.py: nothing was started
}

# ---- the module and its PyTorch -------------------------------------------------------------------------------------

# Packages in a PYTHONPATH of yours would come before all others, and those in ~/.local before the module's (its torch, too).
# The module may set PYTHONPATH anew.
# https://docs.python.org/3/using/cmdline.html#envvar-PYTHONNOUSERSITE
unset PYTHONPATH
export PYTHONNOUSERSITE=1

# PyTorch 2.13 for Intel GPUs and mpi4py. Pinned: ALCF replaces it with each update of the machine.
# https://docs.alcf.anl.gov/aurora/data-science/frameworks/frameworks/
modules=(frameworks/2026.1.0)
load_modules() {
    [[ $(type -t module) == function ]] || fail "no module command: start this from a login shell (bash -l) on Aurora"
    set +u # module functions read unset variables
    module load "${modules[@]}" || {
        module --terse avail frameworks >&2 || true
        fail "the module does not load (above): write one of this list into common.sh, and run ./install.sh again"
    }
    set -u
}

# `import torch` of frameworks/2026.1.0 failed: "libglog.so.0: cannot open shared object file". The library is in the module's
# own lib folder, which is not searched. Whether ALCF has mended this is not known: tried without first.
need_torch() { # PYTHON
    local said lib
    said=$("$1" -c 'import torch' 2>&1) && return
    lib=$("$1" -c 'import sys; print(sys.base_prefix)' || true)/lib
    if LD_LIBRARY_PATH=$lib:${LD_LIBRARY_PATH:-} "$1" -c 'import torch' 2>/dev/null; then
        echo "note: torch is imported with LD_LIBRARY_PATH=$lib:..., as ALCF advises (${said##*$'\n'})"
        # rank.sh puts it before LD_LIBRARY_PATH, for the ranks alone: qsub and mpiexec keep the system's libraries.
        # https://docs.alcf.anl.gov/aurora/system-updates/
        export TORCH_LIB=$lib
    else
        fail "$1 cannot import torch (${said##*$'\n'}): run ./install.sh again"
    fi
}

# ---- for job.pbs: what PBS knows of this job ------------------------------------------------------------------------

max_relaunches=2 # after a failure that another start, on the same nodes, may survive
stop_before=180  # seconds before the time limit at which the ranks are told to save

fact() { sed -n "s/^ *$1 = //p" <<<"$facts" | head -n 1; }
seconds() { awk -F: '{ for (i = 1; i <= NF; i++) s = 60 * s + $i; print s + 0 }' <<<"$1"; }

# PBS tells the script neither the time limit nor which start this is: qstat does.
# shellcheck disable=SC2034 # job.pbs and successor.sh use what is set here
ask_pbs() {
    local limit
    deleted='' # qdel: TERM now, KILL some seconds later
    trap 'deleted=yes' TERM
    ulimit -c 0 # a crash of all ranks would write a core file each
    [[ -n ${PBS_NODEFILE:-} ]] || fail "no PBS_NODEFILE: submit with qsub, or start this script in an interactive job (qsub -I)"
    facts=$(qstat -f "$PBS_JOBID" 2>/dev/null || true)
    facts=${facts//$'\n\t'/} # qstat folds long lines
    [[ $PBS_JOBID != *\[* ]] || fail "PBS_JOBID=$PBS_JOBID is of an array, whose jobs would share a run: submit each by itself"
    number=${PBS_JOBID%%.*}
    runs=$(fact run_count) # how often PBS has started this job
    runs=${runs:-1}
    # Bash evaluates what stands in a variable that it computes with, commands too: whole numbers alone.
    local name
    for name in RESTARTS number runs; do
        [[ ${!name:-0} =~ ^(0|[1-9][0-9]{0,17})$ ]] || fail "$name=$(printf %q "${!name}"), but should be a whole number"
    done
    # A successor is told how often the run was started before, and its first job's number.
    restarts=$((${RESTARTS:-0} + runs - 1)) first_job=${FIRST_JOB:-$number} relaunches=0
    # A first start refuses an older run; not in an interactive job, which may start this often, nor without an answer of qstat.
    run_dir_flag=--new-run-dir
    [[ -n $facts && ${PBS_ENVIRONMENT:-} != PBS_INTERACTIVE ]] || run_dir_flag=--run-dir
    limit=$(fact Resource_List.walltime) stop_at=''
    if [[ -z $limit ]]; then
        echo "warning: qstat did not tell the time limit: at the limit the job loses up to --save-minutes"
        return
    fi
    stop_at=$((SECONDS + $(seconds "$limit") - $(seconds "$(fact resources_used.walltime)") - stop_before))
    ((stop_at > SECONDS)) || fail "walltime=$limit, but saving alone may take $stop_before s of it (stop_before): ask for more"
}

describe() { # PYTHON
    local versions pals
    versions=$("$1" -c '
from importlib.metadata import version
from platform import python_version
print(f"python={python_version()}", *(f"{name}={version(name)}" for name in ("torch", "ddp-core")))
' 2>&1) || fail "$PWD/.venv is not whole (${versions##*$'\n'}): run ./install.sh again"
    pals=$(mpiexec --version 2>/dev/null | head -n 1 || true)
    echo "job=$PBS_JOBID restarts=$restarts pals=${pals:-unknown} $versions"
}

# ---- for job.pbs: the ranks -------------------------------------------------------------------------------------------

# Where run.jsonl ends now, and what was written behind such an end. --fresh begins another file.
end_of_record() { [[ ! -e $1 ]] || echo "$(stat -c %i "$1") $(wc -l <"$1")"; }
recorded_since() { # FILE END
    local file lines
    read -r file lines <<<"$2"
    [[ -e $1 ]] || return 0
    [[ $(stat -c %i "$1") == "$file" ]] || lines=0
    tail -n "+$((lines + 1))" "$1"
}

# Starts the ranks and waits; tells them to save when the time limit is near, stop.NUMBER is there, or the job is deleted.
# Sets `code`, their exit code, and `stopping`, why they were told to save.
watch_ranks() { # RUN_DIR COMMAND...
    local record=$1/run.jsonl before launcher rank0 end='s/^{"kind":"end","exit_code":\([1-9][0-9]*\),.*/\1/p' recorded
    shift
    before=$(end_of_record "$record")
    began=${began-$before} # of the whole job, for successor.sh
    rm -f "$NODE_DIR/rank0"
    # A rank that dies alone ends them all: mpiexec's default.
    "$@" &
    launcher=$! stopping=''
    while kill -0 "$launcher" 2>/dev/null; do
        sleep 2 &
        wait $! || true # a signal ends `wait`, and not `sleep`
        if [[ -z $stopping ]]; then
            [[ -z $stop_at ]] || ((SECONDS < stop_at)) || stopping="the time limit is near"
            [[ ! -e stop.$number ]] || stopping="stop.$number is there"
            [[ -z $deleted ]] || stopping="the job is deleted"
            [[ -z $stopping ]] || echo "$stopping: the ranks are told to save"
        fi
        # To rank 0, which is on this node and tells the others: ALCF's pages do not say that mpiexec hands signals on. Again
        # and again: a rank that is still starting does not listen.
        if [[ -n $stopping && -r $NODE_DIR/rank0 ]]; then
            { read -r rank0 <"$NODE_DIR/rank0" && kill -USR1 "$rank0" 2>/dev/null; } || true
        fi
    done
    code=0
    wait "$launcher" || code=$?
    rm -f "stop.$number" || echo "warning: stop.$number stays: this job, started again, would stop at once" >&2
    # mpiexec may have ended ranks that were leaving, and its code may be theirs: what rank 0 has recorded counts.
    if ((code > 0)); then
        recorded=$(recorded_since "$record" "$before" | sed -n "$end" | tail -n 1)
        code=${recorded:-$code}
    fi
}

# Whether another start may do better. 1: mpiexec itself failed, as for a node that does not answer; 4: ranks did not meet;
# 7: a rank was lost; more than 128: all were killed. Anything else would happen again.
launch_again() {
    [[ -z $stopping && ($code == 1 || $code == 4 || $code == 7 || $code -gt 128) ]] || return
    if ((relaunches >= max_relaunches)); then
        echo "error: exit code $code, and this was relaunch $relaunches of $max_relaunches (max_relaunches)" >&2
        return 1
    fi
    relaunches=$((relaunches + 1)) restarts=$((restarts + 1))
    echo "exit code $code: launching again in 30 s from the last snapshot, relaunch $relaunches of $max_relaunches"
    sleep 30 &
    wait $! || true
    [[ -z $deleted ]]
}
