#!/usr/bin/env bash
# Builds onnxtrain with the options that build.sh of ONNX Runtime has for training:
#
#     ./build.sh --enable_training --use_cuda --config RelWithDebInfo --build_wheel
#
# --config Debug: assertions and debug information; Release, RelWithDebInfo and MinSizeRel are the same otherwise.
# --use_cuda: fail where the CUDA part cannot be built (--cuda_home, --cudnn_home, CUDA_HOME, CUDNN_HOME, CUDACXX).
# --use_mpi: the same for MPI (--mpi_home, MPICC, MPI_CXX_INCLUDE_PATH). --parallel [N]: so many compilers at a time.
# --build_wheel: a wheel in --build_dir (build/Linux) /CONFIG/dist; without it a build in place. PYTHON is the interpreter
# (python3). A value may follow after a space or after =. What the other build's CMake or CI needs is accepted (the last
# lines of the list below).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

config=RelWithDebInfo
folder=build/Linux
wheel=false
value() { [ $# -ge 2 ] || { echo "build.sh: $1 needs a value" >&2; exit 2; }; printf '%s' "$2"; }
while [ $# -gt 0 ]; do
    case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
    case $1 in
    --config) config=$(value "$@"); shift ;;
    --build_dir) folder=$(value "$@"); shift ;;
    --cuda_home) CUDA_HOME=$(value "$@"); export CUDA_HOME; shift ;;
    --cudnn_home) CUDNN_HOME=$(value "$@"); export CUDNN_HOME; shift ;;
    --mpi_home) MPI_CXX_INCLUDE_PATH=$(value "$@")/include; export MPI_CXX_INCLUDE_PATH; shift ;;
    --use_cuda) export ONNXTRAIN_CUDA=1 ;;
    --use_mpi)
        export ONNXTRAIN_MPI=1
        case ${2:-} in
        true) shift ;;
        false) export ONNXTRAIN_MPI=0; shift ;;
        esac ;;
    --parallel)
        if [[ ${2:-} =~ ^[0-9]+$ ]]; then export ONNXTRAIN_JOBS=$2; shift; fi ;;
    --build_wheel) wheel=true ;;
    --cuda_version | --nccl_home) value "$@" >/dev/null; shift ;;
    --cmake_extra_defines) while [[ ${2:-} == *=* && ${2:-} != --* ]]; do shift; done ;;
    --enable_training | --enable_training_apis | --enable_training_ops | --update | --build | --build_shared_lib) ;;
    --skip_tests | --skip_submodule_sync | --allow_running_as_root | --enable_nccl) ;;
    *) echo "build.sh: unknown option $1 (its head lists the options)" >&2; exit 2 ;;
    esac
    shift
done
case $config in
Debug) export ONNXTRAIN_DEBUG=1 ;;
Release | RelWithDebInfo | MinSizeRel) ;;
*) echo "build.sh: --config is $config, expected Debug, Release, RelWithDebInfo or MinSizeRel" >&2; exit 2 ;;
esac

python=${PYTHON:-python3}
if [ "$wheel" = true ]; then
    mkdir -p "$folder/$config/dist"
    "$python" -m pip wheel --no-deps -w "$folder/$config/dist" .
    ls "$folder/$config/dist"/*.whl
else
    "$python" setup.py -q egg_info build_ext --inplace
fi
