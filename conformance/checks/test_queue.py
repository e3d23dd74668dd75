"""What the scheduler of a site's virtual cluster takes and what it refuses.

    python -m pytest conformance/checks/test_queue.py --cluster [--site NAME_OR_FOLDER]

As root, with Slurm. `nox -s cluster` runs it.
"""

import pytest

from conformance.cluster.jobs import taken

clause, only = pytest.mark.clause, pytest.mark.only


@clause("V11")
def test_what_is_wrong_is_refused(check, cluster, site):
    check.holds("V11", *taken(cluster, site, cluster.put_site()))


@clause("V11")
@only(schedulers=["slurm"])
def test_every_script_is_taken_as_it_stands(check, cluster, site):
    """--test-only looks for nodes, too. A job that is held shows whose it is."""
    folder = cluster.put_site()
    queued = site.facts.get("queue", {})
    for script in site.job_scripts:
        asked = cluster.on("login", f"sbatch --test-only {script.name}", folder=folder)
        look = "squeue -h -o '%a %q' -j $job; scancel $job"
        ended = cluster.on("login", f"job=$(sbatch --parsable --hold {script.name}) && {{ {look}; }}", folder=folder)
        said = " | ".join(f"{asked.stderr}{ended.stderr}".splitlines()[-2:])
        if asked.returncode or ended.returncode or ended.stderr:
            check.holds("V11", f"{script.name}: refused ({said}), but should be taken as it stands")
        if "account" in queued:
            account, qos = ended.stdout.split()
            check.equal("V11", account=(account, queued["account"].lower()))  # Slurm has no capitals in them
            check.equal("V11", qos_is_one_of_the_site=(qos in queued.get("qos", ["normal"]), True))


@clause("V11")
@only(schedulers=["pbs"])
def test_pbs_takes_its_script_and_keeps_what_can_never_run(check, cluster, site):
    """It refuses too many nodes only where a queue has a limit."""
    folder, script = cluster.put_site(), site.facts["submit"]
    # Without the site's environment it ends by itself, perhaps before qdel comes.
    ended = cluster.on("login", f"job=$(qsub {script}); code=$?; qdel $job &>/dev/null; exit $code", folder=folder)
    check.equal("V11", exit_code=(ended.returncode, 0), errors=(ended.stderr, ""))
    ask = f"job=$(qsub -l select={len(cluster.names) + 1} {script}) && qstat -f $job && qdel $job"
    ended = cluster.on("login", ask, folder=folder)
    told = "Can Never Run: Not enough total nodes available" in ended.stdout
    check.equal("V11", told_that_it_never_runs=(told, True), errors=(ended.stderr, ""))
