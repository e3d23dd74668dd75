#!/bin/bash
# Nothing to install: the suite runs train.py with its own Python, which has mpi4py.
set -euo pipefail
python3 -c "import mpi4py"
