#!/usr/bin/env bash
# Everything of cuda/ on a GPU, in one command: operators, programs, optimizers and attention against CPU and torch, then under
# compute-sanitizer where that is installed, then step times. Needs a CUDA build of torch in $PYTHON's environment, and nvcc.
#
#     PYTHON=python bash tests/cuda/gpu.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
export PYTHONPATH=$PWD
arch=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
ONNXTRAIN_CUDA=1 ONNXTRAIN_CUDA_ARCHS=$arch "$python" setup.py -q build_ext --inplace
"$python" -m onnxtrain
status=0
run() { # name, tool..., then the script
    local name=$1
    shift
    echo "== $name"
    "$@" | tail -n 1 | "$python" -c 'import json, sys; r = json.load(sys.stdin); print(r["passed"], "passed", len(r["failed"]), "failed"); [print(" ", *f) for f in r["failed"]]; sys.exit(bool(r["failed"]) or not r["passed"])' || status=1
}
plugin=$PWD/onnxtrain/_cuda.so
run operators "$python" tests/cuda/cases.py "" cuda:0
run programs "$python" tests/cuda/programs.py "" cuda:0
run optimizers "$python" tests/cuda/optim.py "$plugin" cuda:0
run attention "$python" tests/cuda/flash.py "$plugin" cuda:0
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck synccheck; do
        run "$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" tests/cuda/cases.py "" cuda:0 0/8
    done
else
    echo "compute-sanitizer is not installed: memory, race and barrier checks left out"
fi
"$python" tests/cuda/step.py || status=1
exit $status
