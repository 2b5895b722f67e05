#!/usr/bin/env bash
#SBATCH --job-name=hetero-pretrain
#SBATCH --partition=nvidia
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH hetjob
#SBATCH --partition=amd
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# One training run over two partitions, one for each vendor, as a heterogeneous Slurm job.
#
#   DATA_PATH=/data/tokens sbatch examples/slurm/hetjob.sh llama3_8b [more flags]
#
# Submit from the root of the checkout, which every node sees under the same path. The components
# stand in the order of VENDORS: the first holds the first pipeline stage. Variables, beside those in
# examples/launch.sh:
#   ENV_NVIDIA, ENV_AMD  script that each side sources for its own PyTorch (env_nvidia.sh, env_amd.sh
#                        beside this file)
#   GPUS                 GPUs of every node; the same as --gpus-per-node above (8)
#   MASTER_PORT          a free port of the first node (made from the job's number)
set -euo pipefail

refuse() {
    echo "error: $*" >&2
    exit 2
}

# sbatch runs a copy of this file from elsewhere.
ROOT=${SLURM_SUBMIT_DIR:-}
[[ -n $ROOT ]] || refuse "this is a batch script; submit it with sbatch"
[[ -f $ROOT/pretrain_gpt.py ]] || refuse "$ROOT is not the checkout; submit from its root"
MODEL=${1:-}
[[ -f $ROOT/examples/$MODEL/node.sh ]] ||
    refuse "the first argument is '$MODEL'; give a model's folder, llama3_8b or qwen2_7b"
[[ ${SLURM_HET_SIZE:-1} == 2 ]] ||
    refuse "the job has ${SLURM_HET_SIZE:-1} components; submit two, one for each vendor"
[[ -n ${DATA_PATH:-} ]] || refuse "DATA_PATH is not set; give the prefix of the token files"

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0")
second=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")
mapfile -t hosts <<<"$first"$'\n'"$second"
(($(wc -l <<<"$first") == $(wc -l <<<"$second"))) ||
    refuse "the components have $(wc -l <<<"$first") and $(wc -l <<<"$second") nodes; give both as many"

# What every node reads: the ranks of the nodes are their places in HOSTS.
export HOSTS="${hosts[*]}" ROOT MODEL
export NODES=${#hosts[@]} MASTER_ADDR=${hosts[0]} VENDORS=${VENDORS:-nvidia amd}
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
read -r first_vendor second_vendor <<<"$VENDORS"
echo "nodes in the order of their ranks: $HOSTS; meeting at $MASTER_ADDR:$MASTER_PORT"

# One step over both components: when a node fails, all end. The one task of a node starts its ranks,
# so it must not be bound to one core.
task=(--ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 bash "$ROOT/examples/slurm/node_task.sh")
exec srun --het-group=0 "${task[@]}" "$first_vendor" "${@:2}" \
    : --het-group=1 "${task[@]}" "$second_vendor" "${@:2}"
