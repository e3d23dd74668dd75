#!/bin/bash -l
# ddp_core and safetensors, into packages/ beside this script. The module has torch.
set -euo pipefail
cd "$(dirname "$0")"
set +u # module functions read unset variables
module load pytorch/1.0
set -u
# https://pypi.org/project/safetensors/0.8.0/#files
echo 'safetensors==0.8.0 --hash=sha256:fd6f3f93c9a0a7cc2788ee63fb763353d4bd2e89b0751bc78fcf7dda00bea774' >requirements.txt
export PIP_USER=0 # whatever the shell says
unset PIP_PREFIX
python3 -m pip install --quiet --no-cache-dir --no-compile --upgrade --target packages --no-deps --requirement requirements.txt
cp -r ../../core/src/ddp_core packages
