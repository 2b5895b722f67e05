"""Which public repositories the collection is made from, at which revision, and how to start them.

Each variant of a script gives it the arguments and variables that its README or its own first lines
name. `gpus` is what the script's README or name says, for scripts that do not tell their launcher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Variant:
    """One way to start a script."""

    name: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scripts:
    """Shell scripts of one repository whose paths match `paths` as a whole."""

    repository: str
    revision: str
    paths: str
    variants: tuple[Variant, ...] = (Variant(),)
    gpus: int | None = None
    # Where the snapshot lies, if it was made under a former name of the repository.
    snapshot: str | None = None


MEGATRON = "NVIDIA/Megatron-LM"
GPT_175B = r"examples/gpt3/train_gpt3_175b_distributed\.sh"
MEGATRON_RELEASES = (
    "core_v0.13.0",
    "core_v0.14.0",
    "core_v0.15.0",
    "core_v0.16.1",
    "core_v0.17.0",
    "core_v0.18.0",
    "core_v0.19.0",
)
PRIMUS = "AMD-AGI/Primus"
PRIMUS_RELEASES = ("v0.3.0", "v26.2", "v26.5.1")

# Positional arguments of Megatron-LM's examples.
FIVE_PATHS = Variant(
    arguments=("/checkpoints", "/tensorboard", "/vocab.json", "/merges.txt", "/data")
)


def _pai(
    size: str, *, experts: bool = False, expert_tensor: bool = False, tensor: int = 4
) -> Variant:
    """The order in which the run_mcore_* scripts of Pai-Megatron-Patch take their arguments."""
    sizes = [str(tensor), "2", "1"]
    if expert_tensor:
        sizes.append("1")
    if experts:
        sizes.append("1")
    words = ["dsw", size, "1", "8", "1e-5", "1e-6", "128", "128", "bf16", *sizes]
    words += ["true", "true", "true", "false", "false", "false", "100000", "/data", "/data"]
    return Variant(size, arguments=(*words, "/checkpoint", "10000", "100", "/output"))


def _amd(name: str, **environment: str) -> Variant:
    return Variant(name, {"MEGATRON_PATH": "/checkout", **environment})


_AWS = {
    "SLURM_NNODES": "2",
    "TENSOR_PARALLEL": "4",
    "PIPELINE_PARALLEL": "2",
    "GLOBAL_BATCH_SIZE": "288",
}

_LLM_JP = {
    "EXPERIMENT_DIR": "/experiment",
    "ENV_DIR": "/environment",
    "CONF_DIR": "/conf",
    "SCRIPT_ROOT": "/checkout",
    "NUM_NODES": "8",
    "NUM_GPUS_PER_NODE": "8",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "6000",
    "PBS_O_WORKDIR": "/checkout",
}

SCRIPTS = (
    Scripts(MEGATRON, "core_v0.4.0", r"examples/pretrain_gpt.*\.sh"),
    Scripts(MEGATRON, "core_v0.8.0", r"examples/mixtral/.*\.sh", (FIVE_PATHS,)),
    Scripts(MEGATRON, "core_v0.8.0", GPT_175B, (FIVE_PATHS,), gpus=1024),
    Scripts(MEGATRON, "core_v0.12.0", GPT_175B, (FIVE_PATHS,), gpus=1024),
    Scripts(MEGATRON, "core_v0.16.1", r"examples/(llama|mixtral)/.*\.sh", (FIVE_PATHS,)),
    Scripts(MEGATRON, "core_v0.16.1", GPT_175B, (FIVE_PATHS,), gpus=1024),
    Scripts(
        MEGATRON,
        "core_v0.19.0",
        r"examples/(llama|mixtral|megatron_fsdp)/.*\.sh",
        (FIVE_PATHS, Variant("without arguments")),
    ),
    Scripts(MEGATRON, "core_v0.19.0", GPT_175B, (FIVE_PATHS,), gpus=1024),
    Scripts(
        "ROCm/Megatron-LM",
        "rocm_dev",
        r"examples/llama/train_llama3\.sh",
        (
            _amd("as written"),
            _amd("8B", MODEL_SIZE="8", TE_FP8="0", FSDP="0", TP="1", BS="128"),
            _amd("8B, FP8", MODEL_SIZE="8", TE_FP8="1", FSDP="0", TP="1", BS="128"),
            _amd("8B, FSDP", MODEL_SIZE="8", TP="1", BS="128"),
            _amd("8B, context parallelism", MODEL_SIZE="8", FSDP="0", TP="1", CP="2", BS="128"),
            _amd("70B", MODEL_SIZE="70", FSDP="0", TP="8", SEQ_LENGTH="8192", RECOMPUTE="1"),
            _amd("70B, mock data", MODEL_SIZE="70", FSDP="0", TP="8", MOCK_DATA="1"),
        ),
        snapshot="ROCmSoftwarePlatform/Megatron-LM",
    ),
    Scripts(
        "ROCm/Megatron-LM",
        "rocm_dev",
        r"examples/(llama/train_llama2|qwen/train_qwen2)\.sh",
        (
            _amd("as written"),
            _amd("7B", MODEL_SIZE="7", TE_FP8="0", FSDP="0", TP="1", BS="64"),
            _amd("7B, mock data", MODEL_SIZE="7", FSDP="0", TP="1", BS="64", MOCK_DATA="1"),
            _amd("7B, FP8", MODEL_SIZE="7", TE_FP8="1", FSDP="0", TP="1", BS="64"),
            _amd("70B", MODEL_SIZE="70", FSDP="0", TP="8", SEQ_LENGTH="4096", RECOMPUTE="1"),
            _amd("72B", MODEL_SIZE="72", FSDP="0", TP="8", RECOMPUTE="1"),
        ),
        snapshot="ROCmSoftwarePlatform/Megatron-LM",
    ),
    Scripts(
        "ROCm/Megatron-LM",
        "megatron_release_v25.3",
        r"examples/llama/train.*\.sh",
        (
            _amd("as written"),
            _amd("8B", MODEL_SIZE="8", TE_FP8="0", FSDP="0", TP="1", BS="64"),
            _amd("7B", MODEL_SIZE="7", TE_FP8="0", FSDP="0", TP="1", BS="64"),
            _amd("two nodes", MODEL_SIZE="70", NNODES="2", FSDP="0", TP="8", RECOMPUTE="1"),
        ),
        snapshot="ROCmSoftwarePlatform/Megatron-LM",
    ),
    Scripts(
        "saienduri/Megatron-LM",
        "HEAD",
        r"examples/llama/train.*\.sh",
        (_amd("as written"), _amd("8B", MODEL_SIZE="8", TP="1", FSDP="0", BS="64")),
    ),
    Scripts("spyysalo/lumi-fineweb-replication", "HEAD", r"train-gpt\.sh"),
    Scripts(
        "LumiOpen/Megatron-LM-lumi",
        "HEAD",
        r"launch_scripts/(pretrain_70B_768N|pretrain_europa|pretrain_viking_.*|debug_small_128)\.sh",
    ),
    Scripts(
        "HYGON-AI/Megatron-LM-das",
        "HEAD",
        r"examples/(?!.*vl_).*/train_.*\.sh",
        (
            Variant(
                arguments=(
                    "localhost",
                    "6000",
                    "--data_path=/data",
                    "--tokenizer_path=/tokenizer",
                    "--checkpoint_path=/checkpoints",
                    "--launch_backend=torchrun",
                ),
            ),
        ),
        gpus=8,
    ),
    Scripts(
        "aws-samples/awsome-distributed-training",
        "HEAD",
        r"3.test_cases/megatron/megatron-lm/slurm/.*train.*sbatch",
        (Variant("", {"IMAGE": "/stubs/stub", "DATA_PATH": "/data", **_AWS}),),
    ),
    Scripts(
        "Azure/ai-infrastructure-on-azure",
        "HEAD",
        r"examples/megatron-lm/.*(train_megatron|04-gpt175B)\.sh",
        (
            Variant(
                "", {"STAGE_PATH": "/stage", "NUMBER_OF_ITERATIONS": "1500", "SLURM_NNODES": "128"}
            ),
        ),
        gpus=1024,
    ),
    Scripts(
        "llm-jp/scripts",
        "HEAD",
        r"pretrain/scripts/.*/(exp\d+|train(?!_data)[\w.-]*)\.sh",
        (Variant("", _LLM_JP),),
        gpus=64,
    ),
    Scripts(
        "llm-jp/scripts",
        "HEAD",
        r"pretrain/installers/.*example/train\.sh",
        (Variant("", _LLM_JP),),
    ),
    Scripts("swiss-ai/Megatron-LM", "HEAD", r"submit.*\.sh"),
    Scripts("haeggee/Megatron-LM", "HEAD", r"submit.*\.sh"),
    Scripts(
        "OpenGPTX/Megatron-LM",
        "HEAD",
        r"examples/7B.*sbatch",
        (Variant("", {"SETUP_SCRIPTS_DIR": "/setup", "KEEP_GOING": "1"}),),
    ),
    Scripts("flagos-ai/Megatron-LM-FL", "HEAD", r"examples/llama/.*\.sh", (FIVE_PATHS,)),
    Scripts("duihuhu/Megatron-LM", "HEAD", r"pre-tests/gpt2/test_.*train.*\.sh", (FIVE_PATHS,)),
    Scripts(
        "chennyso/Megatron-LM",
        "HEAD",
        r"(?!.*(tests?/|inference|post_training|multimodal|mimo|gptoss)).*(train|llama|qwen|gpt).*\.sh",
        (FIVE_PATHS,),
    ),
    Scripts("sail-sg/zero-bubble-pipeline-parallelism", "HEAD", r"examples/pretrain_.*\.sh"),
    Scripts(
        "HabanaAI/Megatron-LM",
        "HEAD",
        r"examples/(llama|gpt3|mixtral)/.*\.sh",
        tuple(
            Variant(
                size,
                {
                    "HL_LLAMA_MODEL_SIZE": size,
                    "HL_LLAMA_VER": version,
                    "HL_DATA_DIR_ROOT": "/data",
                    "HL_TOKENIZER_MODEL": "/tokenizer",
                },
            )
            for version, size in (("2", "7"), ("3.1", "8"), ("3.1", "70"))
        ),
    ),
    Scripts(
        "microsoft/Megatron-DeepSpeed",
        "HEAD",
        r"examples(_deepspeed)?/(rebase|pretrain|run_deepspeed|MoE/.*dense|universal).*\.sh",
    ),
    Scripts("Ascend/MindSpeed", "HEAD", r"tests_extend/(system_tests|model_tests)/.*\.sh"),
    Scripts(
        "alibaba/Pai-Megatron-Patch",
        "HEAD",
        r"examples/(llama3_1/run_mcore_llama3_1|qwen2_5/run_mcore_qwen)\.sh",
        (_pai("8B"), _pai("70B"), _pai("7B"), _pai("72B"), _pai("0.5B", tensor=1)),
    ),
    Scripts(
        "alibaba/Pai-Megatron-Patch",
        "HEAD",
        r"examples/llama2/run_mcore_llama2_70b\.sh",
        (_pai("70B"),),
    ),
    Scripts(
        "alibaba/Pai-Megatron-Patch",
        "HEAD",
        r"examples/(qwen2/run_mcore_qwen|mistral/run_mcore_mistral)\.sh",
        (_pai("7B", experts=True), _pai("72B", experts=True)),
    ),
    Scripts(
        "alibaba/Pai-Megatron-Patch",
        "HEAD",
        r"examples/qwen3/run_mcore_qwen3\.sh",
        (
            _pai("8B", experts=True, expert_tensor=True),
            _pai("0.6B", experts=True, expert_tensor=True, tensor=1),
        ),
    ),
    Scripts(
        "alibaba/Pai-Megatron-Patch",
        "HEAD",
        r"examples/gpt3/run_pretrain_megatron_gpt3_enwiki\.sh",
        (Variant(arguments=("/patch", "/megatron", "/checkpoint", "/data", "/output")),),
    ),
    Scripts("krafton-ai/Megatron-Dion", "HEAD", r"examples/llama/.*\.sh", (FIVE_PATHS,)),
    Scripts("okoge-kaz/Megatron-LM", "HEAD", GPT_175B, (FIVE_PATHS,), gpus=1024),
)
