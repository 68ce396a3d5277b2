#!/usr/bin/env bash
# Sets everything up, then trains the getting-started transformer in PyTorch eager and through ORTModule, and draws
# loss.png and times.png into out/. Options: --epochs N --max-batches N --data DIR --dropout P --seed N;
# --ort trainer or --ort legacy, first: by ORTTrainer instead.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
FOR=examples
source "$HERE/../../tests/setup.sh"
OUT=$HERE/out
mkdir -p "$OUT"
ort=()
if [ "${1:-}" = --ort ]; then
    ort=(--ort "${2:-}")
    shift 2
fi
"$PYTHON" "$HERE/train.py" "$@" --result "$OUT/eager.json"
"$PYTHON" "$HERE/train_ort.py" ${ort[@]+"${ort[@]}"} "$@" --result "$OUT/onnxtrain.json"
"$PYTHON" "$HERE/plot.py" "$OUT/eager.json" "$OUT/onnxtrain.json" "$OUT"
