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
#   GPUS                 GPUs of a node (8), or of a node of each component ("8 4"); the same as
#                        --gpus-per-node above
#   CONTAINER_NVIDIA, CONTAINER_AMD, CONTAINER_MOUNTS
#                        images in which pyxis starts each side, and what is mounted in both beside
#                        the checkout, as in "/data:/data"
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

# What every node reads: the ranks of the nodes are their places in HOSTS.
export HOSTS="${hosts[*]}" ROOT MODEL
NODES="$(wc -l <<<"$first") $(wc -l <<<"$second")"
export NODES MASTER_ADDR=${hosts[0]} VENDORS=${VENDORS:-nvidia amd}
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
read -r first_vendor second_vendor <<<"$VENDORS"
echo "nodes in the order of their ranks: $HOSTS; meeting at $MASTER_ADDR:$MASTER_PORT"

# pyxis's options for one side, in CONTAINER: none where that side's variable is not set.
choose_container() { # VENDOR
    local variable=CONTAINER_${1^^} mounts=$ROOT:$ROOT${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}
    [[ $1 != amd ]] || mounts+=,/dev/kfd:/dev/kfd,/dev/dri:/dev/dri
    CONTAINER=()
    [[ -z ${!variable:-} ]] ||
        CONTAINER=(--container-image="${!variable}" --container-mounts="$mounts"
            --container-workdir="$ROOT")
}

# One step over both components: when a node fails, all end. The one task of a node starts its ranks,
# so it must not be bound to one core.
step=(--ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1)
task=(bash "$ROOT/examples/slurm/node_task.sh")
choose_container "$first_vendor"
components=(--het-group=0 "${step[@]}" "${CONTAINER[@]}" "${task[@]}" "$first_vendor" "${@:2}" :)
choose_container "$second_vendor"
components+=(--het-group=1 "${step[@]}" "${CONTAINER[@]}" "${task[@]}" "$second_vendor" "${@:2}")
exec srun "${components[@]}"
