"""Slurm's accounting in a virtual cluster. Slurm asks it whether the user may use a job's account and QOS.

    sacctmgr show associations          what it knows, on any node of a cluster that is up

Account and QOS come from site.toml. A job that asks for no QOS gets the first. A mariadbd and a slurmdbd run on the login node
and end with it. Their data are in its memory, and are not kept.
"""

from conformance.cluster.shape import LOGIN
from conformance.harness.sites import Site

# https://slurm.schedmd.com/slurmdbd.conf.html
SLURMDBD_CONF = f"""\
AuthType=auth/munge
DbdHost={LOGIN}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
PidFile=/run/slurmdbd.pid
LogFile=/run/cluster/log/slurmdbd.log
"""
START = r"""
logs=/run/cluster/log
until_it() { # ... does what the rest says
    for _ in {1..1500}; do
        said=$("${@:2}" 2>&1) && return
        if [[ $said == *fatal:* ]] || ! kill -0 "$1" 2>/dev/null; then break; fi
        sleep 0.02
    done
    grep -hs -m 1 -e ERROR -e fatal: $logs/{mariadbd,slurmdbd}.out >&2 || echo "${said%%$'\n'*}" >&2
    exit 1
}
# Who reaches the socket is the database's root.
mkdir -m 700 /run/mysqld
mkdir /run/mysqld/data
# Of a database's own tables slurmdbd needs the one of stored procedures, as this version has it; to make all takes 0.6 s.
{
    echo 'CREATE DATABASE mysql;'
    echo 'USE mysql;'
    grep -h '^CREATE TABLE IF NOT EXISTS proc ' /usr/share/m*/m*_system_tables.sql
} >/run/mysqld/tables.sql
options=(
    --no-defaults --user=root --skip-networking --skip-grant-tables --init-file=/run/mysqld/tables.sql
    --datadir=/run/mysqld/data --socket=/run/mysqld/mysqld.sock --pid-file=/run/mysqld/pid
    # Small, and quick: what is lost with the node is not missed.
    --innodb-buffer-pool-size=16M --innodb-log-file-size=4M --innodb-autoextend-increment=1 --innodb-doublewrite=0
    --key-buffer-size=1M --aria-pagecache-buffer-size=1M --innodb-log-buffer-size=2M
    --innodb-temp-data-file-path=ibtmp1:1M:autoextend --innodb-flush-log-at-trx-commit=0 --innodb-stats-persistent=0
    # slurmdbd asks for it.
    --innodb-lock-wait-timeout=900
)
setsid mariadbd "${options[@]}" &>$logs/mariadbd.out </dev/null &
until_it $! test -S /run/mysqld/mysqld.sock
setsid slurmdbd -D &>$logs/slurmdbd.out </dev/null &
until_it $! sacctmgr --noheader show cluster
"""


def has_accounts(site: Site) -> bool:
    """False also where Slurm stands in for another scheduler, which does not have Slurm's accounts."""
    return site.toml["scheduler"] == "slurm" and "account" in site.toml.get("queue", {})


def settings(site: Site) -> dict[str, str]:
    """Settings for slurm.conf."""
    if not has_accounts(site):
        return {}
    return dict(
        AccountingStorageType="accounting_storage/slurmdbd",
        AccountingStorageHost=LOGIN,
        AccountingStorageEnforce="associations,limits,qos",
    )


def steps(site: Site, user: str) -> dict[str, list[str]]:
    """Commands for root on the login node, one after the other, before slurmctld starts."""
    if not has_accounts(site):
        return {}
    queue = site.toml["queue"]
    account, qos = queue["account"], queue.get("qos") or ["normal"]
    added = ",".join(name for name in qos if name != "normal")  # Slurm always has the QOS normal
    added_words = dict(cluster=[site.name], qos=[added], account=[account])
    added_words |= dict(user=[user, f"Account={account}", f"QOS={','.join(qos)}", f"DefaultQOS={qos[0]}"])
    adds = {what: ["sacctmgr", "--immediate", "add", what, *words] for what, words in added_words.items() if all(words)}
    return {"mariadbd and slurmdbd": ["bash", "-ec", START]} | {f"sacctmgr add {what}": each for what, each in adds.items()}
