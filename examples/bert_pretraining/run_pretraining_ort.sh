#!/usr/bin/env bash
# Pre-trains BERT-large, phase 1 and then phase 2. Arguments go by position; each has a default, and README.md lists them.
# Environment: PYTHON, BERT_CONFIG, RESULTS_DIR, and the lengths SEQ_LENGTH, PREDICTIONS, SEQ_LENGTH_PHASE2,
# PREDICTIONS_PHASE2 of the data.
set -euo pipefail

train_batch_size=${1:-4096} # of one process; as are the batches below
learning_rate=${2:-6e-3}
precision=${3:-fp16} # or fp32
num_gpus=${4:-8}     # processes
warmup_proportion=${5:-0.2843}
train_steps=${6:-7038}
save_checkpoint_steps=${7:-200}
resume_training=${8:-false}
create_logfile=${9:-true}
accumulate_gradients=${10:-true}
gradient_accumulation_steps=${11:-32}
seed=${12:-42}
job_name=${13:-bert_lamb_pretraining}
allreduce_post_accumulation=${14:-true}
allreduce_post_accumulation_fp16=${15:-true}
# 16 has no meaning
train_batch_size_phase2=${17:-4096}
learning_rate_phase2=${18:-4e-3}
warmup_proportion_phase2=${19:-0.128}
train_steps_phase2=${20:-1563}
gradient_accumulation_steps_phase2=${21:-256}
data_dir_phase1=${22:-/data/128}
data_dir_phase2=${23:-/data/512}
CODEDIR=${24:-/workspace/bert}
init_checkpoint=${25:-None}
gpu_memory_limit_gb=${26:-32}
deepspeed_zero_stage=${27:-false}

PYTHON=${PYTHON:-python3}
BERT_CONFIG=${BERT_CONFIG:-$CODEDIR/config_large.json}
RESULTS_DIR=${RESULTS_DIR:-$CODEDIR/results}
CHECKPOINTS_DIR=$RESULTS_DIR/checkpoints
mkdir -p "$CHECKPOINTS_DIR"

case $precision in
fp16 | fp32) ;;
*)
    echo "precision (argument 3) is $precision, expected fp16 or fp32" >&2
    exit 2
    ;;
esac
for path in "$data_dir_phase1" "$data_dir_phase2"; do
    [ -d "$path" ] || {
        echo "$path: there is no such folder (arguments 22 and 23)" >&2
        exit 2
    }
done
[ -f "$BERT_CONFIG" ] || {
    echo "$BERT_CONFIG: there is no such file (BERT_CONFIG, or argument 24)" >&2
    exit 2
}

# Several processes: by mpirun, or torchrun where Open MPI is not installed.
launch=("$PYTHON")
if [ "$num_gpus" -gt 1 ]; then
    if command -v mpirun >/dev/null; then
        launch=(mpirun --oversubscribe --bind-to none -n "$num_gpus" "$PYTHON")
        [ "$(id -u)" -ne 0 ] || launch=(mpirun --allow-run-as-root "${launch[@]:1}")
    else
        launch=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$num_gpus")
    fi
fi

common=(--config_file "$BERT_CONFIG" --bert_model bert-large-uncased --output_dir "$CHECKPOINTS_DIR" --seed "$seed"
    --num_steps_per_checkpoint "$save_checkpoint_steps" --gpu_memory_limit_gb "$gpu_memory_limit_gb"
    --json-summary "$RESULTS_DIR/dllogger.json" --disable_progress_bar --do_train)
[ "$precision" = fp16 ] && common+=(--fp16)
[ "$allreduce_post_accumulation" = true ] && common+=(--allreduce_post_accumulation)
[ "$allreduce_post_accumulation_fp16" = true ] && common+=(--allreduce_post_accumulation_fp16)
[ "$deepspeed_zero_stage" = true ] && common+=(--deepspeed_zero_stage)
if [ "$accumulate_gradients" != true ]; then
    gradient_accumulation_steps=1
    gradient_accumulation_steps_phase2=1
fi

# run PHASE BATCH_SIZE OPTION...: one phase, its output to a log file as well where that is asked for.
run() {
    local phase=$1 batch=$2
    shift 2
    local command=("${launch[@]}" "$CODEDIR/run_pretraining_ort.py" "${common[@]}"
        --train_batch_size "$batch" "$@")
    if [ "$create_logfile" = true ]; then
        local name=$job_name.pyt_bert_pretraining_phase${phase}_${precision}_gbs$((batch * num_gpus))
        "${command[@]}" 2>&1 | tee "$RESULTS_DIR/$name.$(date +%y%m%d%H%M%S).log"
    else
        "${command[@]}"
    fi
}

phase1=(--input_dir "$data_dir_phase1" --learning_rate "$learning_rate" --warmup_proportion "$warmup_proportion"
    --max_steps "$train_steps" --max_seq_length "${SEQ_LENGTH:-128}" --max_predictions_per_seq "${PREDICTIONS:-20}"
    --gradient_accumulation_steps "$gradient_accumulation_steps")
[ "$resume_training" = true ] && phase1+=(--resume_from_checkpoint)
[ "$init_checkpoint" = None ] || phase1+=(--init_checkpoint "$init_checkpoint")

# With resume_training a phase 1 that has ended is not run again.
last=$(find "$CHECKPOINTS_DIR" -name 'ckpt_*.pt' | sed 's/.*ckpt_//; s/\.pt$//' | sort -n | tail -1)
if [ "$resume_training" != true ] || [ "${last:-0}" -lt "$train_steps" ]; then
    echo "phase 1"
    run 1 "$train_batch_size" "${phase1[@]}"
fi

echo "phase 2"
run 2 "$train_batch_size_phase2" --input_dir "$data_dir_phase2" --learning_rate "$learning_rate_phase2" \
    --warmup_proportion "$warmup_proportion_phase2" --max_steps "$train_steps_phase2" \
    --max_seq_length "${SEQ_LENGTH_PHASE2:-512}" --max_predictions_per_seq "${PREDICTIONS_PHASE2:-80}" \
    --gradient_accumulation_steps "$gradient_accumulation_steps_phase2" \
    --phase2 --resume_from_checkpoint --phase1_end_step "$train_steps"
echo "finished: $RESULTS_DIR"
