#!/usr/bin/env bash
# Does a mixed run train the same model? Homogeneous and mixed runs on pairs of GPUs of one host, real text,
# deterministic and default kernels. docs/benchmarks/parity.md says what is trained and compared.
# Usage: [ITERATIONS=500] [PER_PAIR=3] [PROCESSES=2] [KERNELS='deterministic fast'] \
#            [TRANSPORTS='device-direct cpu-forward'] [DEADLINE=300] [MINUTES=9] [FLAGS='...'] [LLAMA8B=1] \
#            bash docs/benchmarks/parity_training.sh OUT
# FLAGS go to every run and win over its own. LLAMA8B=1 trains LLaMA-8B with deterministic kernels instead.
set -euo pipefail
OUT=$(realpath -m "${1:?give a folder for the results}")
cd "$(dirname "$0")/../.."
words=(--out "$OUT")
if [[ ${LLAMA8B:-0} == 1 ]]; then words+=(--model llama3_8b); fi
for name in ITERATIONS PER_PAIR PROCESSES KERNELS TRANSPORTS DEADLINE MINUTES; do
    if [[ -n ${!name:-} ]]; then
        flag=--${name,,}
        read -ra values <<<"${!name}"
        words+=("${flag//_/-}" "${values[@]}")
    fi
done
read -ra extra <<<"${FLAGS:-}"
exec "${PYTHON:-python3}" bench/benchmark_parity.py "${words[@]}" -- "${extra[@]}"
