#!/usr/bin/env bash
# What .ci/run holds every commit to besides the tests: ruff over all Python, lines of at most 120 characters in C,
# one name for one test file (pytest imports them by their base names).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
"$PYTHON" -m ruff check onnxtrain tests tools examples third_party setup.py
long=$(find csrc cuda -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' | xargs awk 'length > 120 { print FILENAME ":" FNR ": " length " characters" }')
[ -z "$long" ] || { echo "$long" >&2; exit 1; }
twice=$(find tests -name 'test_*.py' -printf '%f\n' | sort | uniq -d)
[ -z "$twice" ] || { echo "two test files of one name: $twice" >&2; exit 1; }
