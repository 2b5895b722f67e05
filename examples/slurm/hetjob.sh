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
# One training run over the partitions of two vendors, as a heterogeneous Slurm job.
#
#   DATA_PATH=/data/tokens sbatch examples/slurm/hetjob.sh llama3_8b [more flags]
#
# Submit from the root of the checkout, which every node sees under the same path. The components
# stand in the order of VENDORS, one for each: the first holds the first pipeline stage. For "nvidia
# amd nvidia" repeat the first block above behind another "hetjob". Variables, beside those in
# examples/launch.sh:
#   ENV_NVIDIA, ENV_AMD  script that each side sources for its own PyTorch (env_nvidia.sh, env_amd.sh
#                        beside this file)
#   GPUS                 GPUs of a node (8), or of a node of each component ("8 4"); the same as
#                        --gpus-per-node above
#   CONTAINER_NVIDIA, CONTAINER_AMD, CONTAINER_MOUNTS
#                        images in which pyxis starts each side, and what is mounted in both beside
#                        the checkout, as in "/data:/data"
#   MASTER_PORT          a free port of the first node (made from the job's number)
#   LAUNCHER_FLAGS       with --hetero-restarts in it the job outlives the loss of a node; submit it
#                        with sbatch --no-kill then
set -euo pipefail

refuse() {
    echo "error: $*" >&2
    exit 2
}

# sbatch runs a copy of this file from elsewhere.
ROOT=${SLURM_SUBMIT_DIR:-}
[[ -n $ROOT ]] || refuse "this is a batch script; submit it with sbatch"
[[ -f $ROOT/pretrain_gpt.py ]] || refuse "$ROOT is not the checkout; submit from its root"
source "$ROOT/examples/launch.sh"
MODEL=${1:-}
[[ -f $ROOT/examples/$MODEL/node.sh ]] ||
    fault "the first argument is '$MODEL'; give a model's folder, llama3_8b or qwen2_7b"
export VENDORS
read -ra vendors <<<"$VENDORS"
[[ ${SLURM_HET_SIZE:-1} == "${#vendors[@]}" ]] ||
    fault "the job has ${SLURM_HET_SIZE:-1} components and VENDORS ($VENDORS) names" \
        "${#vendors[@]}; submit one for each"
[[ -n ${DATA_PATH:-} ]] || fault "DATA_PATH is not set; give the prefix of the token files"
refuse_faults

# What every node reads: the ranks of the nodes are their places in HOSTS.
hosts=() nodes=()
for component in "${!vendors[@]}"; do
    list=SLURM_JOB_NODELIST_HET_GROUP_$component
    names=$(scontrol show hostnames "${!list}")
    mapfile -t own <<<"$names"
    hosts+=("${own[@]}") nodes+=("${#own[@]}")
done
export HOSTS="${hosts[*]}" NODES="${nodes[*]}" ROOT MODEL MASTER_ADDR=${hosts[0]}
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
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

# One step over all components: when a node fails, all end, unless the launchers go on without it.
# The one task of a node starts its ranks, so it must not be bound to one core.
step=(--ntasks-per-node=1 --cpu-bind=none)
case " ${LAUNCHER_FLAGS:-} " in
*" --hetero-restarts "*) step+=(--no-kill --kill-on-bad-exit=0) ;;
*) step+=(--kill-on-bad-exit=1) ;;
esac
components=()
for component in "${!vendors[@]}"; do
    choose_container "${vendors[component]}"
    ((component == 0)) || components+=(:)
    components+=("--het-group=$component" "${step[@]}" "${CONTAINER[@]}"
        bash "$ROOT/examples/slurm/node_task.sh" "${vendors[component]}" "${@:2}")
done
exec srun "${components[@]}"
