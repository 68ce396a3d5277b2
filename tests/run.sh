#!/usr/bin/env bash
# Sets everything up and runs the test suite, two tests at a time. Arguments go to pytest, in place of the two at a time.
# `run.sh -n 2 --changed BASE` runs every case of the tests of what has changed since that commit, beside the sample.
# ONNXTRAIN_SLOW=1 runs the fuzz at its full length; ONNXTRAIN_SANITIZE=address,undefined builds and runs under the
# sanitizers.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
if [ -n "${ONNXTRAIN_SANITIZE:-}" ]; then
    export LD_PRELOAD="$(cc -print-file-name=libasan.so):$(cc -print-file-name=libubsan.so)"
    export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
    export PYTHONSAFEPATH=1  # the package of build/sanitized, not that of the folder we are in
fi
[ $# -gt 0 ] || set -- -n 2
exec "$PYTHON" -m pytest -q "$@"
