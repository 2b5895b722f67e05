# Shared by the launch scripts of examples/*/: their settings, what they refuse, and the command.
# Sourced, by a model's scripts after its own model.sh; not run by itself.
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
#   LAUNCHER_FLAGS     more flags of hetero.run on a node, as "--hetero-restarts 10"
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

# What is wrong with the settings, a sentence each, for `refuse_faults`.
FAULTS=()
fault() { FAULTS+=("$*"); }

# End with all that is wrong, if anything is.
refuse_faults() {
    case ${#FAULTS[@]} in
    0) ;;
    1) refuse "${FAULTS[0]}" ;;
    *) refuse "${#FAULTS[@]} errors:$(printf '\n  %s' "${FAULTS[@]}")" ;;
    esac
}

# Take --dry-run out of the arguments; what is left are more flags for pretrain_gpt.py, in EXTRA.
read_arguments() {
    EXTRA=()
    local word
    for word in "$@"; do
        if [[ $word == --dry-run ]]; then DRY_RUN=yes; else EXTRA+=("$word"); fi
    done
}

# Whether the numbers of GPUs, nodes and sizes can be counted with: `fault_of_number` says no.
COUNTABLE=yes
fault_of_number() {
    COUNTABLE=no
    fault "$@"
}

require_number() { # NAME VALUE
    [[ $2 =~ ^[1-9][0-9]*$ ]] ||
        fault_of_number "$1 must be a whole number above zero, not '$2'"
}

require_vendors() {
    read -ra MESHES <<<"$VENDORS"
    ((${#MESHES[@]} >= 2)) ||
        fault_of_number "VENDORS ($VENDORS) must name two vendors or more, as in 'nvidia amd'"
    [[ -z ${PLAN:-} || -f $PLAN ]] || fault "PLAN is '$PLAN' and there is no such file"
}

require_data() {
    if [[ -z ${DATA_PATH:-} ]]; then
        fault "DATA_PATH is not set; give the prefix that tools/preprocess_data.py wrote"
    elif [[ $DRY_RUN == no && ! -f $DATA_PATH.idx ]]; then
        fault "DATA_PATH $DATA_PATH: there is no $DATA_PATH.idx; give the prefix of the token files"
    fi
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

# The tensor-parallel size and the stages of each mesh, in TENSOR and STAGES: no stages where SIZES
# says nothing. A plan's file has its own.
read_sizes() {
    TENSOR=() STAGES=()
    [[ -z ${PLAN:-} ]] || return 0
    each_mesh TENSOR_SIZES "${TENSOR_SIZES:-1}" TENSOR
    [[ -z ${SIZES:-} ]] || each_mesh SIZES "$SIZES" STAGES
}

# What each mesh does with its GPUs, as flags in SHAPES. A stage has the same number of GPUs with
# every vendor where SIZES says nothing; its layers may differ.
share_stages() { # GPUS_OF_EACH_MESH...
    if [[ -n ${PLAN:-} ]]; then
        SHAPES=(--hetero-plan "$PLAN")
        return
    fi
    local layers mesh all=0 divisor=0 data=() gpus=("$@")
    if ((${#STAGES[@]} == 0)); then
        for mesh in "${!MESHES[@]}"; do
            divisor=$(common_divisor "$divisor" $((gpus[mesh] / TENSOR[mesh])))
        done
        for mesh in "${!MESHES[@]}"; do
            STAGES+=("$((gpus[mesh] / TENSOR[mesh] / (divisor ? divisor : 1)))")
        done
    fi
    for mesh in "${!MESHES[@]}"; do
        if ((STAGES[mesh] == 0 || gpus[mesh] % (STAGES[mesh] * TENSOR[mesh]))); then
            fault "the ${gpus[mesh]} GPUs of ${MESHES[mesh]} are no multiple of its ${STAGES[mesh]}" \
                "stages times its tensor-parallel size ${TENSOR[mesh]}; set SIZES or TENSOR_SIZES," \
                "or change the numbers of nodes or GPUs"
            return
        fi
        data+=("$((gpus[mesh] / STAGES[mesh] / TENSOR[mesh]))")
        all=$((all + STAGES[mesh]))
    done
    read -ra layers <<<"$LAYERS"
    ((${#layers[@]} == all)) ||
        fault "LAYERS ($LAYERS) names ${#layers[@]} pipeline stages and there are $all," \
            "SIZES ${STAGES[*]} of ${MESHES[*]}; give the layers of each"
    SHAPES=(--hetero-vendors "${MESHES[@]}" --hetero-pipeline-sizes "${STAGES[@]}"
        --hetero-pipeline-layers "${layers[@]}")
    [[ -z ${TENSOR_SIZES:-} ]] || SHAPES+=(--hetero-tensor-sizes "${TENSOR[@]}")
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

# Read one number for each mesh, out of "8" or "8 4", into an array.
each_mesh() { # NAME VALUE ARRAY
    local number
    local -n each_number=$3
    read -ra each_number <<<"$2"
    for number in "${each_number[@]}"; do require_number "$1" "$number"; done
    if ((${#each_number[@]} == 1)); then
        for number in "${MESHES[@]:1}"; do each_number+=("${each_number[0]}"); done
    fi
    if ((${#MESHES[@]} >= 2 && ${#each_number[@]} != ${#MESHES[@]})); then
        fault_of_number "$1 is '$2'; give one number, or one for each of $VENDORS"
    fi
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
    require_vendors
    require_number GPUS "$GPUS"
    read_sizes
    require_data
    [[ $COUNTABLE == no ]] || share_host
    refuse_faults
    require_gpus "$GPUS"
    build_flags
    run_or_print env HETERO_VENDOR=plan OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(cores_per "$GPUS")}" \
        PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" \
        "$PYTHON" -m hetero.run --standalone --nproc-per-node "$GPUS" \
        "$ROOT/pretrain_gpt.py" "${FLAGS[@]}"
}

# Each mesh's part of the GPUs of this machine, in proportion to what one replica has there.
share_host() {
    local mesh least=0 each=()
    for mesh in "${!STAGES[@]}"; do least=$((least + STAGES[mesh] * TENSOR[mesh])); done
    if ((least && GPUS % least)); then
        fault "GPUS is $GPUS; give a multiple of $least, the stages times tensor-parallel sizes"
        return
    fi
    for mesh in "${!STAGES[@]}"; do
        each+=("$((GPUS * STAGES[mesh] * TENSOR[mesh] / least))")
    done
    share_stages "${each[@]}"
}

# This machine's part of a run over the nodes of all meshes, the first mesh's first.
launch_on_a_node() { # NODE_RANK
    : "${NODES:=1}" "${GPUS:=8}" "${MASTER_PORT:=29500}"
    local nodes gpus own=0 all=0 nics=() launcher
    read -ra launcher <<<"${LAUNCHER_FLAGS:-}"
    require_vendors
    each_mesh NODES "$NODES" nodes
    each_mesh GPUS "$GPUS" gpus
    read_sizes
    [[ -n ${MASTER_ADDR:-} ]] || fault "MASTER_ADDR is not set; give the address of node 0"
    require_data
    [[ $COUNTABLE == no ]] || share_nodes "$1"
    refuse_faults
    require_gpus "${gpus[own]}" "${MESHES[own]}"
    build_flags
    [[ -z ${NICS:-} ]] || read -ra nics <<<"--hetero-nics $NICS"
    run_or_print env OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(cores_per "${gpus[own]}")}" \
        PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" \
        "$PYTHON" -m hetero.run --nnodes "$all" --node-rank "$1" \
        --nproc-per-node "${gpus[own]}" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
        "${launcher[@]}" "$ROOT/pretrain_gpt.py" "${FLAGS[@]}" "${nics[@]}"
}

# The nodes of all meshes in `all`, and this node's mesh in `own`, of its caller's nodes and gpus.
share_nodes() { # NODE_RANK
    local mesh each=()
    for mesh in "${!MESHES[@]}"; do
        [[ ! $1 =~ ^[0-9]+$ ]] || (($1 < all)) || own=$mesh
        all=$((all + nodes[mesh]))
        each+=("$((nodes[mesh] * gpus[mesh]))")
    done
    [[ $1 =~ ^[0-9]+$ && $1 -lt $all ]] ||
        fault "the rank of this node is '$1'; give 0 to $((all - 1)) as the first argument"
    share_stages "${each[@]}"
}

# Initial weights are drawn on the CPU; a launcher would leave each process one thread, or its share.
cores_per() { # PROCESSES
    local cores
    cores=$(nproc)
    echo $((cores > $1 ? cores / $1 : 1))
}
