#!/bin/bash
# How a job goes on that has stopped and saved: job.pbs sources this, and `go_on` submits the next job, since PBS requeues no
# job for its exit code. Where a queue takes no second job of a user, it prints the command to submit by hand.
# shellcheck disable=SC2154 # restarts and the like are common.sh's

set -euo pipefail

# Over all its successors a run is restarted at most this often: one that can never end shall not come back for ever.
max_restarts=20

as_before() { # FLAG FACT [TEXT]: an option of qsub as this job has it, which may not be as the directives of job.pbs say
    local value
    value=$(fact "$2")
    [[ -z $value ]] || successor+=("$1" "${3:-}$value")
}

go_on() { # RUN_DIR OPTIONS ARGUMENT...: submits or says how, and exits with 75
    local run_dir=$1 options=$2 name steps words by_hand next
    shift 2
    successor=(qsub)
    as_before -A Account_Name
    as_before -N Job_Name
    for name in select place walltime filesystems; do
        as_before -l "Resource_List.$name" "$name="
    done
    as_before -W tolerate_node_failures tolerate_node_failures=
    # Not the queue that `prod` has passed it to, which takes jobs from nobody else.
    [[ -z ${PBS_O_QUEUE:-} ]] || successor+=(-q "$PBS_O_QUEUE")
    successor+=(-v "TRAIN_ARGS=$*,RESTARTS=$((restarts + 1)),FIRST_JOB=$first_job,$options" job.pbs)

    words=" --run-dir $run_dir${*:+ $*} "
    words=${words/ --fresh / } # it would put aside what this job has done
    by_hand="to resume: qsub -v TRAIN_ARGS=\"${words:1:-1}\" job.pbs, with the other options that this job had"
    # The steps at which this job has started and ended: if they are all one, it got no further, nor would the next.
    steps=$(recorded_since "$run_dir/run.jsonl" "$began" |
        sed -n -E 's/^\{"kind":("start"|"end","exit_code":75),"step":([0-9]+),.*/\2/p' | sort -u | wc -l)

    if [[ -n $deleted ]]; then
        echo "stopped and saved; $by_hand"
    elif [[ ${PBS_ENVIRONMENT:-} == PBS_INTERACTIVE || $* == *[,\'\"\\]* ]]; then
        echo "stopped and saved; to resume, start this again with the same arguments and --run-dir $run_dir"
    elif ((steps < 2)); then
        echo "error: stopped before its first step, so the next job might, too; $by_hand" >&2
    elif ((restarts >= max_restarts)); then
        echo "error: stopped and saved, but this was restart $restarts of $max_restarts (max_restarts); $by_hand" >&2
    elif next=$("${successor[@]}"); then
        echo "stopped and saved: job $next is in the queue, and resumes when it starts"
    else
        echo "error: stopped and saved, but qsub did not take the next job (above); $by_hand" >&2
    fi
    exit 75
}
