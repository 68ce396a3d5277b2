#!/usr/bin/env bash
# Everything of cuda/ on a GPU, in one command or part by part, each part within ten minutes: the build, operators,
# programs with CUDA graphs, dropout against torch's, whole models, optimizers and attention, the same under
# compute-sanitizer, the benchmark with its goals. Needs a CUDA build of torch in $PYTHON's environment, nvcc, and
# compute-sanitizer (of the CUDA toolkit).
#
#     PYTHON=python bash tests/cuda/gpu.sh [--quick] [PART...]       quick: an eighth of the operators under each sanitizer
#
# Parts, all by default: build check memcheck racecheck synccheck bench. The others build where there is nothing built.
# LIMIT: seconds that one script may take (500). OUT: a folder for what is printed, part by part, so that a run that is
# cut off has left what it found.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
limit=${LIMIT:-500}
slice=0/1
if [ "${1:-}" = --quick ]; then
    slice=0/8
    shift
fi
parts=${*:-build check memcheck racecheck synccheck bench}
export PYTHONPATH=$PWD:$PWD/tests:$PWD/tests/bench:$PWD/tests/graph:$PWD/tests/ops:$PWD/tests/optim ORTMODULE_LOG_LEVEL=ERROR
plugin=$PWD/onnxtrain/_cuda.so
status=0

build() {
    local arch # a function whose status is asked for goes on behind a failure, whatever -e says
    "$python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, torch.cuda.get_device_name())' &&
        arch=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())') &&
        ONNXTRAIN_CUDA=1 ONNXTRAIN_CUDA_ARCHS=$arch "$python" setup.py -q build_ext --inplace &&
        "$python" -m onnxtrain
}

run() { # name, then the command; its last line is a report
    local name=$1 code=0
    shift
    echo "== $name"
    { timeout "$limit" "$@" || echo "{\"passed\": 0, \"failed\": [[\"the command\", \"ended with status $?\"]]}"; } | tail -n 1 | "$python" -c '
import json, sys
report = json.load(sys.stdin)
print(report["passed"], "passed", len(report["failed"]), "failed", len(report.get("refused", {})), "refused")
for what, message in report["failed"]:
    print(" ", what, message)
sys.exit(bool(report["failed"]) or not report["passed"])' || code=1
    return $code
}

check() {
    local code=0
    run operators "$python" tests/cuda/cases.py "" cuda:0 || code=1
    run "programs and graphs" "$python" tests/cuda/programs.py "" cuda:0 || code=1
    run dropout "$python" tests/cuda/dropout.py "" cuda:0 || code=1
    run optimizers "$python" tests/cuda/optim.py "$plugin" cuda:0 || code=1
    run attention "$python" tests/cuda/flash.py "$plugin" cuda:0 || code=1
    run "attention by cuDNN" "$python" tests/cuda/sdpa.py "" cuda:0 || code=1
    run models "$python" tests/cuda/models.py "" cuda:0 || code=1
    return $code
}

sanitize() { # a tool of compute-sanitizer: errors of it end a script with status 9
    local code=0 sanitizer
    sanitizer=$(command -v compute-sanitizer || true)
    if [ -z "$sanitizer" ]; then
        echo "compute-sanitizer is not installed: memory, race and barrier checks were not made"
        return 1
    fi
    local checked=("$sanitizer" --tool "$1" --error-exitcode 9 --print-limit 20 "$python")
    run "$1, attention" "${checked[@]}" tests/cuda/flash.py "$plugin" cuda:0 || code=1
    run "$1, optimizers" "${checked[@]}" tests/cuda/optim.py "$plugin" cuda:0 || code=1
    run "$1, dropout" "${checked[@]}" tests/cuda/dropout.py "" cuda:0 || code=1
    run "$1, programs and graphs" "${checked[@]}" tests/cuda/programs.py "" cuda:0 || code=1
    run "$1, operators" "${checked[@]}" tests/cuda/cases.py "" cuda:0 "$slice" || code=1
    return $code
}

bench() {
    "$python" tests/bench/gpu.py --limit "${KIND_LIMIT:-150}"
}

for part in $parts; do
    case $part in
    build | check | memcheck | racecheck | synccheck | bench) ;;
    *) echo "no part is called $part" && exit 2 ;;
    esac
done
[ -e "$plugin" ] || [[ " $parts " == *" build "* ]] || parts="build $parts"
for part in $parts; do
    case $part in
    build | check | bench) command=("$part") ;;
    *) command=(sanitize "$part") ;;
    esac
    code=0
    echo "==== $part"
    if [ -n "${OUT:-}" ]; then
        "${command[@]}" 2>&1 | tee "$OUT/$part.txt" || code=1
    else
        "${command[@]}" || code=1
    fi
    if [ $code != 0 ]; then
        echo "==== $part failed"
        status=1
        [ "$part" = build ] && exit 1
    fi
done
exit $status
