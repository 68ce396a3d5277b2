#!/usr/bin/env bash
# Runs tests/smoke.py of the one wheel on several pairs of CPython and torch and prints a Markdown table. By hand: most
# builds of torch bring gigabytes of CUDA, so that the pairs come one at a time, and what was installed is removed
# before the next.
# Usage: tests/matrix.sh [PYTHON:TORCH ...], as in 3.12:2.13.0; TORCH may be `newest`. Needs the wheel of
# tests/wheel.sh.
set -uo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
PAIRS=("$@")
[ $# -gt 0 ] || PAIRS=(3.11:2.10.0 3.11:2.13.0 3.11:newest 3.12:2.13.0 3.13:2.13.0 3.14:newest)
[ -n "$(ls "$ROOT"/wheelhouse/*.whl 2>/dev/null)" ] || bash "$ROOT/tests/wheel.sh" --build-only || exit 1
WHEEL=$(ls "$ROOT"/wheelhouse/*.whl)

# Prints the interpreter of this version: on PATH, or among those of pyenv.
interpreter() {
    local candidate
    for candidate in "python$1" "$HOME"/.pyenv/versions/"$1".*/bin/python; do
        [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$1" ] && echo "$candidate" && return
    done
    return 1
}

# Prints what became of one pair.
try_pair() {
    local python torch=$2
    python=$(interpreter "$1") || { echo "not tried: no CPython $1 on this machine"; return; }
    rm -rf "$SCRATCH/venv"
    "$python" -m venv "$SCRATCH/venv" || { echo "not tried: no venv"; return; }
    [ "$torch" = newest ] && torch=torch || torch="torch==$torch"
    "$SCRATCH/venv/bin/python" -m pip install -q --no-cache-dir --disable-pip-version-check "$torch" numpy "$WHEEL" \
        >"$SCRATCH/log" 2>&1 || { echo "not tried: pip: $(grep -m1 ERROR "$SCRATCH/log")"; return; }
    cp "$ROOT/tests/smoke.py" "$SCRATCH/"
    if (cd "$SCRATCH" && env -i HOME="$SCRATCH" PATH="$SCRATCH/venv/bin" python -I smoke.py --installed) >"$SCRATCH/log" 2>&1; then
        echo "passes: $(tail -1 "$SCRATCH/log" | sed 's/^smoke ok: //')"
    else
        cat "$SCRATCH/log" >&2
        echo "FAILS: $(tail -1 "$SCRATCH/log")"
    fi
}

echo "$(basename "$WHEEL")"
echo "| CPython | torch | result |"
echo "| --- | --- | --- |"
failed=0
for pair in "${PAIRS[@]}"; do
    result=$(try_pair "${pair%%:*}" "${pair##*:}")
    case $result in FAILS*) failed=1 ;; esac
    echo "| ${pair%%:*} | ${pair##*:} | $result |"
    rm -rf "$SCRATCH/venv"
done
exit "$failed"
