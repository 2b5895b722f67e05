#!/usr/bin/env bash
# What srun starts on every node: the vendor's environment, then this node's part of the run.
# hetjob.sh exports what it reads (ROOT, MODEL, HOSTS, NODES, MASTER_ADDR, MASTER_PORT).
#
#   node_task.sh VENDOR [more flags]
set -euo pipefail

case ${1-} in
nvidia) environment=${ENV_NVIDIA:-$ROOT/examples/slurm/env_nvidia.sh} ;;
amd) environment=${ENV_AMD:-$ROOT/examples/slurm/env_amd.sh} ;;
*) echo "error: VENDORS names '${1-}'; give nvidia and amd" >&2 && exit 2 ;;
esac
if [[ ! -r $environment ]]; then
    echo "error: $(hostname) cannot read $environment; set ENV_${1^^} to a script that is there" >&2
    exit 2
fi
# What it sets reaches the run, with or without `export`. The scripts of conda and of modules read
# variables that nobody has set.
set -a +u
source "$environment"
set +a -u

read -ra hosts <<<"$HOSTS"
for rank in "${!hosts[@]}"; do
    if [[ ${hosts[rank]} == "$SLURMD_NODENAME" ]]; then
        exec bash "$ROOT/examples/$MODEL/node.sh" "$rank" "${@:2}"
    fi
done
echo "error: $SLURMD_NODENAME is not one of the job's nodes ($HOSTS)" >&2
exit 2
