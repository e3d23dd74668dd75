#!/bin/bash -l
# ddp_core and safetensors, into packages/ beside this script. The module has torch.
set -euo pipefail
cd "$(dirname "$0")"
set +u # module functions read unset variables
module load pytorch/1.0
set -u
python3 -m pip install --quiet --no-cache-dir --no-deps --no-compile --upgrade --target packages 'safetensors>=0.4.3'
cp -r ../../core/src/ddp_core packages
