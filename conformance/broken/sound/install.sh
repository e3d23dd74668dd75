#!/bin/bash
# Nothing to install: the suite runs train.py with its own Python.
set -euo pipefail
python3 --version
