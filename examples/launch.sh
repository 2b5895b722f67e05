# Shared by the launch scripts of examples/*/: their settings, what they refuse, and the command.
# Sourced after a model's own model.sh; not run by itself.
#
# Variables that a user may set; DATA_PATH alone has to be:
#   DATA_PATH          prefix of the token files that tools/preprocess_data.py wrote
#   TOKENIZER_MODEL    folder or file of the tokenizer the data were made with; left out: the
#                      model's own by its Hugging Face name, from the local cache
#   TOKENIZER_TYPE     left out: the preset's, HuggingFaceTokenizer
#   VENDORS            the vendor of each mesh in pipeline order, as in "nvidia amd"; one may stand
#                      there again, as in "nvidia amd nvidia"
#   SIZES              pipeline stages of each mesh, in the order of VENDORS; left out: one each,
#                      or as the meshes' numbers of GPUs stand to each other, as in "2 1"
#   TENSOR_SIZES       tensor-parallel size of each mesh, or of all (1). Its data-parallel size is
#                      what its GPUs come to, and may differ from the other meshes'
#   LAYERS             decoder layers of each pipeline stage, in order
#   PLAN               a plan's file, in place of SIZES, TENSOR_SIZES and LAYERS
#   TRANSPORT          how tensors cross between vendors (--hetero-transport)
#   MICRO_BATCH_SIZE   2 is 2 % faster than 1 where a replica has 64 or more sequences a step; with
#                      32 or fewer take 1, as the pipeline's bubble grows
#   SEQ_LENGTH, GLOBAL_BATCH_SIZE, TRAIN_ITERS, WARMUP_ITERS, LR, MIN_LR
#                      as the flags of these names; the batches count sequences
#   SAVE, SAVE_INTERVAL  folder for checkpoints, from which a run also goes on, and iterations
#                      between two; left out: none are written
#   PYTHON             interpreter with PyTorch for the GPUs of this machine
#   OMP_NUM_THREADS    threads of each process on the CPU; left out: its share of the cores

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

: "${VENDORS:=nvidia amd}"
: "${TRANSPORT:=auto}"
: "${SEQ_LENGTH:=4096}"
: "${MICRO_BATCH_SIZE:=2}"
: "${GLOBAL_BATCH_SIZE:=128}"
: "${TRAIN_ITERS:=1000}"
: "${WARMUP_ITERS:=100}"
: "${LR:=3e-4}"
: "${MIN_LR:=3e-5}"
: "${SAVE:=}"
: "${SAVE_INTERVAL:=500}"
: "${TOKENIZER_TYPE:=}"
: "${TOKENIZER_MODEL:=}"
: "${PYTHON:=python3}"
DRY_RUN=no

refuse() {
    echo "error: $*" >&2
    exit 2
}

# Take --dry-run out of the arguments; what is left are more flags for pretrain_gpt.py, in EXTRA.
read_arguments() {
    EXTRA=()
    local word
    for word in "$@"; do
        if [[ $word == --dry-run ]]; then DRY_RUN=yes; else EXTRA+=("$word"); fi
    done
}

require_number() { # NAME VALUE
    [[ $2 =~ ^[1-9][0-9]*$ ]] || refuse "$1 must be a whole number above zero, not '$2'"
}

require_vendors() {
    read -ra MESHES <<<"$VENDORS"
    ((${#MESHES[@]} >= 2)) ||
        refuse "VENDORS ($VENDORS) must name two vendors or more, as in 'nvidia amd'"
    [[ -z ${PLAN:-} || -f $PLAN ]] || refuse "PLAN is '$PLAN' and there is no such file"
}

require_data() {
    [[ -n ${DATA_PATH:-} ]] ||
        refuse "DATA_PATH is not set; give the prefix that tools/preprocess_data.py wrote"
    [[ $DRY_RUN == yes || -f $DATA_PATH.idx ]] ||
        refuse "DATA_PATH $DATA_PATH: there is no $DATA_PATH.idx; give the prefix of the token files"
}

# Ends with a sentence unless this machine has GPUS GPUs, and those of VENDOR where one is named.
require_gpus() { # GPUS [VENDOR]
    [[ $DRY_RUN == no ]] || return 0
    local found vendor count
    found=$("$PYTHON" -c 'import torch
print("amd" if torch.version.hip else "nvidia", torch.cuda.device_count())') ||
        refuse "$PYTHON cannot import torch; set PYTHON, or activate the environment of this machine"
    read -r vendor count <<<"$found"
    ((count >= $1)) ||
        refuse "$(hostname) has $count GPUs that PyTorch can use and $1 are needed; set GPUS"
    [[ -z ${2:-} || $vendor == "$2" ]] ||
        refuse "PyTorch on $(hostname) is built for $vendor but the plan puts $2 here; start the" \
            "nodes in the order of VENDORS ($VENDORS)"
}

# What each mesh does with its GPUs, as flags in SHAPES. A stage has the same number of GPUs with
# every vendor where SIZES says nothing; its layers may differ.
share_stages() { # GPUS_OF_EACH_MESH...
    if [[ -n ${PLAN:-} ]]; then
        SHAPES=(--hetero-plan "$PLAN")
        return
    fi
    local given tensor stages=() layers mesh all=0 divisor=0 data=() gpus=("$@")
    given=$(each_mesh TENSOR_SIZES "${TENSOR_SIZES:-1}") || exit
    read -ra tensor <<<"$given"
    for mesh in "${!MESHES[@]}"; do
        divisor=$(common_divisor "$divisor" $((gpus[mesh] / tensor[mesh])))
    done
    for mesh in "${!MESHES[@]}"; do
        stages+=("$((gpus[mesh] / tensor[mesh] / (divisor ? divisor : 1)))")
    done
    if [[ -n ${SIZES:-} ]]; then
        given=$(each_mesh SIZES "$SIZES") || exit
        read -ra stages <<<"$given"
    fi
    for mesh in "${!MESHES[@]}"; do
        ((stages[mesh] > 0 && gpus[mesh] % (stages[mesh] * tensor[mesh]) == 0)) ||
            refuse "the ${gpus[mesh]} GPUs of ${MESHES[mesh]} are no multiple of its ${stages[mesh]}" \
                "stages times its tensor-parallel size ${tensor[mesh]}; set SIZES or TENSOR_SIZES," \
                "or change the numbers of nodes or GPUs"
        data+=("$((gpus[mesh] / stages[mesh] / tensor[mesh]))")
        all=$((all + stages[mesh]))
    done
    read -ra layers <<<"$LAYERS"
    ((${#layers[@]} == all)) ||
        refuse "LAYERS ($LAYERS) names ${#layers[@]} pipeline stages and there are $all," \
            "SIZES ${stages[*]} of ${MESHES[*]}; give the layers of each"
    SHAPES=(--hetero-vendors "${MESHES[@]}" --hetero-pipeline-sizes "${stages[@]}"
        --hetero-pipeline-layers "${layers[@]}")
    [[ -z ${TENSOR_SIZES:-} ]] || SHAPES+=(--hetero-tensor-sizes "${tensor[@]}")
    [[ -z $(printf '%s\n' "${data[@]}" | sort -u | sed 1d) ]] ||
        SHAPES+=(--hetero-data-sizes "${data[@]}")
}

common_divisor() { # NUMBER NUMBER
    local larger=$1 smaller=$2 rest
    while ((smaller)); do
        rest=$((larger % smaller)) larger=$smaller smaller=$rest
    done
    echo "$larger"
}

# One number for each mesh out of "8" or "8 4".
each_mesh() { # NAME VALUE
    local numbers number
    read -ra numbers <<<"$2"
    if ((${#numbers[@]} == 1)); then
        for number in "${MESHES[@]:1}"; do numbers+=("${numbers[0]}"); done
    fi
    ((${#numbers[@]} == ${#MESHES[@]})) ||
        refuse "$1 is '$2'; give one number, or one for each of $VENDORS"
    for number in "${numbers[@]}"; do require_number "$1" "$number"; done
    echo "${numbers[@]}"
}

# All flags of pretrain_gpt.py, in FLAGS.
build_flags() {
    FLAGS=(
        --yaml-cfg "$ROOT/examples/presets/$PRESET"
        --hetero-pipeline "${SHAPES[@]}" --hetero-transport "$TRANSPORT"
        --seq-length "$SEQ_LENGTH"
        --micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size "$GLOBAL_BATCH_SIZE"
        --train-iters "$TRAIN_ITERS" --lr "$LR" --min-lr "$MIN_LR" --lr-decay-style cosine
        --lr-warmup-iters "$WARMUP_ITERS" --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
        --cross-entropy-loss-fusion
        --data-path "$DATA_PATH" --split "99,1,0" --eval-interval 500 --eval-iters 10
        --log-interval 1
    )
    [[ -z $TOKENIZER_TYPE ]] || FLAGS+=(--tokenizer-type "$TOKENIZER_TYPE")
    [[ -z $TOKENIZER_MODEL ]] || FLAGS+=(--tokenizer-model "$TOKENIZER_MODEL")
    [[ -z $SAVE ]] || FLAGS+=(--save "$SAVE" --load "$SAVE" --save-interval "$SAVE_INTERVAL")
    FLAGS+=("${EXTRA[@]}")
}

# Run a command, or print it as the shell takes it.
run_or_print() {
    if [[ $DRY_RUN == yes ]]; then
        printf '%q ' "$@"
        echo
    else
        exec "$@"
    fi
}

# All vendors played by the GPUs of this machine, one stage of each where SIZES says nothing else.
launch_on_one_host() {
    : "${GPUS:=2}" "${SIZES:=1}"
    require_number GPUS "$GPUS"
    require_vendors
    require_data
    local stages tensor mesh least=0 each=()
    stages=$(each_mesh SIZES "$SIZES") && tensor=$(each_mesh TENSOR_SIZES "${TENSOR_SIZES:-1}") ||
        exit
    read -ra stages <<<"$stages"
    read -ra tensor <<<"$tensor"
    for mesh in "${!MESHES[@]}"; do least=$((least + stages[mesh] * tensor[mesh])); done
    for mesh in "${!MESHES[@]}"; do
        each+=("$((GPUS * stages[mesh] * tensor[mesh] / least))")
    done
    [[ -n ${PLAN:-} ]] || ((GPUS % least == 0)) ||
        refuse "GPUS is $GPUS; give a multiple of $least, the stages times tensor-parallel sizes"
    share_stages "${each[@]}"
    require_gpus "$GPUS"
    build_flags
    run_or_print env HETERO_VENDOR=plan OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(cores_per "$GPUS")}" \
        PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" \
        "$PYTHON" -m hetero.run --standalone --nproc-per-node "$GPUS" \
        "$ROOT/pretrain_gpt.py" "${FLAGS[@]}"
}

# This machine's part of a run over the nodes of all meshes, the first mesh's first.
launch_on_a_node() { # NODE_RANK
    : "${NODES:=1}" "${GPUS:=8}" "${MASTER_PORT:=29500}"
    local nodes gpus mesh own=0 all=0 each=() nics=()
    require_vendors
    nodes=$(each_mesh NODES "$NODES") && gpus=$(each_mesh GPUS "$GPUS") || exit
    read -ra nodes <<<"$nodes"
    read -ra gpus <<<"$gpus"
    for mesh in "${!MESHES[@]}"; do
        [[ ! $1 =~ ^[0-9]+$ ]] || (($1 < all)) || own=$mesh
        all=$((all + nodes[mesh]))
        each+=("$((nodes[mesh] * gpus[mesh]))")
    done
    [[ $1 =~ ^[0-9]+$ && $1 -lt $all ]] ||
        refuse "the rank of this node is '$1'; give 0 to $((all - 1)) as the first argument"
    [[ -n ${MASTER_ADDR:-} ]] || refuse "MASTER_ADDR is not set; give the address of node 0"
    require_data
    share_stages "${each[@]}"
    require_gpus "${gpus[own]}" "${MESHES[own]}"
    build_flags
    [[ -z ${NICS:-} ]] || read -ra nics <<<"--hetero-nics $NICS"
    run_or_print env OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(cores_per "${gpus[own]}")}" \
        PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" \
        "$PYTHON" -m hetero.run --nnodes "$all" --node-rank "$1" \
        --nproc-per-node "${gpus[own]}" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
        "$ROOT/pretrain_gpt.py" "${FLAGS[@]}" "${nics[@]}"
}

# Initial weights are drawn on the CPU; a launcher would leave each process one thread, or its share.
cores_per() { # PROCESSES
    local cores
    cores=$(nproc)
    echo $((cores > $1 ? cores / $1 : 1))
}
