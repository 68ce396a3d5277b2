#!/usr/bin/env bash
# All that is known of cuda/ without a GPU: what .ci/run takes a sample of, and what it leaves out. Prints how long each
# part took.
#
#     bash tests/cuda/all.sh
#
# Needs nvcc and the network, for NVIDIA's wheels (facts.py); cudnn.sh, which fetches the true cuDNN, is apart.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"
cd "$ROOT"
export PYTHONPATH=tests ONNXTRAIN_SLOW=1
status=0
part() {
    local begin=$SECONDS
    "$@" || { status=1; echo "==== failed: $*"; }
    echo "==== $((SECONDS - begin)) s: $*"
}
for wheels in nvrtc headers disassembler; do
    [ -e "build/nvidia/$wheels" ] || "$PYTHON" tests/cuda/facts.py fetch $wheels
done
for fact in headers generated; do part "$PYTHON" tests/cuda/facts.py $fact; done
part "$PYTHON" tests/cuda/sass.py
part env PYTHONPATH="$ROOT" "$PYTHON" -m pytest -q -n 2 --full tests/cuda
exit $status
