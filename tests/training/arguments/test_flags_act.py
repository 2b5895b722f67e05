"""No flag is taken and then forgotten: each is shown to act, or said to do nothing.

A row is a flag, an observer of `observers`, a name that it reports, and the value that the flag
brings, which the same launch without the flag must not have.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.arguments.ignored import IGNORED, WITHOUT_EFFECT
from megatron.training.arguments.parser import build_parser
from megatron.training.cpu_shim import cpu_shim
from tests.training.arguments import observers as see

TESTS = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Row:
    flag: str
    value: str
    observer: see.Observer
    name: str
    expected: Any
    base: str = ""
    """Flags of both launches."""
    without: str = ""
    world_size: int = 1

    def __str__(self) -> str:
        return f"{self.flag} {self.value}".strip()


SAMPLES = {"base": "--train-samples 100 --global-batch-size 10", "without": "--train-iters"}
ROPE = "--position-embedding-type rope"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SPM = {
    "base": "--tokenizer-type HuggingFaceTokenizer --tokenizer-model .",
    "without": "--tokenizer-type --vocab-size",
}
WSD = "--lr-decay-style WSD --lr-wsd-decay-iters 5"
GROWING = "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.2"
PAIR = "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1 --hetero-nics lo"
FILES = {"without": "--mock-data"}
CHUNKS = (
    "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
    "--global-batch-size 24"
)

ROWS = [
    # The model.
    Row("--num-layers", "6", see.transformer, "num_layers", 6),
    Row("--hidden-size", "32", see.transformer, "hidden_size", 32),
    Row("--ffn-hidden-size", "100", see.transformer, "ffn_hidden_size", 100),
    Row("--num-attention-heads", "8", see.transformer, "num_attention_heads", 8),
    Row("--kv-channels", "24", see.transformer, "kv_channels", 24),
    Row("--make-vocab-size-divisible-by", "50", see.gpt, "vocab_size", 100),
    Row("--padded-vocab-size", "110", see.gpt, "vocab_size", 110),
    Row(
        "--untie-embeddings-and-output-weights",
        "",
        see.gpt,
        "share_embeddings_and_output_weights",
        False,
    ),
    Row(
        "--group-query-attention",
        "",
        see.transformer,
        "num_query_groups",
        2,
        base="--num-query-groups 2",
    ),
    Row(
        "--num-query-groups",
        "2",
        see.transformer,
        "num_query_groups",
        2,
        base="--group-query-attention",
    ),
    Row("--attention-dropout", "0.3", see.transformer, "attention_dropout", 0.3),
    Row("--qk-layernorm", "", see.transformer, "qk_layernorm", True),
    Row("--attention-softmax-in-fp32", "", see.transformer, "attention_softmax_in_fp32", True),
    Row(
        "--apply-query-key-layer-scaling",
        "",
        see.transformer,
        "apply_query_key_layer_scaling",
        True,
    ),
    Row("--max-position-embeddings", "64", see.gpt, "max_sequence_length", 64),
    Row("--position-embedding-type", "rope", see.gpt, "position_embedding_type", "rope"),
    Row("--use-rotary-position-embeddings", "", see.gpt, "position_embedding_type", "rope"),
    Row("--rotary-base", "500", see.gpt, "rotary_base", 500),
    Row("--rotary-percent", "0.5", see.gpt, "rotary_percent", 0.5),
    Row("--rotary-interleaved", "", see.transformer, "rotary_interleaved", True),
    Row("--rotary-seq-len-interpolation-factor", "2", see.gpt, "seq_len_interpolation_factor", 2),
    Row("--use-rope-scaling", "", see.gpt, "rope_scaling", True, base=ROPE),
    Row("--rope-scaling-factor", "32", see.gpt, "rope_scaling_factor", 32.0, base=ROPE),
    Row("--normalization", "RMSNorm", see.transformer, "normalization", "RMSNorm"),
    Row("--norm-epsilon", "1e-3", see.transformer, "layernorm_epsilon", 1e-3),
    Row("--apply-layernorm-1p", "", see.transformer, "layernorm_zero_centered_gamma", True),
    Row("--swiglu", "", see.transformer, "gated_linear_unit", True),
    Row("--squared-relu", "", see.transformer, "activation at 2", 4.0),
    Row("--no-bias-gelu-fusion", "", see.transformer, "bias_activation_fusion", False),
    Row(
        "--no-bias-swiglu-fusion",
        "",
        see.transformer,
        "bias_activation_fusion",
        False,
        base="--swiglu",
    ),
    Row("--no-rope-fusion", "", see.fused_kernels, "rotary", False, base=ROPE),
    Row("--no-gradient-accumulation-fusion", "", see.fused_kernels, "weight_gradient", False),
    Row("--no-bias-dropout-fusion", "", see.transformer, "bias_dropout_fusion", False),
    Row("--disable-bias-linear", "", see.transformer, "add_bias_linear", False),
    Row("--add-qkv-bias", "", see.transformer, "add_qkv_bias", True, base="--disable-bias-linear"),
    Row("--hidden-dropout", "0.3", see.transformer, "hidden_dropout", 0.3),
    Row("--cross-entropy-loss-fusion", "", see.transformer, "cross_entropy_loss_fusion", True),
    Row(
        "--cross-entropy-fusion-impl",
        "te",
        see.transformer,
        "cross_entropy_fusion_impl",
        "te",
        base="--transformer-impl transformer_engine --cross-entropy-loss-fusion",
    ),
    Row("--init-method-std", "0.5", see.weights, "std", 0.5),
    Row("--embedding-init-method-std", "0", see.weights, "embedding_std", 0.0),
    Row("--init-method-xavier-uniform", "", see.weights, "xavier_uniform", True),
    # One run.
    Row("--micro-batch-size", "4", see.loader, "first", [0, 1, 2, 3]),
    Row("--global-batch-size", "6", see.datasets, "train", 60),
    Row("--calculate-per-token-loss", "", see.transformer, "calculate_per_token_loss", True),
    Row("--train-iters", "7", see.datasets, "train", 14),
    Row(
        "--train-samples",
        "50",
        see.datasets,
        "train",
        50,
        base="--train-samples 90",
        without="--train-iters",
    ),
    Row("--rampup-batch-size", "2 2 8", see.datasets, "train", 50, base="--global-batch-size 6"),
    Row("--bf16", "", see.transformer, "params_dtype", torch.bfloat16),
    Row("--fp16", "", see.transformer, "params_dtype", torch.float16),
    Row("--loss-scale", "64", see.optimizer, "loss_scale", 64.0),
    Row("--initial-loss-scale", "64", see.optimizer, "initial_loss_scale", 64.0),
    Row("--min-loss-scale", "64", see.optimizer, "min_loss_scale", 64.0),
    Row("--loss-scale-window", "64", see.optimizer, "loss_scale_window", 64.0),
    Row("--hysteresis", "3", see.optimizer, "hysteresis", 3),
    Row(
        "--fp32-residual-connection",
        "",
        see.transformer,
        "fp32_residual_connection",
        True,
        base="--bf16",
    ),
    Row("--accumulate-allreduce-grads-in-fp32", "", see.ddp, "grad_reduce_in_fp32", True),
    Row("--grad-reduce-in-bf16", "", see.ddp, "grad_reduce_in_fp32", False, base="--bf16"),
    Row("--fp16-lm-cross-entropy", "", see.gpt, "fp16_lm_cross_entropy", True, base="--fp16"),
    Row("--recompute-activations", "", see.transformer, "recompute_granularity", "selective"),
    Row(
        "--recompute-granularity",
        "selective",
        see.transformer,
        "recompute_granularity",
        "selective",
    ),
    Row("--recompute-method", "block", see.transformer, "recompute_method", "block", base=FULL),
    Row("--recompute-num-layers", "2", see.transformer, "recompute_num_layers", 2, base=FULL),
    Row(
        "--recompute-modules",
        "mlp core_attn",
        see.transformer,
        "recompute_modules",
        ["mlp", "core_attn"],
        base="--recompute-activations --disable-bias-linear",
    ),
    Row(
        "--distribute-saved-activations",
        "",
        see.transformer,
        "distribute_saved_activations",
        True,
        base=f"{FULL} --tensor-model-parallel-size 2",
        world_size=2,
    ),
    Row("--eval-iters", "-1", see.datasets, "valid", 0),
    Row("--eval-interval", "5", see.datasets, "valid", 600, base="--eval-iters 100"),
    Row("--seed", "7", see.weights, "seed", 7),
    Row("--seed", "7", see.datasets, "random_seed", 7),
    Row("--deterministic-mode", "", see.transformer, "deterministic_mode", True),
    # The optimizer.
    Row("--optimizer", "sgd", see.optimizer, "optimizer", "sgd"),
    Row("--clip-grad", "0.5", see.optimizer, "clip_grad", 0.5),
    Row("--adam-beta1", "0.5", see.optimizer, "adam_beta1", 0.5),
    Row("--adam-beta2", "0.5", see.optimizer, "adam_beta2", 0.5),
    Row("--adam-eps", "0.5", see.optimizer, "adam_eps", 0.5),
    Row("--sgd-momentum", "0.5", see.optimizer, "sgd_momentum", 0.5),
    Row("--lr", "0.5", see.schedule, "max_lr", 0.5),
    Row("--min-lr", "1e-4", see.schedule, "min_lr", 1e-4),
    Row("--lr-decay-style", "cosine", see.schedule, "lr_decay_style", "cosine"),
    Row("--lr-decay-iters", "5", see.schedule, "lr_decay_steps", 10),
    Row("--lr-decay-samples", "50", see.schedule, "lr_decay_steps", 50, **SAMPLES),
    Row("--lr-warmup-fraction", "0.1", see.schedule, "lr_warmup_steps", 2),
    Row("--lr-warmup-iters", "3", see.schedule, "lr_warmup_steps", 6),
    Row("--lr-warmup-samples", "30", see.schedule, "lr_warmup_steps", 30, **SAMPLES),
    Row("--lr-warmup-init", "1e-4", see.schedule, "init_lr", 1e-4),
    Row(
        "--lr-wsd-decay-style",
        "minus_sqrt",
        see.schedule,
        "lr_wsd_decay_style",
        "minus_sqrt",
        base=WSD,
    ),
    Row("--lr-wsd-decay-iters", "4", see.schedule, "wsd_decay_steps", 8, base=WSD),
    Row(
        "--lr-wsd-decay-samples",
        "40",
        see.schedule,
        "wsd_decay_steps",
        40,
        base=f"{SAMPLES['base']} --lr-decay-style WSD --lr-wsd-decay-samples 50",
        without="--train-iters",
    ),
    Row("--decoupled-lr", "0.5", see.optimizer, "decoupled_lr", 0.5),
    Row(
        "--decoupled-min-lr",
        "0.1",
        see.optimizer,
        "decoupled_min_lr",
        0.1,
        base="--decoupled-lr 0.5",
    ),
    Row("--override-opt_param-scheduler", "", see.schedule, "override_opt_param_scheduler", True),
    Row(
        "--use-checkpoint-opt_param-scheduler",
        "",
        see.schedule,
        "use_checkpoint_opt_param_scheduler",
        True,
    ),
    Row("--weight-decay", "0.5", see.schedule, "end_wd", 0.5),
    Row("--start-weight-decay", "0.05", see.schedule, "start_wd", 0.05, base=GROWING),
    Row("--end-weight-decay", "0.5", see.schedule, "end_wd", 0.5, base=GROWING),
    Row(
        "--weight-decay-incr-style", "cosine", see.schedule, "wd_incr_style", "cosine", base=GROWING
    ),
    # Ranks.
    Row("--tensor-model-parallel-size", "2", see.layout, "tensor", 2, world_size=2),
    Row("--pipeline-model-parallel-size", "2", see.layout, "layers", ((4,), (4,)), world_size=2),
    Row(
        "--sequence-parallel",
        "",
        see.transformer,
        "sequence_parallel",
        True,
        base="--tensor-model-parallel-size 2",
        world_size=2,
    ),
    Row(
        "--num-layers-per-virtual-pipeline-stage",
        "2",
        see.layout,
        "layers",
        ((2, 2), (2, 2)),
        base="--pipeline-model-parallel-size 2 --global-batch-size 8",
        world_size=2,
    ),
    Row(
        "--num-virtual-stages-per-pipeline-rank",
        "2",
        see.layout,
        "layers",
        ((2, 2), (2, 2)),
        base="--pipeline-model-parallel-size 2 --global-batch-size 8",
        world_size=2,
    ),
    Row(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "6",
        see.transformer,
        "microbatch_group_size_per_vp_stage",
        6,
        base=CHUNKS,
        world_size=4,
    ),
    Row(
        "--decoder-first-pipeline-num-layers",
        "2",
        see.layout,
        "layers",
        ((2,), (6,)),
        base="--pipeline-model-parallel-size 2",
        world_size=2,
    ),
    Row(
        "--decoder-last-pipeline-num-layers",
        "2",
        see.layout,
        "layers",
        ((6,), (2,)),
        base="--pipeline-model-parallel-size 2",
        world_size=2,
    ),
    Row(
        "--pipeline-model-parallel-layout",
        "Et*3|t*5L",
        see.layout,
        "layers",
        ((3,), (5,)),
        base="--pipeline-model-parallel-size 2",
        world_size=2,
    ),
    Row(
        "--no-overlap-p2p-communication",
        "",
        see.transformer,
        "overlap_p2p_comm",
        False,
        base=CHUNKS,
        world_size=4,
    ),
    Row(
        "--overlap-p2p-communication-warmup-flush",
        "",
        see.transformer,
        "overlap_p2p_comm_warmup_flush",
        True,
        base=CHUNKS,
        world_size=4,
    ),
    Row("--use-distributed-optimizer", "", see.ddp, "use_distributed_optimizer", True),
    Row("--use-distributed-optimizer", "", see.optimizer, "use_distributed_optimizer", True),
    Row("--overlap-grad-reduce", "", see.ddp, "overlap_grad_reduce", True),
    Row("--overlap-grad-reduce", "", see.hooks, "no_sync_func", True),
    Row(
        "--no-align-grad-reduce",
        "",
        see.hooks,
        "grad_sync_func",
        False,
        base=f"--overlap-grad-reduce {CHUNKS}",
        world_size=4,
    ),
    Row(
        "--overlap-param-gather",
        "",
        see.ddp,
        "overlap_param_gather",
        True,
        base="--use-distributed-optimizer --overlap-grad-reduce",
    ),
    Row(
        "--no-align-param-gather",
        "",
        see.hooks,
        "param_sync_func",
        False,
        world_size=4,
        base=f"--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather {CHUNKS}",
    ),
    Row("--ddp-num-buckets", "4", see.ddp, "bucket_size", 250),
    Row("--ddp-bucket-size", "77", see.ddp, "bucket_size", 77),
    Row("--ddp-average-in-collective", "", see.ddp, "average_in_collective", True),
    # Data.
    Row(
        "--data-path",
        "1 a 3 b",
        see.datasets,
        "blend",
        (["a", "b"], [1.0, 3.0]),
        base="--data-path a",
        **FILES,
    ),
    Row(
        "--train-data-path",
        "a",
        see.datasets,
        "blend_per_split",
        [(["a"], None), None, None],
        base="--train-data-path b",
        **FILES,
    ),
    Row(
        "--valid-data-path",
        "b",
        see.datasets,
        "blend_per_split",
        [(["a"], None), (["b"], None), None],
        base="--train-data-path a",
        **FILES,
    ),
    Row(
        "--test-data-path",
        "c",
        see.datasets,
        "blend_per_split",
        [(["a"], None), None, (["c"], None)],
        base="--train-data-path a",
        **FILES,
    ),
    Row("--split", "8,1,1", see.datasets, "split", "8,1,1", base="--data-path a", **FILES),
    Row("--data-cache-path", "folder", see.datasets, "path_to_cache", "folder"),
    Row("--no-mmap-bin-files", "", see.datasets, "mmap_bin_files", False),
    Row("--num-dataset-builder-threads", "3", see.datasets, "num_dataset_builder_threads", 3),
    Row("--mid-level-dataset-surplus", "0.5", see.datasets, "mid_level_dataset_surplus", 0.5),
    Row("--seq-length", "16", see.datasets, "sequence_length", 16),
    Row("--num-workers", "5", see.loader, "num_workers", 5),
    Row("--reset-position-ids", "", see.datasets, "reset_position_ids", True),
    Row("--reset-attention-mask", "", see.datasets, "reset_attention_mask", True),
    Row("--reset-attention-mask", "", see.datasets, "create_attention_mask", True),
    Row("--eod-mask-loss", "", see.datasets, "eod_mask_loss", True),
    # The tokenizer.
    Row("--tokenizer-type", "ByteLevelTokenizer", see.core_tokenizer, "library", "byte-level"),
    Row("--vocab-size", "50", see.core_tokenizer, "vocab_size", 50),
    Row(
        "--tokenizer-special-tokens",
        "<x>",
        see.core_tokenizer,
        "additional_special_tokens",
        ["<x>"],
        **SPM,
    ),
    Row("--tokenizer-hf-use-fast", "", see.core_tokenizer, "use_fast", True, **SPM),
    Row(
        "--tokenizer-hf-include-special-tokens",
        "",
        see.core_tokenizer,
        "include_special_tokens",
        True,
        **SPM,
    ),
    Row("--trust-remote-code", "", see.core_tokenizer, "trust_remote_code", True, **SPM),
    # Links.
    Row("--hetero-tcp-connections", "2", see.channel, "connections", 2, base=PAIR, world_size=2),
    Row("--hetero-ring-mib", "32", see.channel, "ring_bytes", 32 << 20, base=PAIR, world_size=2),
    Row("--hetero-chunk-kib", "64", see.channel, "chunk_bytes", 64 << 10, base=PAIR, world_size=2),
    Row("--hetero-checksum", "", see.channel, "checksum", True, base=PAIR, world_size=2),
    Row(
        "--hetero-pipeline-layers",
        "3 5",
        see.layout,
        "layers",
        ((3,), (5,)),
        base=PAIR,
        world_size=2,
    ),
    Row(
        "--hetero-vendors",
        "nvidia amd",
        see.layout,
        "vendors",
        ["nvidia", "amd"],
        base=PAIR,
        world_size=2,
    ),
    Row("--hetero-pipeline-sizes", "1 3", see.layout, "sizes", [1, 3], base=PAIR, world_size=4),
]

# Shown to act where what they do can be seen, by a test in the file named.
ELSEWHERE = {
    "--yaml-cfg": "training/arguments/test_config_file.py",
    "--attention-backend": "training/test_layers.py",
    "--no-position-embedding": "training/arguments/test_arguments_model.py",
    "--transformer-impl": "training/arguments/test_transformer_engine.py",
    "--exit-interval": "training/test_flags_in_a_run.py",
    "--exit-duration-in-mins": "training/test_flags_in_a_run.py",
    "--skip-train": "distributed/test_parity.py",
    "--no-check-for-nan-in-loss-and-grad": "training/test_flags_in_a_run.py",
    "--empty-unused-memory-level": "training/test_flags_in_a_run.py",
    "--manual-gc": "training/test_flags_in_a_run.py",
    "--manual-gc-interval": "training/test_flags_in_a_run.py",
    "--context-parallel-size": "training/arguments/test_arguments_parser.py",
    "--expert-model-parallel-size": "training/arguments/test_arguments_parser.py",
    "--distributed-timeout-minutes": "distributed/test_bad_input.py",
    "--mock-data": "training/test_flags_in_a_run.py",
    "--data-args-path": "training/arguments/test_arguments_data.py",
    "--per-split-data-args-path": "training/arguments/test_arguments_data.py",
    "--dataloader-type": "training/test_flags_in_a_run.py",
    "--tokenizer-model": "training/tokenizer/test_build.py",
    "--vocab-file": "training/tokenizer/test_build.py",
    "--merge-file": "training/tokenizer/test_build.py",
    "--tokenizer-metadata": "training/tokenizer/test_flags.py",
    "--tiktoken-pattern": "training/tokenizer/test_flags.py",
    "--tiktoken-num-special-tokens": "training/tokenizer/test_flags.py",
    "--tiktoken-special-tokens": "training/tokenizer/test_flags.py",
    "--tokenizer-sentencepiece-legacy": "training/tokenizer/test_flags.py",
    "--log-interval": "training/test_flags_in_a_run.py",
    "--log-params-norm": "training/test_flags_in_a_run.py",
    "--log-num-zeros-in-grad": "training/test_flags_in_a_run.py",
    "--log-memory-interval": "training/test_flags_in_a_run.py",
    "--log-device-memory-used": "training/test_flags_in_a_run.py",
    "--metrics-file": "training/test_outputs.py",
    "--tensorboard-dir": "training/test_flags_in_a_run.py",
    "--tensorboard-log-interval": "training/test_flags_in_a_run.py",
    "--tensorboard-queue-size": "training/test_recorder_flags.py",
    "--log-validation-ppl-to-tensorboard": "training/test_recorder_flags.py",
    "--log-memory-to-tensorboard": "training/test_recorder_flags.py",
    "--log-world-size-to-tensorboard": "training/test_recorder_flags.py",
    "--no-log-loss-scale-to-tensorboard": "training/test_recorder_flags.py",
    "--wandb-project": "training/test_recorder_flags.py",
    "--wandb-exp-name": "training/test_recorder_flags.py",
    "--wandb-save-dir": "training/test_recorder_flags.py",
    "--wandb-entity": "training/test_recorder_flags.py",
    "--profile": "training/test_profiling.py",
    "--use-pytorch-profiler": "training/test_profiling.py",
    "--profile-step-start": "training/test_profiling.py",
    "--profile-step-end": "training/test_profiling.py",
    "--profile-ranks": "training/test_profiling.py",
    "--hetero-pipeline": "distributed/test_parity.py",
    "--hetero-plan": "training/test_layout.py",
    "--hetero-transport": "distributed/test_parity.py",
    "--hetero-nics": "hetero/preflight/test_node.py",
    "--hetero-timeout": "distributed/test_failures.py",
    "--hetero-report": "distributed/harness.py",
}

OPTIONS = [action for action in build_parser()._actions if action.dest != "help"]
# Their tests are those of checkpoints.
CHECKPOINT_GROUP = "checkpoint"


@pytest.fixture(autouse=True)
def _without_accelerator():
    with cpu_shim():
        yield


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_flag_brings_what_a_launch_without_it_does_not_have(parse, row: Row) -> None:
    def observed(flags: str) -> dict[str, Any]:
        args = parse(f"{row.base} {flags}", without=row.without, world_size=row.world_size)
        return row.observer(args)

    # A name that nothing reports would pass for nothing.
    assert observed(shlex.join([row.flag, *row.value.split()]))[row.name] == row.expected
    assert observed("").get(row.name) != row.expected


def _checkpoint_flags() -> set[str]:
    groups = build_parser()._action_groups
    return {
        flag
        for group in groups
        if CHECKPOINT_GROUP in (group.title or "")
        for action in group._group_actions
        for flag in action.option_strings
    }


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.option_strings[0])
def test_a_flag_is_shown_to_act_or_said_to_do_nothing(option) -> None:
    flags = set(option.option_strings)
    if flags & _checkpoint_flags():
        return
    silent = flags & (set(IGNORED) | set(WITHOUT_EFFECT))
    shown = flags & {row.flag for row in ROWS}
    elsewhere = flags & set(ELSEWHERE)
    assert silent or shown or elsewhere, "no test shows what this flag does"
    assert not (silent and (shown or elsewhere)), "said to do nothing and shown to act"
    for flag in elsewhere:
        assert flag in (TESTS / ELSEWHERE[flag]).read_text()


def test_every_flag_listed_as_without_effect_exists() -> None:
    known = {flag for option in OPTIONS for flag in option.option_strings}
    assert set(WITHOUT_EFFECT) <= known
    assert set(ELSEWHERE) <= known
    assert {row.flag for row in ROWS} <= known
