#!/bin/bash
# Of the nodes named, prints those that PBS does not list as down: ./spare-nodes.sh NODE...
#
# For jobs that are too dear to wait for another start when a node fails. This one trains on 15 nodes and keeps one back:
#   qsub -l select=16 -W tolerate_node_failures=all -v SPARE_NODES=1,TRAIN_ARGS="--epochs 5" job.pbs
# ALCF advises against tolerate_node_failures where nobody looks after the job.
# https://docs.alcf.anl.gov/aurora/running-jobs-aurora/#working-around-node-failures

set -euo pipefail

down=$( { pbsnodes -l 2>/dev/null || true; } | awk -F'[. \t]' '{ printf " %s ", $1 }')
for host in "$@"; do
    [[ $down == *" ${host%%.*} "* ]] || echo "$host"
done
