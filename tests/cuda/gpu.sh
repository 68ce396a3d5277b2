#!/usr/bin/env bash
# Everything of cuda/ on a GPU, in one command: the build for this GPU and for all that a wheel has, operators, programs with CUDA
# graphs, whole models, optimizers and attention against CPU and torch, the same under compute-sanitizer, then the benchmark with its
# goals. Needs a CUDA build of torch in $PYTHON's environment, nvcc, and compute-sanitizer (of the CUDA toolkit).
#
#     PYTHON=python bash tests/cuda/gpu.sh [--quick]      quick: an eighth of the operators under each sanitizer
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
part=0/1
[ "${1:-}" = --quick ] && part=0/8
export PYTHONPATH=$PWD ORTMODULE_LOG_LEVEL=ERROR
status=0
missing=()
"$python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, torch.cuda.get_device_name())'
arch=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
ONNXTRAIN_CUDA=1 ONNXTRAIN_CUDA_ARCHS=$arch "$python" setup.py -q build_ext --inplace
"$python" -m onnxtrain
plugin=$PWD/onnxtrain/_cuda.so
run() { # name, then the command; its last line is a report
    local name=$1
    shift
    echo "== $name"
    { "$@" || echo '{"passed": 0, "failed": [["the command", "ended with an error"]]}'; } | tail -n 1 | "$python" -c '
import json, sys
report = json.load(sys.stdin)
print(report["passed"], "passed", len(report["failed"]), "failed", len(report.get("refused", {})), "refused")
for what, message in report["failed"]:
    print(" ", what, message)
sys.exit(bool(report["failed"]) or not report["passed"])' || status=1
}
run operators "$python" tests/cuda/cases.py "" cuda:0
run "programs and graphs" "$python" tests/cuda/programs.py "" cuda:0
run models "$python" tests/cuda/models.py "" cuda:0
run optimizers "$python" tests/cuda/optim.py "$plugin" cuda:0
run attention "$python" tests/cuda/flash.py "$plugin" cuda:0
sanitizer=$(command -v compute-sanitizer || true)
if [ -n "$sanitizer" ]; then
    for tool in memcheck racecheck synccheck; do
        checked=("$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 20 "$python")
        run "$tool, operators" "${checked[@]}" tests/cuda/cases.py "" cuda:0 "$part"
        run "$tool, programs and graphs" "${checked[@]}" tests/cuda/programs.py "" cuda:0
        run "$tool, optimizers" "${checked[@]}" tests/cuda/optim.py "$plugin" cuda:0
        run "$tool, attention" "${checked[@]}" tests/cuda/flash.py "$plugin" cuda:0
    done
else
    missing+=("compute-sanitizer is not installed: memory, race and barrier checks were not made")
    status=1
fi
echo "== benchmark"
"$python" tests/bench/gpu.py || status=1
for line in ${missing[@]+"${missing[@]}"}; do echo "$line"; done
exit $status
