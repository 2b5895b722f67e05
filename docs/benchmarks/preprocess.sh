#!/usr/bin/env bash
# Preprocessing against Hugging Face datasets' `map`: same text, tokenizer and number of processes.
# Usage: [MEGABYTES=50] [ROUNDS=5] [PROCESSES='2 1'] bash docs/benchmarks/preprocess.sh OUT.json
# Installs `datasets`, which nothing else here needs, into a folder that is removed at the end.
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=$(realpath -m "${1:?give a file for the results}")
PYTHON=${PYTHON:-$PWD/.venv/bin/python}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
"$PYTHON" -m pip install --quiet --disable-pip-version-check --target "$WORK/datasets" datasets
"$PYTHON" docs/benchmarks/preprocess_rounds.py --work "$WORK" --out "$OUT" \
    --megabytes "${MEGABYTES:-50}" --rounds "${ROUNDS:-5}" --processes ${PROCESSES:-2 1}
