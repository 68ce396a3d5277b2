#!/usr/bin/env bash
# Tests what rests on PyTorch's inside, captures and exports, with the newest torch, in an environment of its own beside
# the build in place that tests/run.sh made. Arguments go to pytest.
# ONNXTRAIN_NEWEST: the release of torch, by default the newest that is known to pass; empty: whatever pip finds.
# `newest.sh --version` installs, and runs no tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
TORCH=${ONNXTRAIN_NEWEST-2.15.0}
VENV=build/newest
# A machine may cap torch by constraints in pip's configuration: this environment asks for another one on purpose.
[ -n "${PIP_EXTRA_INDEX_URL:-}" ] || export PIP_CONFIG_FILE=/dev/null
[ -x "$VENV/bin/python" ] || "${ONNXTRAIN_PYTHON:-python3}" -m venv "$VENV"
"$VENV/bin/python" -m pip install -q --disable-pip-version-check "torch${TORCH:+==$TORCH}" numpy "onnx>=1.19" \
    "onnxscript>=0.5" "h5py>=3" "setuptools>=77" "onednn-cpu-gomp==2023.2.0; platform_machine == 'x86_64'" "pytest>=8" \
    "pytest-xdist>=3" expecttest "transformers>=5" "accelerate>=1" "tokenizers>=0.20"
"$VENV/bin/python" -c 'import torch; print("torch", torch.__version__)'
[ "${1:-}" != --version ] || exit 0
PYTHONPATH=$PWD "$VENV/bin/python" -m pytest -q tests/ortmodule tests/capture tests/export tests/models "$@"
