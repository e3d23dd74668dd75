#!/bin/bash
# Nothing to install: the suite runs train.py with its own Python.
set -euo pipefail
unset PYTHONPATH # as in job.sl
python3 --version
