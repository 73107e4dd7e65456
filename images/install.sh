#!/bin/bash
# Installs Sailor's agent with PyTorch below /opt/sailor, so that a start downloads nothing.
#
#   install.sh FOLDER [PACKAGE...]
#
# FOLDER holds one wheel of Sailor and its constraints.txt; PACKAGEs are installed too. Both image
# recipes run this as root. It needs Python 3.11 or later with venv, and a package index.
set -euo pipefail

folder=${1:?name the folder with the wheel and constraints.txt}
shift
wheel=$(find "$folder" -maxdepth 1 -name 'sailor-*.whl')
[[ -n $wheel && $(wc -l <<<"$wheel") == 1 ]] || { echo "$folder must hold one wheel of Sailor" >&2; exit 1; }
pins=(--constraint "$folder/constraints.txt")

"${PYTHON:-python3}" -m venv /opt/sailor
pip=(/opt/sailor/bin/python -m pip --quiet --no-cache-dir --disable-pip-version-check)
# The largest first, in a layer that a new wheel of Sailor leaves as it is.
"${pip[@]}" install "${pins[@]}" torch numpy safetensors
# gcsfs reads and writes gs:// addresses: checkpoints, and data that scripts name.
"${pip[@]}" install "${pins[@]}" "$wheel[worker]" gcsfs "$@"

# What was installed loads, and Python has compiled it, which else takes every start some seconds.
/opt/sailor/bin/python -m compileall -q -j 0 /opt/sailor/lib >/dev/null || true
/opt/sailor/bin/python -c 'import torch, gcsfs, worker.control.worker_process'
/opt/sailor/bin/sailor-agent --version
