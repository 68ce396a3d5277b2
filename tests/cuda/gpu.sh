#!/usr/bin/env bash
# Everything of cuda/ on a GPU, part by part, each part within ten minutes: operators, programs with CUDA graphs, dropout
# against torch's, whole models, optimizers, attention and memory; the same under compute-sanitizer; the benchmark with
# its goals; a table of the CUDA kernels of a step.
#
#     PYTHON=python bash tests/cuda/gpu.sh [PART...]
#     bash tests/cuda/gpu.sh pack FILE.tar.xz
#
# Parts: build check memcheck racecheck synccheck bench profile; by default all but profile, compute-sanitizer's in
# quarters. "memcheck:0/4" is the first of four slices of memcheck. Needs a CUDA build of torch, onnx and pytest in
# $PYTHON's environment, nvcc for build, and compute-sanitizer (of the CUDA toolkit) for its parts. runner.py documents
# JOBS, LIMIT and PART_LIMIT. OUT is a folder for results (build/gpu), which are written as they come. KIND_LIMIT:
# seconds that one kind of the benchmark may take; BENCH_ARGS: more arguments of tests/bench/gpu.py.
#
# pack writes an archive of the package as it is built here, for sm_$ARCHS (90), and of the scripts above. Unpacked on
# another machine, `bash tests/cuda/gpu.sh check` runs there without a compiler and without the network.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
plugin=${PLUGIN:-$PWD/onnxtrain/_cuda.so}
out=${OUT:-$PWD/build/gpu}
timed=(timeout -k 5 "${PART_LIMIT:-530}" "$python" -u)
export PYTHONPATH=$PWD:$PWD/tests:$PWD/tests/bench:$PWD/tests/graph:$PWD/tests/models:$PWD/tests/ops:$PWD/tests/optim ORTMODULE_LOG_LEVEL=ERROR

build() {
    local arch # a function whose status is asked for goes on behind a failure, whatever -e says
    "$python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, torch.cuda.get_device_name())' &&
        arch=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())') &&
        ONNXTRAIN_CUDA=1 ONNXTRAIN_CUDA_ARCHS=$arch "$python" setup.py -q build_ext --inplace &&
        "$python" -m onnxtrain
}

part() {
    case $1 in
    build) build ;;
    bench) "${timed[@]}" tests/bench/gpu.py --limit "${KIND_LIMIT:-150}" ${BENCH_ARGS:-} ;;
    profile)
        "${timed[@]}" tests/bench/gpu.py --kernels --kinds onnxtrain,eager --limit "${KIND_LIMIT:-150}" ${BENCH_ARGS:-}
        ;;
    *) "$python" tests/cuda/runner.py --device "${DEVICE:-cuda:0}" --plugin "$plugin" --out "$out" "$1" ;;
    esac
}

if [ "${1:-}" = pack ]; then
    ONNXTRAIN_CUDA=1 ONNXTRAIN_CUDA_ARCHS=${ARCHS:-90} "$python" setup.py -q build_ext --inplace
    exec "$python" tests/cuda/pack.py "${2:?the archive to write}"
fi
quarters() { printf "$1:%d/4 " 0 1 2 3; }
parts=${*:-check $(quarters memcheck) $(quarters racecheck) $(quarters synccheck) bench}
[ $# -gt 0 ] || [ ! -e setup.py ] || parts="build $parts"
for name in $parts; do
    case $name in
    build | bench | profile | check* | memcheck* | racecheck* | synccheck*) ;;
    *) echo "no part is called $name" && exit 2 ;;
    esac
done
[ -e "$plugin" ] || [[ " $parts " == *" build "* ]] || parts="build $parts"
mkdir -p "$out"
status=0
for name in $parts; do
    echo "==== $name"
    if ! part "$name" 2>&1 | tee "$out/${name//[:\/]/_}.txt"; then
        echo "==== $name failed"
        status=1
        [ "$name" != build ] || exit 1
    fi
done
exit $status
