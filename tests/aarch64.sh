#!/usr/bin/env bash
# Cross-builds the wheel for aarch64 on an x86-64 Debian or Ubuntu and tries it under qemu: the unit tests in C against
# the loops for NEON, then tests/smoke.py with PyPI's torch for aarch64, in an environment that has nothing else.
# Arguments go to pytest, which then runs there, too: `tests/aarch64.sh tests/ops/test_groupnorm.py`. Tests that start
# processes fail there, since the kernel cannot start programs of another processor by itself.
#
# ONNXTRAIN_AARCH64_TORCH is the torch of that environment (2.10.0, the last whose wheel needs no CUDA). What was
# downloaded stays in build/aarch64.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
ARM_TORCH=${ONNXTRAIN_AARCH64_TORCH:-2.10.0}
HERE=$ROOT/build/aarch64
SYSTEM=$HERE/system # Debian's files for arm64
SITE=$HERE/site     # Python packages
TREE=$HERE/tree     # a copy of the sources, so that libraries of this processor do not get into the wheel
QEMU=(qemu-aarch64-static -L "$SYSTEM")
export CC="aarch64-linux-gnu-gcc --sysroot=$SYSTEM"

need_tools() {
    local missing=()
    command -v aarch64-linux-gnu-gcc >/dev/null || missing+=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
    command -v qemu-aarch64-static >/dev/null || missing+=(qemu-user-static)
    command -v debootstrap >/dev/null || missing+=(debootstrap)
    [ ${#missing[@]} -eq 0 ] || install_packages "${missing[@]}"
}

# Files of Debian's packages alone: no package is configured, so that neither root nor another kernel is needed.
make_system() {
    [ -e "$SYSTEM/done" ] && return
    rm -rf "$SYSTEM"
    mkdir -p "$HERE"
    debootstrap --arch=arm64 --foreign --variant=minbase \
        --include=python3,libpython3-dev,libprotobuf-c-dev,libc6-dev,libgcc-12-dev,libgomp1 \
        bookworm "$SYSTEM" >"$HERE/system.log" ||
        { tail "$HERE/system.log" >&2; exit 1; }
    local package
    for package in "$SYSTEM"/var/cache/apt/archives/*.deb; do dpkg-deb -x "$package" "$SYSTEM"; done
    touch "$SYSTEM/done"
}

# torch without its dependencies: pip takes their markers for this processor, and would bring its CUDA.
make_site() {
    [ "$(cat "$SITE/done" 2>/dev/null)" = "$ARM_TORCH" ] && return
    rm -rf "$SITE"
    local platform=(--platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_26_aarch64
        --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 --python-version 3.11 --only-binary=:all:)
    install "${platform[@]}" --target "$SITE" --no-deps "torch==$ARM_TORCH"
    install "${platform[@]}" --target "$SITE" numpy "onnx>=1.19" "onnxscript>=0.5" filelock "typing-extensions>=4.10" \
        "sympy>=1.13.3" networkx jinja2 fsspec setuptools pytest expecttest
    echo "$ARM_TORCH" >"$SITE/done"
}

build_wheel() {
    rm -rf "$TREE" "$HERE/dist"
    mkdir -p "$TREE"
    git ls-files -z -co --exclude-standard | xargs -0 ls -d 2>/dev/null | tar -cf - -T - | tar -C "$TREE" -xf -
    (cd "$TREE" && ONNXTRAIN_PYTHON_INCLUDE="$SYSTEM/usr/include/python3.11" _PYTHON_HOST_PLATFORM=linux-aarch64 \
        PROTOBUF_C_LICENSE="$SYSTEM/usr/share/doc/libprotobuf-c1/copyright" ONNXTRAIN_CUDA=0 ONNXTRAIN_MPI=0 \
        "$PYTHON" setup.py -q build --build-temp "$HERE/objects" bdist_wheel --dist-dir "$HERE/dist" \
        >"$HERE/build.log" 2>&1) || { tail -20 "$HERE/build.log" >&2; exit 1; }
    rm -rf "$SITE"/onnxtrain "$SITE"/onnxtrain-*
    mkdir "$HERE/dist/repaired"
    bash tests/wheel.sh --repair "$HERE"/dist/onnxtrain-*-cp311-abi3-linux_aarch64.whl "$HERE/dist/repaired"
    "$PYTHON" -m zipfile -e "$HERE"/dist/repaired/*.whl "$SITE"
}

emulated() { (cd "$HERE" && env -u CC PYTHONPATH="$SITE" "${QEMU[@]}" "$SYSTEM/usr/bin/python3" -W ignore "$@"); }

need_tools
make_system
make_site
build_wheel
echo "the core without Python"
ONNXTRAIN_TEST_RUNNER="${QEMU[*]}" "$PYTHON" -m pytest -q --full tests/unit
echo "a training"
emulated "$ROOT/tests/smoke.py" 2>/dev/null
emulated -m onnxtrain 2>/dev/null
emulated -m onnxtrain 2>/dev/null | grep -q "^instruction set *neon"
[ $# -eq 0 ] || (cd "$TREE" && rm -rf onnxtrain && env -u CC PYTHONPATH="$SITE" "${QEMU[@]}" "$SYSTEM/usr/bin/python3" \
    -W ignore -m pytest -q -p no:cacheprovider --full "$@")
