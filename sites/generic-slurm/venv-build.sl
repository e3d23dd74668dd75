#!/bin/bash -l
# generic-slurm: runs install.sh in a batch job, on a node of the kind that will train.
#
#   sbatch venv-build.sl [arguments of install.sh]     submit, from this directory; the log is venv-JOB.out
#
# For clusters whose login nodes have another processor or other modules than the rest, or no patience with long commands:
# what is built on one kind of node may not run on another. -l above: a login shell has the module command.

# ---- this cluster: the lines to edit ----------------------------------------------------------------------------

# EDIT: the account that pays; delete the line where the cluster has none.
# https://slurm.schedmd.com/sbatch.html#OPT_account
#SBATCH --account=my_account

# EDIT: the partition of job.sl.
# https://slurm.schedmd.com/sbatch.html#OPT_partition
#SBATCH --partition=gpu

# EDIT: time limit. A PyTorch for CPUs took 80 s, one for GPUs is ten times larger (unverified).
# https://slurm.schedmd.com/sbatch.html#OPT_time
#SBATCH --time=01:00:00

# ---- every cluster: directives that stay as they are -------------------------------------------------------------

# One process installs, whatever the training takes.
# https://slurm.schedmd.com/sbatch.html#OPT_nodes
#SBATCH --nodes=1

# As above.
# https://slurm.schedmd.com/sbatch.html#OPT_ntasks-per-node
#SBATCH --ntasks-per-node=1

# pip unpacks in one thread; install-horovod.sh would use more.
# https://slurm.schedmd.com/sbatch.html#OPT_cpus-per-task
#SBATCH --cpus-per-task=4

# pip holds a wheel of some GB while it unpacks it (unverified).
# https://slurm.schedmd.com/sbatch.html#OPT_mem
#SBATCH --mem=16G

# Beside this script: a job whose log directory does not exist dies without a word.
# https://slurm.schedmd.com/sbatch.html#OPT_output
#SBATCH --output=venv-%j.out

set -euo pipefail

# ---- this cluster, again: values to edit, which stand here since no directive may follow a command ----------------

# EDIT: the modules to train with, each with its version, as (gcc/13.2 cuda/12.8 python/3.11): `module avail` lists them.
# Empty: none. install.sh notes them, and job.sl loads the same ones.
modules=()

# EDIT: the cluster's proxy, as http://proxy.example.org:3128, where nodes reach PyPI through one; `echo $https_proxy` on a
# login node tells. Empty: none. job.sl has no such line, since training downloads nothing.
proxy=

# ---- every cluster: nothing to edit from here on ----------------------------------------------------------------

fail() {
    echo "error: $1" >&2
    exit 3 # as install.sh: nothing was changed
}

[[ -f install.sh ]] || fail "no install.sh in $PWD: submit from the site's directory, or with sbatch --chdir=DIR"

# Nothing comes along from the shell that submitted this, nor from what the cluster loads for everyone.
set +u # module functions read unset variables
if type module &>/dev/null; then
    module purge || fail "module purge failed (above)"
    for name in "${modules[@]}"; do
        module load "$name" || {
            echo "here is:" >&2
            module avail "${name%%/*}" >&2
            fail "no module $name on $(hostname): edit \"modules\""
        }
    done
elif ((${#modules[@]})); then
    fail "no module command on $(hostname): empty \"modules\", and set PYTHON"
fi
set -u

if [[ $proxy ]]; then
    # pip and most programs read these. Not the addresses within the cluster.
    # https://pip.pypa.io/en/stable/user_guide/#using-a-proxy-server
    export http_proxy=$proxy https_proxy=$proxy no_proxy=localhost,127.0.0.1
fi

echo "job=$SLURM_JOB_ID host=$(hostname) processor=$(uname -m) modules=${LOADEDMODULES:-none} proxy=${proxy:-none}"
exec ./install.sh "$@"
