"""What the scheduler of a virtual cluster refuses, and in which words.

taken(cluster, site, folder)        what it has taken that is wrong, a line each
"""

import re

from conformance.cluster.virtual import USER, VirtualSite
from conformance.harness.sites import Site

# What is wrong with a job, by the options that make it so; and the scheduler's words for it.
SLURM = {
    "--account=nobodys": "Invalid account or account/partition combination specified",
    "--qos=nobodys": "Invalid qos specification",
    "--partition=nowhere": "invalid partition specified: nowhere",
    "--constraint=nothing": "Invalid feature specification",
    "--nodes={more}": "More processors requested than permitted|Node count specification invalid",
}
# A PBS has no accounts of its own, and no QOS.
PBS = {
    "-q nowhere": "Unknown queue",
    "-l qos=nobodys": "Unknown resource Resource_List.qos",
}
SUBMITS = {"slurm": ("sbatch --hold", SLURM), "pbs": ("qsub", PBS)}


def queue(cluster: VirtualSite) -> list[str]:
    return sorted(cluster.on("login", f"squeue -h -a -u {USER} -o %i").stdout.split())


def taken(cluster: VirtualSite, site: Site, folder: str) -> list[str]:
    """What was wrong, and not refused in these words."""
    submit, wrong = SUBMITS[site.facts["scheduler"]]
    found, before = [], queue(cluster)
    for wish, words in wrong.items():
        option = wish.format(more=len(cluster.names) + 1)
        ended = cluster.on("login", f"{submit} {option} {site.facts['submit']}", folder=folder)
        said = f"{ended.stdout}{ended.stderr}".strip()
        if ended.returncode == 0 or not re.search(words, said):
            found.append(f"{option}: exit code {ended.returncode}, {said!r}, but should be refused with {words!r}")
    if left := [job for job in queue(cluster) if job not in before]:
        cluster.on("login", f"scancel {' '.join(left)}")
        found.append(f"jobs in the queue={left}, but should be none")
    return found
