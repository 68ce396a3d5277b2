#!/usr/bin/env bash
# Whether the portable core compiles for Windows: the C sources, and the loops of each instruction set, through MinGW's
# compiler without code generation. tests/mingw.txt names the sources that do not; it must not grow, and a line whose
# source compiles must go. csrc/py needs Python.h of Windows, csrc/dist MPI: both are left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v x86_64-w64-mingw32-gcc >/dev/null || bash tests/packages.sh gcc-mingw-w64-x86-64
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
check() { # SOURCE [OPTION...]: prints the source if it does not compile
    x86_64-w64-mingw32-gcc -fsyntax-only -std=gnu11 -fopenmp -Wall -Wextra -Werror -DNDEBUG -D__USE_MINGW_ANSI_STDIO=1 \
        -DONT_NO_ONEDNN=1 '-DONT_VERSION="0"' -Icsrc "$@" 2>>"$work/errors" || echo "$1"
}
export -f check
export work
sources=$(find csrc -name '*.c' ! -path 'csrc/py/*' ! -path 'csrc/dist/*' ! -path 'csrc/onnx/*' ! -name '*.inc.c' | sort)
{
    xargs -n1 -P"$(nproc)" bash -c 'check "$0"' <<<"$sources"
    for isa in "plain -DONT_ISA_PLAIN=1" "avx2 -mavx2 -mfma -mf16c" \
        "avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c"; do
        find csrc/simd -name '*.inc.c' | sort | xargs -n1 -P"$(nproc)" bash -c 'source=$0; set -- '"$isa"'; check "$source" -DONT_ISA="$@"'
    done
} | sort -u >"$work/failed"
if ! diff <(grep -v '^#' tests/mingw.txt) "$work/failed" >"$work/diff"; then
    echo "tests/mingw.txt differs from what does not compile (< listed, > found):"
    cat "$work/diff"
    grep -m 20 error "$work/errors"
    exit 1
fi
echo "$(wc -w <<<"$sources") sources and the loops of 3 instruction sets compile, but for $(wc -l <"$work/failed") listed"
