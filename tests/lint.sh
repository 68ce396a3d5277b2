#!/usr/bin/env bash
# What .ci/run checks besides the tests: ruff over all Python, mypy over the package (pyproject.toml configures both),
# stubtest of _C.pyi against the built extension, at most 120 characters a line in C, no C function that is longer or
# has more parameters than tools/long_functions.py allows, and distinct names of test files, since pytest imports them
# by their base names; the schemas of workflows; and .clang-tidy's checks over csrc/, if clang-tidy can be installed.
#
#     bash tests/lint.sh [BASE]
#
# With BASE, a commit, it also prints where lines of C that have changed since then differ from .clang-format, if
# clang-format is installed. Tables and aligned comments may differ, so this is no failure.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
"$PYTHON" -m ruff check onnxtrain tests tools examples third_party setup.py
"$PYTHON" -m mypy
"$PYTHON" -m mypy.stubtest onnxtrain._C --mypy-config-file tests/stubtest.ini
long=$(find csrc cuda -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' | xargs awk 'length > 120 { print FILENAME ":" FNR ": " length " characters" }')
[ -z "$long" ] || { echo "$long" >&2; exit 1; }
twice=$(find tests -name 'test_*.py' -printf '%f\n' | sort | uniq -d)
[ -z "$twice" ] || { echo "two test files of one name: $twice" >&2; exit 1; }
"$PYTHON" tools/long_functions.py --check
# Workflows and the citation against their schemas, by a package in a folder of its own.
schemas=$VENV/schemas
[ -e "$schemas/check_jsonschema" ] || "$PYTHON" -m pip install -q --disable-pip-version-check --target "$schemas" \
    "check-jsonschema>=0.33" 2>/dev/null || echo "check-jsonschema cannot be installed here: it is left out" >&2
if [ -e "$schemas/check_jsonschema" ]; then
    check() { PYTHONPATH=$schemas "$PYTHON" -m check_jsonschema -q --builtin-schema "vendor.$1" "${@:2}"; }
    check github-workflows .github/workflows/*.yml
    check dependabot .github/dependabot.yml
    check citation-file-format CITATION.cff
fi
# Clang does not parse what needs gcc's vectors or its omp.h.
tidy=$VENV/bin/clang-tidy
[ -x "$tidy" ] || "$PYTHON" -m pip install -q --disable-pip-version-check "clang-tidy>=20" 2>/dev/null ||
    echo "clang-tidy cannot be installed here: its checks are left out" >&2
if [ -x "$tidy" ] && [ -e build/compile_commands.json ]; then
    find csrc -name '*.c' -not -path 'csrc/simd/*' -not -path csrc/dist/mpi.c -not -name '*.inc.c' |
        grep -v -e base/parallel.c -e base/denormals.c -e ops/support/strided.c |
        xargs -P "$(nproc)" -n 8 "$tidy" -p build --quiet --extra-arg=-w 2>/dev/null
fi
if [ $# -gt 0 ] && command -v git-clang-format > /dev/null; then
    git clang-format --quiet --diff --extensions c,h,cu,cuh "$1" -- csrc cuda || true
fi
