"""Public commands, of as many sources as have one that trains a dense model here.

Two of them share sequences among ranks, one of each source that has such a command; the last ones
train mixtures of experts and latent attention, of each source that has such a command, and those
in fp8 a command of each source that asks for fp8 and has text.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.public_commands import Command, load_commands


@dataclass(frozen=True)
class Chosen:
    """A command of the collection, and in a few words what it uses of Megatron-LM."""

    short: str
    name: str
    uses: str

    @property
    def command(self) -> Command:
        (found,) = [command for command in load_commands() if command.name == self.name]
        return found


_FUNCTIONAL = "tests/functional_tests/test_cases/gpt"
_OVERLAPPED = (
    "gpt3_mcore_te_tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce_param_gather_overlap_optimizer"
)

_EXPERTS = "tests/functional_tests/test_cases/moe"
_MANY = "gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed"
_SINKHORN = "gpt3_mcore_tp2_pp2_ep2_te_4experts2parallel"
_SHARED = "gpt3_mcore_te_tp2_pp2_cp2_calculate_per_token_loss_nondeterministic"
_FP8_SCRIPT = "examples/llama/train_llama3_8b_h100_fp8.sh"
_FP8_LLAMA3 = "fp8: LLaMA-3 8B, delayed, the largest of 1,024 steps; distributed optimizer"
_CURRENT = "gpt3_weekly_mcore_tp2_pp2_current_scaling_native_fp8_tp_pp_sp_tp_overlap"
_GRAPHS = "gpt3_mcore_te_tp2_pp2_ep4_etp1_resume_torch_dist_attn_cudagraph"

CHOSEN = (
    Chosen(
        "nvidia-example",
        "NVIDIA/Megatron-LM@core_v0.4.0:examples/pretrain_gpt_distributed_with_mp.sh",
        "GPT-3's layers, learned positions, dropout, fp16, TP with sequence parallelism, PP",
    ),
    Chosen(
        "nvidia-interleaved",
        f"NVIDIA/Megatron-LM@core_v0.19.0:{_FUNCTIONAL}/{_OVERLAPPED}/model_config.yaml",
        "bf16, interleaved PP, distributed optimizer with all overlaps, deterministic, dropout",
    ),
    Chosen(
        "rocm-llama3",
        "ROCm/Megatron-LM@rocm_dev:examples/llama/train_llama3.sh (8B)",
        "LLaMA-3 8B: GQA, RoPE, SwiGLU, RMSNorm; bf16, distributed optimizer, overlap",
    ),
    Chosen(
        "nvidia-context",
        f"NVIDIA/Megatron-LM@core_v0.19.0:{_FUNCTIONAL}/{_SHARED}/model_config.yaml",
        "GPT-3 with CP2, TP2 with sequence parallelism, PP2; per-token loss",
    ),
    Chosen(
        "rocm-context",
        "ROCm/Megatron-LM@rocm_dev:examples/llama/train_llama3.sh (8B, context parallelism)",
        "LLaMA-3 8B with CP2: GQA, RoPE; bf16, distributed optimizer, overlap",
    ),
    Chosen(
        "primus-llama3.1",
        "AMD-AGI/Primus@v26.5.1:examples/megatron/configs/MI300X/llama3.1_8B-BF16-pretrain.yaml",
        "LLaMA-3.1 8B from a YAML file: GQA, end-of-document masks, fused cross entropy",
    ),
    Chosen(
        "hygon-qwen3",
        "HYGON-AI/Megatron-LM-das@0685d1f55031:examples/qwen3/train_qwen3_8B.sh",
        "Qwen3 8B: normalized queries and keys, GQA; TP with sequence parallelism, PP",
    ),
    Chosen(
        "aws-gpt3",
        "aws-samples/awsome-distributed-training@7217859f67bc:"
        "3.test_cases/megatron/megatron-lm/slurm/gpt3/2.distributed-training.sbatch",
        "GPT-3: schedule in samples, fp16, recomputed activations, dropout, TP, PP",
    ),
    Chosen(
        "azure-gpt3",
        "Azure/ai-infrastructure-on-azure@a01b07318f46:"
        "examples/megatron-lm/GPT3-175B/aks/helm/megatron-training/scripts/train_megatron.sh",
        "GPT-3 175B: fp16, distributed optimizer, a data set per split, TP8 PP16 as written",
    ),
    Chosen(
        "duihuhu-gpt3",
        "duihuhu/Megatron-LM@7b1a57bcf17f:pre-tests/gpt2/test_train_gpt3_345m_distributed.sh",
        "GPT-3 345M: fp16, dropout, PP, a checkpoint after every iteration",
    ),
    Chosen(
        "saienduri-llama2",
        "saienduri/Megatron-LM@3b50a40aeb05:examples/llama/train_llama2.sh (as written)",
        "LLaMA-2 70B: Llama2Tokenizer, GQA, distributed optimizer, TP8 as written",
    ),
    Chosen(
        "lumi-fineweb",
        "spyysalo/lumi-fineweb-replication@a7cd020f4630:train-gpt.sh",
        "1.7B on LUMI: schedule in samples, RoPE, SwiGLU, tied embeddings, distributed optimizer",
    ),
    Chosen(
        "nvidia-latent",
        f"NVIDIA/Megatron-LM@core_v0.16.1:{_EXPERTS}/{_MANY}/model_config.yaml",
        "DeepSeek-V3's layers: latent attention, an MTP layer, expert bias, groups, a shared "
        "expert; TP2 with sequence parallelism, EP with whole experts, interleaved PP",
    ),
    Chosen(
        "nvidia-sinkhorn",
        f"NVIDIA/Megatron-LM@core_v0.16.1:{_EXPERTS}/{_SINKHORN}/model_config.yaml",
        "4 experts, sinkhorn; TP2 with sequence parallelism, EP, PP, deterministic",
    ),
    Chosen(
        "primus-deepseek",
        "AMD-AGI/Primus@v26.2:examples/megatron/configs/MI355X/deepseek_v2_lite-BF16-pretrain.yaml",
        "DeepSeek-V2-Lite: latent attention, 2 shared experts, routed at random; EP, overlap",
    ),
    Chosen(
        "primus-qwen3",
        "AMD-AGI/Primus@v26.2:examples/megatron/configs/MI300X/qwen3_30B_A3B-BF16-pretrain.yaml",
        "Qwen3-30B-A3B: 128 experts, normalized queries and keys; EP, overlap",
    ),
    Chosen(
        "mindspeed-experts",
        "Ascend/MindSpeed@028de58ca629:tests_extend/system_tests/pretrain_base.sh",
        "8 experts, aux loss; TP2 with sequence parallelism, EP, PP",
    ),
    Chosen(
        "hygon-567b",
        "HYGON-AI/Megatron-LM-das@0685d1f55031:examples/gpt3/train_gpt_567B_4nodes.sh",
        "16 experts with capacity 1 and padding, aux loss; TP2, EP, ETP2, distributed optimizer",
    ),
    Chosen(
        "nvidia-fp8",
        f"NVIDIA/Megatron-LM@core_v0.19.0:{_FP8_SCRIPT}",
        _FP8_LLAMA3,
    ),
    Chosen(
        "nvidia-fp8-tensorwise",
        f"NVIDIA/Megatron-LM@core_v0.19.0:{_FUNCTIONAL}/{_CURRENT}/model_config.yaml",
        "fp8: GPT-3, tensorwise; TP2 with sequence parallelism, PP2",
    ),
    Chosen(
        "rocm-fp8",
        "ROCm/Megatron-LM@rocm_dev:examples/llama/train_llama3.sh (8B, FP8)",
        "fp8: LLaMA-3 8B, delayed, the largest of 1,024 steps; distributed optimizer, overlap",
    ),
    Chosen(
        "primus-fp8",
        "AMD-AGI/Primus@v26.5.1:examples/megatron/configs/MI300X/llama3.1_8B-FP8-pretrain.yaml",
        "fp8: LLaMA-3.1 8B from a YAML file, delayed, the largest of 1,024 steps",
    ),
    Chosen("chennyso-fp8", f"chennyso/Megatron-LM@3470c98dc03a:{_FP8_SCRIPT}", _FP8_LLAMA3),
    Chosen("flagos-fp8", f"flagos-ai/Megatron-LM-FL@175ae90ec92a:{_FP8_SCRIPT}", _FP8_LLAMA3),
    Chosen("krafton-fp8", f"krafton-ai/Megatron-Dion@2d0d2518d61d:{_FP8_SCRIPT}", _FP8_LLAMA3),
    Chosen(
        "nvidia-fp8-experts",
        f"NVIDIA/Megatron-LM@core_v0.16.1:{_EXPERTS}/{_GRAPHS}/model_config.yaml",
        "fp8: latent attention, 32 experts and a shared one, tensorwise; TP2 with sequence "
        "parallelism, EP with whole experts, PP",
    ),
    Chosen(
        "primus-fp8-experts",
        "AMD-AGI/Primus@v26.5.1:examples/megatron/configs/MI300X/qwen3_30B_A3B-FP8-pretrain.yaml",
        "fp8: Qwen3-30B-A3B, delayed; 128 experts, EP, overlap",
    ),
)
