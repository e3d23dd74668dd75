"""Write constraints.lock: constraints.txt with the sha256 of every file that PyPI has of each version, and its date.

`nox -s lock` starts it. Where no audit is possible, the dates show how old a version is.

pip refuses any other file (environment.py). The format of PyPI's answer is a standard:
https://packaging.python.org/en/latest/specifications/simple-repository-api/
"""

import json
import sys
import urllib.request

from conformance.harness.environment import ROOT, requirements

INDEX = "https://pypi.org/simple"
FORM = "application/vnd.pypi.simple.v1+json"


def main() -> int:
    lines = []
    for requirement in requirements((ROOT / "constraints.txt").read_text()):
        name, _, version = requirement.partition("==")
        matching = [file for file in files(name) if version_of(file["filename"]) == version]
        if not matching:
            print(f"error: {INDEX}/{name}/ has no file of {requirement}: correct it in constraints.txt", file=sys.stderr)
            return 1
        sums = sorted(f"--hash=sha256:{file['hashes']['sha256']}" for file in matching)
        lines.append(" ".join([requirement, *sums, "#", min(file["upload-time"][:10] for file in matching)]))
    (ROOT / "constraints.lock").write_text("\n".join(["# By `nox -s lock`, of constraints.txt.", *lines, ""]))
    return 0


def files(name: str) -> list[dict]:
    request = urllib.request.Request(f"{INDEX}/{name}/", headers=dict(Accept=FORM))  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - INDEX is https
        return json.load(answer)["files"]


def version_of(filename: str) -> str:
    """The version in the name of a wheel (second part) or a source archive (last part)."""
    if filename.endswith(".whl"):
        return filename.split("-")[1]
    return filename.removesuffix(".zip").removesuffix(".tar.gz").rpartition("-")[2]


if __name__ == "__main__":
    sys.exit(main())
