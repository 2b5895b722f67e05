#!/usr/bin/env bash
# Mixed against homogeneous on two GPUs of one host, real text, deterministic kernels, fp32 and bf16.
# Usage: [ITERATIONS=20] [PRECISIONS='fp32 bf16'] [TRANSPORTS='gloo ipc cpu-forward'] \
#            bash docs/benchmarks/parity_two_gpus.sh OUT
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:?give a folder for the results}
WORK=$(mktemp -d)
mkdir -p "$OUT"
python3 - "$WORK/text.txt" <<'PY'
import sys
from pydoc_data.topics import topics
open(sys.argv[1], "w").write("\n\n".join(topics[name] for name in sorted(topics)))
PY
python3 tools/train_tokenizer.py --input "$WORK/text.txt" --output-prefix "$WORK/tok" --vocab-size 8000
python3 tools/preprocess_data.py --input "$WORK/text.txt" --output-prefix "$WORK/data" \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$WORK/tok.model" --append-eod --workers 4

# LLaMA-3.2-1B's shape (tied embeddings) with the small vocabulary of this text.
MODEL=(--num-layers 16 --hidden-size 2048 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --kv-channels 64 --ffn-hidden-size 8192 --seq-length 2048
    --max-position-embeddings 2048 --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 --attention-dropout 0
    --micro-batch-size 1 --global-batch-size 16 --train-iters "${ITERATIONS:-20}" --lr 3e-4
    --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 --clip-grad 1.0
    --adam-beta2 0.95 --use-distributed-optimizer --eval-iters 0 --log-interval 5
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$WORK/tok.model"
    --data-path "$WORK/data_text_document" --split 100,0,0 --data-cache-path "$WORK/cache"
    --deterministic-mode)
status=0
for precision in ${PRECISIONS:-fp32 bf16}; do
    echo "== $precision"
    flags=("${MODEL[@]}")
    [ "$precision" = bf16 ] && flags+=(--bf16)
    python3 tools/prove_parity.py --nproc 2 --transports ${TRANSPORTS:-gloo ipc cpu-forward} --layers 9 7 \
        --out "$WORK/$precision" -- "${flags[@]}" || status=1
    cp "$WORK/$precision/parity.json" "$OUT/parity_$precision.json" || true
    cat "$WORK/$precision"/*.log > "$OUT/parity_$precision.log" || true
done
exit $status
