# Shared by the launch scripts of examples/*/: their settings, what they refuse, and the command.
# Sourced after a model's own model.sh; not run by itself.
#
# Variables that a user may set; DATA_PATH alone has to be:
#   DATA_PATH          prefix of the token files that tools/preprocess_data.py wrote
#   TOKENIZER_MODEL    folder or file of the tokenizer the data were made with; left out: the
#                      model's own by its Hugging Face name, from the local cache
#   TOKENIZER_TYPE     left out: the preset's, HuggingFaceTokenizer
#   VENDORS            the vendors in pipeline order, as in "nvidia amd"
#   SIZES              pipeline stages of each vendor, in the order of VENDORS; left out: one each,
#                      or as the vendors' numbers of GPUs stand to each other, as in "2 1"
#   LAYERS             decoder layers of each pipeline stage, in order
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
    local vendors
    read -ra vendors <<<"$VENDORS"
    ((${#vendors[@]} == 2)) || refuse "VENDORS ($VENDORS) must name two vendors, as in 'nvidia amd'"
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

# The stages of each vendor, in STAGES: as SIZES says, or as its GPUs stand to the other's.
# A stage has the same number of GPUs with every vendor, as data and tensor parallelism have one
# size; its layers may differ.
share_stages() { # GPUS_OF_FIRST GPUS_OF_SECOND
    local layers divisor
    if [[ -n ${SIZES:-} ]]; then
        read -ra STAGES <<<"$SIZES"
    else
        divisor=$(common_divisor "$1" "$2")
        STAGES=($(($1 / divisor)) $(($2 / divisor)))
    fi
    ((${#STAGES[@]} == 2)) ||
        refuse "SIZES ($SIZES) must give the pipeline stages of each of two vendors, as in '2 1'"
    require_number SIZES "${STAGES[0]}" && require_number SIZES "${STAGES[1]}"
    (($1 % STAGES[0] == 0 && $2 % STAGES[1] == 0 && $1 / STAGES[0] == $2 / STAGES[1])) ||
        refuse "$1 and $2 GPUs cannot hold ${STAGES[0]} and ${STAGES[1]} stages of as many GPUs each;" \
            "set SIZES, or change the numbers of nodes or GPUs"
    read -ra layers <<<"$LAYERS"
    ((${#layers[@]} == STAGES[0] + STAGES[1])) ||
        refuse "LAYERS ($LAYERS) names ${#layers[@]} pipeline stages and there are" \
            "$((STAGES[0] + STAGES[1])), ${STAGES[0]} of ${VENDORS%% *} and ${STAGES[1]} of" \
            "${VENDORS##* }; give the layers of each"
}

common_divisor() { # NUMBER NUMBER
    local larger=$1 smaller=$2 rest
    while ((smaller)); do
        rest=$((larger % smaller)) larger=$smaller smaller=$rest
    done
    echo "$larger"
}

# One number for each vendor out of "8" or "8 4".
each_vendor() { # NAME VALUE
    local numbers number
    read -ra numbers <<<"$2"
    ((${#numbers[@]} != 1)) || numbers+=("${numbers[0]}")
    ((${#numbers[@]} == 2)) || refuse "$1 is '$2'; give one number, or one for each vendor"
    for number in "${numbers[@]}"; do require_number "$1" "$number"; done
    echo "${numbers[@]}"
}

# All flags of pretrain_gpt.py, in FLAGS.
build_flags() {
    local vendors layers
    read -ra vendors <<<"$VENDORS"
    read -ra layers <<<"$LAYERS"
    FLAGS=(
        --yaml-cfg "$ROOT/examples/presets/$PRESET"
        --hetero-pipeline --hetero-vendors "${vendors[@]}" --hetero-pipeline-sizes "${STAGES[@]}"
        --hetero-pipeline-layers "${layers[@]}" --hetero-transport "$TRANSPORT"
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

# Both vendors played by the GPUs of this machine, one stage of each where SIZES says nothing else.
launch_on_one_host() {
    : "${GPUS:=2}" "${SIZES:=1 1}"
    require_number GPUS "$GPUS"
    require_vendors
    require_data
    local stages first second
    stages=$(each_vendor SIZES "$SIZES") || exit
    read -r first second <<<"$stages"
    ((GPUS % (first + second) == 0)) ||
        refuse "GPUS is $GPUS; give a multiple of the $((first + second)) pipeline stages"
    share_stages $((GPUS * first / (first + second))) $((GPUS * second / (first + second)))
    require_gpus "$GPUS"
    build_flags
    run_or_print env HETERO_VENDOR=plan OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(cores_per "$GPUS")}" \
        PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" \
        "$PYTHON" -m hetero.run --standalone --nproc-per-node "$GPUS" \
        "$ROOT/pretrain_gpt.py" "${FLAGS[@]}"
}

# This machine's part of a run over the nodes of both vendors, the first vendor's first.
launch_on_a_node() { # NODE_RANK
    : "${NODES:=1 1}" "${GPUS:=8}" "${MASTER_PORT:=29500}"
    local nodes gpus vendors vendor
    require_vendors
    nodes=$(each_vendor NODES "$NODES") && gpus=$(each_vendor GPUS "$GPUS") || exit
    read -ra nodes <<<"$nodes"
    read -ra gpus <<<"$gpus"
    read -ra vendors <<<"$VENDORS"
    local all=$((nodes[0] + nodes[1]))
    [[ $1 =~ ^[0-9]+$ && $1 -lt $all ]] ||
        refuse "the rank of this node is '$1'; give 0 to $((all - 1)) as the first argument"
    [[ -n ${MASTER_ADDR:-} ]] || refuse "MASTER_ADDR is not set; give the address of node 0"
    vendor=$(($1 < nodes[0] ? 0 : 1))
    require_data
    share_stages $((nodes[0] * gpus[0])) $((nodes[1] * gpus[1]))
    require_gpus "${gpus[vendor]}" "${vendors[vendor]}"
    build_flags
    local nics=()
    [[ -z ${NICS:-} ]] || read -ra nics <<<"--hetero-nics $NICS"
    run_or_print env OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(cores_per "${gpus[vendor]}")}" \
        PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" \
        "$PYTHON" -m hetero.run --nnodes "$all" --node-rank "$1" \
        --nproc-per-node "${gpus[vendor]}" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
        "$ROOT/pretrain_gpt.py" "${FLAGS[@]}" "${nics[@]}"
}

# Initial weights are drawn on the CPU; a launcher would leave each process one thread, or its share.
cores_per() { # PROCESSES
    local cores
    cores=$(nproc)
    echo $((cores > $1 ? cores / $1 : 1))
}
