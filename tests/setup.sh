# Sourced by tests/run.sh and the run.sh of each example: system packages, virtual environment, build.
# Sets PYTHON. Stamps in the environment make a second call return in a moment. Callers `set -euo pipefail` first, and
# set FOR=examples where what tests alone need (transformers, DeepSpeed, pytest, kernels for a GPU) need not be there:
# then a python3 that has onnxtrain is taken as it is.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${ONNXTRAIN_VENV:-$ROOT/.venv}
TORCH=${ONNXTRAIN_TORCH:-2.13.0}

need_packages() {
    local missing=() probe=${ONNXTRAIN_PYTHON:-python3}
    { command -v cc && command -v c++; } >/dev/null || missing+=(build-essential)
    command -v protoc-c >/dev/null || missing+=(protobuf-c-compiler)
    command -v protoc >/dev/null || missing+=(protobuf-compiler)
    [ -e /usr/include/protobuf-c/protobuf-c.h ] || missing+=(libprotobuf-c-dev)
    command -v "$probe" >/dev/null || missing+=(python3)
    "$probe" -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
    "$probe" -c 'import os, sysconfig; raise SystemExit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' \
        2>/dev/null || missing+=(python3-dev)
    [ ${#missing[@]} -eq 0 ] || install_packages "${missing[@]}"
    command -v mpicc >/dev/null && command -v mpirun >/dev/null && return
    # For processes that mpirun starts; everything else works without.
    command -v apt-get >/dev/null && { [ "$(id -u)" -eq 0 ] || sudo -n true 2>/dev/null; } &&
        (install_packages libopenmpi-dev openmpi-bin) || echo "Open MPI cannot be installed here: it is not tested" >&2
}

install_packages() {
    local as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        if ! command -v sudo >/dev/null || ! command -v apt-get >/dev/null; then
            echo "onnxtrain: these system packages are missing, install them first: $*" >&2
            exit 1
        fi
        as_root=(sudo)
    fi
    echo "installing $*"
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null
}

# Prints a hash over the files named: a stamp is true as long as it is the same.
hash_of() { (cd "$ROOT" && find "$@" -type f -not -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16); }

# Libraries that users have around a module: in one call, which resolves them once, or else each by itself, so that one
# that cannot be had loses no other. They are to take the torch that is there.
install_clients() {
    local client clients=("transformers>=5" "accelerate>=1" "peft>=0.19" "lightning>=2.6" "torch_geometric>=2.7"
        "sentence-transformers>=5" "trl>=1" "datasets>=4" "diffusers>=0.38" "bitsandbytes>=0.50" "torchdiffeq>=0.2"
        "x-transformers>=2" "conformer>=0.3" "skorch>=1" "gguf>=0.10")
    install "torch==$TORCH" "${clients[@]}" || for client in "${clients[@]}"; do
        install "torch==$TORCH" "$client" || echo "$client cannot be installed here: it is not tested" >&2
    done
    # Apart, and without what it asks for: PyPI's torchvision has operators for a torch with CUDA alone, and fails to be
    # imported by whoever finds it. Only tests/ecosystem/test_timm.py looks here.
    install --no-deps --upgrade --target "$VENV/vision" "timm>=1" \
        "torchvision==0.$(($(cut -d. -f2 <<<"$TORCH") + 15)).*" ||
        echo "timm cannot be installed here: it is not tested" >&2
}

install() { "$PYTHON" -m pip install -q --disable-pip-version-check "$@"; }

# Whether the packages for examples or for tests are there.
has_packages() { [ "$(cat "$VENV/.packages-$1" 2>/dev/null)" = "$stamp" ]; }

# Packages, and the build beside the longest of their installations.
make_environment() {
    PYTHON=$VENV/bin/python
    local stamp building=
    stamp="torch $TORCH $(hash_of pyproject.toml tests/setup.sh)"
    if ! has_packages examples; then
        echo "making the virtual environment $VENV (usually 3 minutes on two cores, the build included)"
        [ -x "$PYTHON" ] || "${ONNXTRAIN_PYTHON:-python3}" -m venv "$VENV"
        install "setuptools>=77" wheel "onnx>=1.19" numpy "onednn-cpu-gomp==2023.2.0; platform_machine == 'x86_64'" \
            "onednn-devel-cpu-gomp==2023.2.0; platform_machine == 'x86_64'"
        build_extension &
        building=$!
        install "torch==$TORCH" "onnxscript>=0.5" "matplotlib>=3.8" "tqdm>=4.66" "h5py>=3" "tokenizers>=0.20"
        wait "$building"
        echo "$stamp" >"$VENV/.packages-examples"
    fi
    [ "${FOR:-tests}" = tests ] || return 0
    has_packages tests && return
    echo "installing the libraries that tests use"
    install "torch==$TORCH" "pytest>=8" "pytest-xdist>=3" expecttest "ruff>=0.12" mypy==2.4.1
    install_clients
    # Built from source against the torch that is there; no operators of its own are compiled.
    DS_BUILD_OPS=0 install --no-build-isolation "deepspeed>=0.19" ||
        echo "deepspeed cannot be installed here: ZeRO is not tested" >&2
    echo "$stamp" >"$VENV/.packages-tests"
}

# An in-place build: what is not newer than its sources is kept. With ONNXTRAIN_SANITIZE it is in build/sanitized, so
# that the tree keeps its own.
build_extension() {
    local stamp sources kind=plain command=(build_ext --inplace)
    if [ -n "${ONNXTRAIN_SANITIZE:-}" ]; then
        kind=sanitized
        command=(build --build-lib "$PACKAGE" --build-temp "$ROOT/build/temp-sanitized")
    elif [ "$ONNXTRAIN_CUDA" = 0 ]; then
        kind=cpu
    fi
    mapfile -t sources < <(cd "$ROOT" && ls -d csrc cuda setup.py third_party pyproject.toml 2>/dev/null; find onnxtrain -name '*.py')
    stamp="$("$PYTHON" -V) $(hash_of "${sources[@]}") ${ONNXTRAIN_SANITIZE:-}"
    if [ -e "$PACKAGE/onnxtrain/_C.abi3.so" ]; then
        [ "$(cat "$VENV/.build-$kind" 2>/dev/null)" = "$stamp" ] && return
        [ "$kind" = cpu ] && [ "$(cat "$VENV/.build-plain" 2>/dev/null)" = "$stamp" ] && return
    fi
    echo "building the extension"
    mkdir -p "$PACKAGE"
    # egg_info: what the package registers with torch.compile, without an installation.
    (cd "$ROOT" && "$PYTHON" setup.py -q egg_info --egg-base "$PACKAGE" "${command[@]}" 2>"$VENV/build.log") || {
        cat "$VENV/build.log" >&2
        exit 1
    }
    echo "$stamp" >"$VENV/.build-$kind"
}

PACKAGE=$ROOT # the folder that holds the package
if [ "${FOR:-tests}" = tests ]; then
    export ONNXTRAIN_CUDA=${ONNXTRAIN_CUDA:-auto} # also where there is no GPU: kernels have to compile
else
    export ONNXTRAIN_CUDA=${ONNXTRAIN_CUDA:-0}
    if python3 -P -c 'import onnxtrain' 2>/dev/null; then # what is installed is used
        PYTHON=python3
        "$PYTHON" -P -c 'import h5py, matplotlib, tokenizers, tqdm' 2>/dev/null ||
            install "matplotlib>=3.8" "tqdm>=4.66" "h5py>=3" "tokenizers>=0.20"
        return
    fi
fi
[ -z "${ONNXTRAIN_SANITIZE:-}" ] || PACKAGE=$ROOT/build/sanitized
need_packages
make_environment
build_extension
export PYTHONPATH="$PACKAGE${PYTHONPATH:+:$PYTHONPATH}"
