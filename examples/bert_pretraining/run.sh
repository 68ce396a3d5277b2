#!/usr/bin/env bash
# From raw text to a pre-trained, exported and evaluated BERT: run.sh [--config small|large] [--text FILE,FILE]
# [--out DIR] [--processes N]. small takes a few minutes on two cores; large is the published recipe, for GPUs.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
config=small text="" OUT=$HERE/out processes=""
while [ $# -gt 0 ]; do
    case $1 in
    --config) config=$2 ;;
    --text) text=$2 ;;
    --out) OUT=$2 ;;
    --processes) processes=$2 ;;
    *)
        echo "run.sh: $1 is no option; those are --config, --text, --out, --processes" >&2
        exit 2
        ;;
    esac
    shift 2
done
case $config in small | large) ;; *)
    echo "run.sh: --config is $config, expected small or large" >&2
    exit 2
    ;;
esac
FOR=examples
source "$HERE/../../tests/setup.sh"
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
export PYTHON BERT_PREP_WORKING_DIR=${BERT_PREP_WORKING_DIR:-$OUT/data} RESULTS_DIR=$OUT/results
prep() { "$PYTHON" "$HERE/bertPrep.py" --dataset "$dataset" --action "$@"; }
# Arguments of run_pretraining_ort.sh from 12 to 16: they are the same for both configurations.
fixed=(42 bert_lamb_pretraining true true "")
resume=false
[ -n "$(find "$RESULTS_DIR/checkpoints" -name 'ckpt_*.pt' 2>/dev/null)" ] && resume=true

if [ "$config" = small ]; then
    processes=${processes:-2}
    batch=$((processes < 8 ? 8 / processes * 4 : 4)) # of a process; up to 32 for all, and a multiple of 4
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > processes ? $(nproc) / processes : 1))}
    dataset=wikicorpus_en
    if [ -z "$text" ]; then
        text=$("$PYTHON" "$HERE/find_text.py" "$OUT")
    fi
    shards=(--n_training_shards 4 --n_test_shards 2)
    prep text_formatting --input_files "$text"
    prep sharding "${shards[@]}"
    folder=$BERT_PREP_WORKING_DIR/sharded_training_shards_4_test_shards_2_fraction_0.2/$dataset
    vocabulary=$OUT/vocab.txt
    [ -e "$vocabulary" ] || "$PYTHON" "$HERE/make_vocab.py" 4000 "$vocabulary" "$folder"/*_training_*.txt
    prep create_hdf5_files "${shards[@]}" --vocab_file "$vocabulary" --max_seq_length 64 \
        --max_predictions_per_seq 10 --n_processes 2
    prep create_hdf5_files "${shards[@]}" --vocab_file "$vocabulary" --max_seq_length 128 \
        --max_predictions_per_seq 20 --n_processes 2
    data() { echo "$BERT_PREP_WORKING_DIR/hdf5_lower_case_1_seq_len_${1}_max_pred_${2}_masked_lm_prob_0.15_random_seed_12345_dupe_factor_5/$dataset"; }
    BERT_CONFIG=$HERE/config_small.json SEQ_LENGTH=64 PREDICTIONS=10 SEQ_LENGTH_PHASE2=128 PREDICTIONS_PHASE2=20 \
        bash "$HERE/run_pretraining_ort.sh" "$batch" 4e-3 fp32 "$processes" 0.2843 "${BERT_STEPS:-300}" 100 "$resume" true \
        true 2 "${fixed[@]}" "$batch" 2e-3 0.128 "${BERT_STEPS_PHASE2:-60}" 4 "$(data 64 10)" "$(data 128 20)" "$HERE"
    "$PYTHON" "$HERE/plot.py" "$RESULTS_DIR/dllogger.json" "$OUT/loss.png"
    last=$((${BERT_STEPS:-300} + ${BERT_STEPS_PHASE2:-60}))
    "$PYTHON" "$HERE/convert_checkpoint.py" "$RESULTS_DIR/checkpoints/ckpt_$last.pt" "$OUT/bert.pt"
    "$PYTHON" "$HERE/run_classifier_ort.py" --make_pairs "$folder" --train_file "$OUT/pairs/train.tsv" \
        --eval_file "$OUT/pairs/test.tsv" --vocab_file "$vocabulary" --config_file "$HERE/config_small.json" \
        --init_checkpoint "$OUT/bert.pt" --max_seq_length 64 --learning_rate 5e-4 --num_train_epochs "${BERT_EPOCHS:-2}" \
        --output_file "$OUT/evaluation.json"
else
    processes=${processes:-8}
    "$PYTHON" "$HERE/estimate.py"
    for dataset in bookscorpus wikicorpus_en google_pretrained_weights; do prep download; done
    for dataset in bookscorpus wikicorpus_en; do prep text_formatting; done
    dataset=books_wiki_en_corpus
    prep sharding
    prep create_hdf5_files --max_seq_length 128 --max_predictions_per_seq 20
    prep create_hdf5_files --max_seq_length 512 --max_predictions_per_seq 80
    data() { echo "$BERT_PREP_WORKING_DIR/hdf5_lower_case_1_seq_len_${1}_max_pred_${2}_masked_lm_prob_0.15_random_seed_12345_dupe_factor_5/$dataset"; }
    # The published batches are 65,536 and 32,768 sequences, whatever the number of GPUs. A step has 64 and 8 of them.
    first=$((65536 / processes)) second=$((32768 / processes))
    bash "$HERE/run_pretraining_ort.sh" "$first" 6e-3 fp16 "$processes" 0.2843 7038 200 "$resume" true true \
        $((first / 64)) "${fixed[@]}" "$second" 4e-3 0.128 1563 $((second / 8)) "$(data 128 20)" "$(data 512 80)" "$HERE"
    "$PYTHON" "$HERE/plot.py" "$RESULTS_DIR/dllogger.json" "$OUT/loss.png"
    "$PYTHON" "$HERE/convert_checkpoint.py" "$RESULTS_DIR/checkpoints/ckpt_8601.pt" "$OUT/bert.pt"
fi
echo "results: $OUT"
