"""Print the run directory for job scripts: --run-dir, else --new-run-dir, else runs/WORKLOAD. Imports no torch.

python -m ddp_core.find_run [flags of train.py]
"""

import sys
from pathlib import Path

from ddp_core.config import looked_up
from ddp_core.errors import UsageError


def find_run(argv: list[str]) -> str:
    """The run directory that train.py uses with these flags. Raises UsageError."""
    flags = looked_up(argv, "run_dir", "new_run_dir", "workload")
    return flags.get("run_dir") or flags.get("new_run_dir") or f"runs/{Path(flags.get('workload') or 'digits').stem}"


if __name__ == "__main__":
    try:
        print(find_run(sys.argv[1:]))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.code)
