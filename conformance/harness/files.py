"""SHA-256 of the files that ran: core, conformance and a site. A report keeps them, so that later changes are noticed."""

import hashlib
import importlib.util
import json
import os
import re
import tomllib
from pathlib import Path

from conformance.harness.sites import ROOT, Site

# What programs and installations leave behind, and what is drawn from reports.
LEFT = re.compile(
    r"\..*|__pycache__|.*\.egg-info|.*\.py[co]|.*\.out|.*\.o\d+|env|.*\.tar\.gz|.*\.sif|runs|cache|reports|CONFORMANCE\.md"
)
# Parts that judge the suite or draw reports, and judge no site.
OF_THE_SUITE = re.compile(r"selftest|broken|report|certify")
NOTHING = re.compile(r"(?!)")


def of_folder(folder: Path, without: re.Pattern = NOTHING) -> str:
    """SHA-256 over the names and bytes of all files below a folder, except what programs leave, and `without` at its top.

    The start record has the same value for the core (ddp_core.device.source_digest).
    """
    lines = []
    for parent, folders, names in os.walk(folder):
        here, left_out = Path(parent), without if Path(parent) == folder else NOTHING
        folders[:] = [name for name in folders if not LEFT.fullmatch(name) and not left_out.fullmatch(name)]
        for path in (here / name for name in names if not LEFT.fullmatch(name) and not left_out.fullmatch(name)):
            lines.append(f"{path.relative_to(folder).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def of_site(site: Site, rung: str) -> str:
    """SHA-256 of a site's files. Runs do not depend on README.md, [verified] and [[sources]], which change after a run; static
    checks do.
    """
    if rung == "static":
        return of_folder(site.folder)
    toml = tomllib.loads((site.folder / "site.toml").read_text())
    kept = {name: value for name, value in toml.items() if name not in ("verified", "sources")}
    text = of_folder(site.folder, re.compile(r"README\.md|site\.toml")) + json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def core() -> Path:
    """The installed core, or else this repository's: a login node only submits, and has none installed."""
    spec = importlib.util.find_spec("ddp_core")
    return Path(spec.origin).parent if spec and spec.origin else ROOT / "core/src/ddp_core"


def of_run(rung: str, sites: list[Site]) -> dict:
    """SHA-256 of what a session on this rung runs: core, conformance, and each site by name."""
    judges = of_folder(ROOT / "conformance", NOTHING if rung == "suite" else OF_THE_SUITE)
    return dict(core=of_folder(core()), conformance=judges, sites={site.name: of_site(site, rung) for site in sites})
