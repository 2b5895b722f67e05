#!/usr/bin/env bash
# Step time of LLaMA-8B on two GPUs of one host, real text: each transport against the vendor library.
# Usage: [ITERATIONS=10] [BATCH=32] [TRANSPORTS='cpu-forward device-direct'] \
#            bash docs/benchmarks/llama8b_step.sh OUT
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:?give a folder for the results}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
mkdir -p "$OUT"
# Initial weights are drawn on the CPU by as many threads as this; torchrun would say 1.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-12}
python3 - "$WORK/text.txt" <<'PY'
import sys
from pydoc_data.topics import topics
open(sys.argv[1], "w").write("\n\n".join(topics[name] for name in sorted(topics)) * 4)
PY
python3 tools/train_tokenizer.py --input "$WORK/text.txt" --output-prefix "$WORK/tok" --vocab-size 8000
python3 tools/preprocess_data.py --input "$WORK/text.txt" --output-prefix "$WORK/data" \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$WORK/tok.model" --append-eod --workers 4

# The text is small, so its vocabulary is padded to LLaMA-3's: the output layer has its full size.
python3 tools/prove_parity.py --nproc 2 --transports ${TRANSPORTS:-cpu-forward device-direct} \
    --layers 17 15 --out "$WORK/runs" -- \
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention \
    --num-query-groups 8 --ffn-hidden-size 14336 --seq-length 4096 --max-position-embeddings 4096 \
    --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --swiglu \
    --untie-embeddings-and-output-weights --disable-bias-linear --hidden-dropout 0 \
    --attention-dropout 0 --make-vocab-size-divisible-by 128256 --bf16 --micro-batch-size 1 \
    --global-batch-size "${BATCH:-32}" --train-iters "${ITERATIONS:-10}" --lr 1e-5 --min-lr 1e-6 \
    --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 \
    --use-distributed-optimizer --eval-iters 0 --log-interval 1 --split 100,0,0 \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$WORK/tok.model" \
    --data-path "$WORK/data_text_document" --data-cache-path "$WORK/cache" || status=$?
cp "$WORK"/runs/*.log "$OUT/"
# 1 says that losses differ, as they may without deterministic kernels; this measures speed.
[ "${status:-0}" -le 1 ] && cp "$WORK/runs/parity.json" "$OUT/llama8b_step.json"
