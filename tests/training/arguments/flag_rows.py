"""Where each flag shows that it acts: the rows of test_flags_act.py.

A row is a flag, an observer of `observers`, the value that the flag brings, which the same launch
without the flag must not have, and the name under which the observer reports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.training.arguments import observers as see


@dataclass(frozen=True)
class Row:
    words: str
    """The flag and its value."""
    observer: see.Observer
    expected: Any
    reported: str = ""
    """The name that the observer has for it; else the flag's own."""
    base: str = ""
    """Flags of both launches."""
    without: str = ""
    world_size: int = 1

    @property
    def flag(self) -> str:
        return self.words.split()[0]

    @property
    def name(self) -> str:
        return self.reported or self.flag.removeprefix("--").replace("-", "_")

    def __str__(self) -> str:
        return self.words


SAMPLES = {"base": "--train-samples 100 --global-batch-size 10", "without": "--train-iters"}
ROPE = "--position-embedding-type rope"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SPM = {
    "base": "--tokenizer-type HuggingFaceTokenizer --tokenizer-model .",
    "without": "--tokenizer-type --vocab-size",
}
WSD = "--lr-decay-style WSD --lr-wsd-decay-iters 5"
GROWING = "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.2"
MIXED = "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1 --hetero-nics lo"
PAIR = {"base": MIXED, "world_size": 2}
TENSOR = {"base": "--tensor-model-parallel-size 2", "world_size": 2}
STAGES = {"base": "--pipeline-model-parallel-size 2", "world_size": 2}
EIGHT = {"base": f"{STAGES['base']} --global-batch-size 8", "world_size": 2}
FILES = {"without": "--mock-data"}
# Bytes have the numbers 0 to 255; special tokens follow, numbered from the last one on.
FIM_TOKENS = {
    "base": "--data-path a --tokenizer-type ByteLevelTokenizer --tokenizer-special-tokens "
    "<fim_prefix> <fim_middle> <fim_suffix> <fim_pad> '<|endoftext|>' <x>",
    "without": "--mock-data --tokenizer-type --vocab-size",
}
FIM = {**FIM_TOKENS, "base": f"{FIM_TOKENS['base']} --fim-data"}
VIRTUAL = (
    "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
    "--global-batch-size 24"
)
CHUNKS = {"base": VIRTUAL, "world_size": 4}
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce"

ROWS = [
    # The model.
    Row("--num-layers 6", see.transformer, 6),
    Row("--hidden-size 32", see.transformer, 32),
    Row("--ffn-hidden-size 100", see.transformer, 100),
    Row("--num-attention-heads 8", see.transformer, 8),
    Row("--kv-channels 24", see.transformer, 24),
    Row("--make-vocab-size-divisible-by 50", see.gpt, 100, "vocab_size"),
    Row("--padded-vocab-size 110", see.gpt, 110, "vocab_size"),
    Row(
        "--untie-embeddings-and-output-weights",
        see.gpt,
        False,
        "share_embeddings_and_output_weights",
    ),
    Row(
        "--group-query-attention",
        see.transformer,
        2,
        "num_query_groups",
        base="--num-query-groups 2",
    ),
    Row("--num-query-groups 2", see.transformer, 2, base="--group-query-attention"),
    Row("--attention-dropout 0.3", see.transformer, 0.3),
    Row("--qk-layernorm", see.transformer, True),
    Row("--attention-softmax-in-fp32", see.transformer, True),
    Row("--apply-query-key-layer-scaling", see.transformer, True),
    Row("--max-position-embeddings 64", see.gpt, 64, "max_sequence_length"),
    Row("--position-embedding-type rope", see.gpt, "rope"),
    Row("--use-rotary-position-embeddings", see.gpt, "rope", "position_embedding_type"),
    Row("--rotary-base 500", see.gpt, 500),
    Row("--rotary-percent 0.5", see.gpt, 0.5),
    Row("--rotary-interleaved", see.transformer, True),
    Row("--rotary-seq-len-interpolation-factor 2", see.gpt, 2, "seq_len_interpolation_factor"),
    Row("--use-rope-scaling", see.gpt, True, "rope_scaling", base=ROPE),
    Row("--rope-scaling-factor 32", see.gpt, 32.0, base=ROPE),
    Row("--normalization RMSNorm", see.transformer, "RMSNorm"),
    Row("--norm-epsilon 1e-3", see.transformer, 1e-3, "layernorm_epsilon"),
    Row("--apply-layernorm-1p", see.transformer, True, "layernorm_zero_centered_gamma"),
    Row("--swiglu", see.transformer, True, "gated_linear_unit"),
    Row("--squared-relu", see.transformer, 4.0, "activation at 2"),
    Row("--no-bias-gelu-fusion", see.transformer, False, "bias_activation_fusion"),
    Row(
        "--no-bias-swiglu-fusion", see.transformer, False, "bias_activation_fusion", base="--swiglu"
    ),
    Row("--no-rope-fusion", see.fused_kernels, False, "rotary", base=ROPE),
    Row("--no-gradient-accumulation-fusion", see.fused_kernels, False, "weight_gradient"),
    Row("--no-bias-dropout-fusion", see.transformer, False, "bias_dropout_fusion"),
    Row("--disable-bias-linear", see.transformer, False, "add_bias_linear"),
    Row("--add-qkv-bias", see.transformer, True, base="--disable-bias-linear"),
    Row("--hidden-dropout 0.3", see.transformer, 0.3),
    Row("--cross-entropy-loss-fusion", see.transformer, True),
    Row(
        "--cross-entropy-fusion-impl te",
        see.transformer,
        "te",
        base="--transformer-impl transformer_engine --cross-entropy-loss-fusion",
    ),
    Row("--init-method-std 0.5", see.weights, 0.5, "std"),
    Row("--embedding-init-method-std 0", see.weights, 0.0, "embedding_std"),
    Row("--init-method-xavier-uniform", see.weights, True, "xavier_uniform"),
    # One run.
    Row("--micro-batch-size 4", see.loader, [0, 1, 2, 3], "first"),
    Row("--global-batch-size 6", see.datasets, 60, "train"),
    Row("--calculate-per-token-loss", see.transformer, True),
    Row("--train-iters 7", see.datasets, 14, "train"),
    Row(
        "--train-samples 50",
        see.datasets,
        50,
        "train",
        base="--train-samples 90",
        without="--train-iters",
    ),
    Row("--rampup-batch-size 2 2 8", see.datasets, 50, "train", base="--global-batch-size 6"),
    Row("--bf16", see.transformer, torch.bfloat16, "params_dtype"),
    Row("--fp16", see.transformer, torch.float16, "params_dtype"),
    Row("--loss-scale 64", see.optimizer, 64.0),
    Row("--initial-loss-scale 64", see.optimizer, 64.0),
    Row("--min-loss-scale 64", see.optimizer, 64.0),
    Row("--loss-scale-window 64", see.optimizer, 64.0),
    Row("--hysteresis 3", see.optimizer, 3),
    Row("--fp32-residual-connection", see.transformer, True, base="--bf16"),
    Row("--accumulate-allreduce-grads-in-fp32", see.ddp, True, "grad_reduce_in_fp32"),
    Row("--grad-reduce-in-bf16", see.ddp, False, "grad_reduce_in_fp32", base="--bf16"),
    Row("--fp16-lm-cross-entropy", see.gpt, True, base="--fp16"),
    Row("--recompute-activations", see.transformer, "selective", "recompute_granularity"),
    Row("--recompute-granularity selective", see.transformer, "selective"),
    Row("--recompute-method block", see.transformer, "block", base=FULL),
    Row("--recompute-num-layers 2", see.transformer, 2, base=FULL),
    Row(
        "--recompute-modules mlp core_attn",
        see.transformer,
        ["mlp", "core_attn"],
        base="--recompute-activations --disable-bias-linear",
    ),
    Row(
        "--distribute-saved-activations",
        see.transformer,
        True,
        base=f"{FULL} --tensor-model-parallel-size 2",
        world_size=2,
    ),
    Row("--eval-iters -1", see.datasets, 0, "valid"),
    Row("--eval-interval 5", see.datasets, 600, "valid", base="--eval-iters 100"),
    Row("--skip-train", see.datasets, 200, "valid", base="--eval-interval 5"),
    Row("--seed 7", see.weights, 7),
    Row("--seed 7", see.datasets, 7, "random_seed"),
    Row("--deterministic-mode", see.transformer, True),
    # The optimizer.
    Row("--optimizer sgd", see.optimizer, "sgd"),
    Row("--clip-grad 0.5", see.optimizer, 0.5),
    Row("--adam-beta1 0.5", see.optimizer, 0.5),
    Row("--adam-beta2 0.5", see.optimizer, 0.5),
    Row("--adam-eps 0.5", see.optimizer, 0.5),
    Row("--sgd-momentum 0.5", see.optimizer, 0.5),
    Row("--lr 0.5", see.schedule, 0.5, "max_lr"),
    Row("--min-lr 1e-4", see.schedule, 1e-4),
    Row("--lr-decay-style cosine", see.schedule, "cosine"),
    Row("--lr-decay-iters 5", see.schedule, 10, "lr_decay_steps"),
    Row("--lr-decay-samples 50", see.schedule, 50, "lr_decay_steps", **SAMPLES),
    Row("--lr-warmup-fraction 0.1", see.schedule, 2, "lr_warmup_steps"),
    Row("--lr-warmup-iters 3", see.schedule, 6, "lr_warmup_steps"),
    Row("--lr-warmup-samples 30", see.schedule, 30, "lr_warmup_steps", **SAMPLES),
    Row("--lr-warmup-init 1e-4", see.schedule, 1e-4, "init_lr"),
    Row("--lr-wsd-decay-style minus_sqrt", see.schedule, "minus_sqrt", base=WSD),
    Row("--lr-wsd-decay-iters 4", see.schedule, 8, "wsd_decay_steps", base=WSD),
    Row(
        "--lr-wsd-decay-samples 40",
        see.schedule,
        40,
        "wsd_decay_steps",
        base=f"{SAMPLES['base']} --lr-decay-style WSD --lr-wsd-decay-samples 50",
        without="--train-iters",
    ),
    Row("--decoupled-lr 0.5", see.optimizer, 0.5),
    Row("--decoupled-min-lr 0.1", see.optimizer, 0.1, base="--decoupled-lr 0.5"),
    Row("--override-opt_param-scheduler", see.schedule, True),
    Row("--use-checkpoint-opt_param-scheduler", see.schedule, True),
    Row("--weight-decay 0.5", see.schedule, 0.5, "end_wd"),
    Row("--start-weight-decay 0.05", see.schedule, 0.05, "start_wd", base=GROWING),
    Row("--end-weight-decay 0.5", see.schedule, 0.5, "end_wd", base=GROWING),
    Row("--weight-decay-incr-style cosine", see.schedule, "cosine", "wd_incr_style", base=GROWING),
    # Ranks.
    Row("--tensor-model-parallel-size 2", see.layout, [2], "tensor", world_size=2),
    Row("--pipeline-model-parallel-size 2", see.layout, ((4,), (4,)), "layers", world_size=2),
    Row("--sequence-parallel", see.transformer, True, **TENSOR),
    Row(
        "--num-layers-per-virtual-pipeline-stage 2", see.layout, ((2, 2), (2, 2)), "layers", **EIGHT
    ),
    Row(
        "--num-virtual-stages-per-pipeline-rank 2", see.layout, ((2, 2), (2, 2)), "layers", **EIGHT
    ),
    Row(
        "--microbatch-group-size-per-virtual-pipeline-stage 6",
        see.transformer,
        6,
        "microbatch_group_size_per_vp_stage",
        **CHUNKS,
    ),
    Row("--decoder-first-pipeline-num-layers 2", see.layout, ((2,), (6,)), "layers", **STAGES),
    Row("--decoder-last-pipeline-num-layers 2", see.layout, ((6,), (2,)), "layers", **STAGES),
    Row("--pipeline-model-parallel-layout Et*3|t*5L", see.layout, ((3,), (5,)), "layers", **STAGES),
    Row("--no-overlap-p2p-communication", see.transformer, False, "overlap_p2p_comm", **CHUNKS),
    Row(
        "--overlap-p2p-communication-warmup-flush",
        see.transformer,
        True,
        "overlap_p2p_comm_warmup_flush",
        **CHUNKS,
    ),
    Row("--use-distributed-optimizer", see.ddp, True),
    Row("--use-distributed-optimizer", see.optimizer, True),
    Row("--overlap-grad-reduce", see.ddp, True),
    Row("--overlap-grad-reduce", see.hooks, True, "no_sync_func"),
    Row(
        "--no-align-grad-reduce",
        see.hooks,
        False,
        "grad_sync_func",
        base=f"--overlap-grad-reduce {VIRTUAL}",
        world_size=4,
    ),
    Row("--overlap-param-gather", see.ddp, True, base=OVERLAP),
    Row(
        "--no-align-param-gather",
        see.hooks,
        False,
        "param_sync_func",
        world_size=4,
        base=f"{OVERLAP} --overlap-param-gather {VIRTUAL}",
    ),
    Row("--ddp-num-buckets 4", see.ddp, 250, "bucket_size"),
    Row("--ddp-bucket-size 77", see.ddp, 77, "bucket_size"),
    Row("--ddp-average-in-collective", see.ddp, True, "average_in_collective"),
    # Data.
    Row(
        "--data-path 1 a 3 b",
        see.datasets,
        (["a", "b"], [1.0, 3.0]),
        "blend",
        base="--data-path a",
        **FILES,
    ),
    Row(
        "--train-data-path a",
        see.datasets,
        [(["a"], None), None, None],
        "blend_per_split",
        base="--train-data-path b",
        **FILES,
    ),
    Row(
        "--valid-data-path b",
        see.datasets,
        [(["a"], None), (["b"], None), None],
        "blend_per_split",
        base="--train-data-path a",
        **FILES,
    ),
    Row(
        "--test-data-path c",
        see.datasets,
        [(["a"], None), None, (["c"], None)],
        "blend_per_split",
        base="--train-data-path a",
        **FILES,
    ),
    Row("--split 8,1,1", see.datasets, "8,1,1", base="--data-path a", **FILES),
    Row("--data-cache-path folder", see.datasets, "folder", "path_to_cache"),
    Row("--no-mmap-bin-files", see.datasets, False, "mmap_bin_files"),
    Row("--num-dataset-builder-threads 3", see.datasets, 3),
    Row("--mid-level-dataset-surplus 0.5", see.datasets, 0.5),
    Row("--seq-length 16", see.datasets, 16, "sequence_length"),
    Row("--num-workers 5", see.loader, 5),
    Row("--reset-position-ids", see.datasets, True),
    Row("--reset-attention-mask", see.datasets, True),
    Row("--reset-attention-mask", see.datasets, True, "create_attention_mask"),
    Row("--eod-mask-loss", see.datasets, True),
    Row("--allow-ambiguous-pad-tokens", see.datasets, True),
    Row("--fim-data", see.reordering, True, "done", **FIM_TOKENS),
    Row("--fim-rate 0.3", see.reordering, 0.3, "rate", **FIM),
    Row("--fim-spm-rate 0", see.reordering, 0.0, "spm_rate", **FIM),
    Row(
        "--fim-split-sample <x>",
        see.reordering,
        256,
        "separator",
        **{**FIM, "base": f"{FIM['base']} --fim-fragment-rate 0.3"},
    ),
    Row(
        "--fim-fragment-rate 0.3",
        see.reordering,
        0.3,
        "fragment_rate",
        **{**FIM, "base": f"{FIM['base']} --fim-split-sample <x> --fim-fragment-rate 0.2"},
    ),
    Row("--fim-no-prefix #!", see.reordering, "#!", "no_prefix", **FIM),
    Row("--fim-prefix-token <x>", see.reordering, 256, "prefix", **FIM),
    Row("--fim-middle-token <x>", see.reordering, 256, "middle", **FIM),
    Row("--fim-suffix-token <x>", see.reordering, 256, "suffix", **FIM),
    Row("--fim-pad-token <x>", see.reordering, 256, "pad", **FIM),
    Row("--fim-eod-token <x>", see.reordering, frozenset({256, 262}), "ends", **FIM),
    Row("--step-batch-size-schedule 0:2,320:4", see.datasets, 30, "train"),
    Row("--eval-global-batch-size 4", see.datasets, 400, "valid"),
    Row(
        "--main-grads-dtype bf16",
        see.ddp,
        False,
        "grad_reduce_in_fp32",
        base="--bf16 --use-precision-aware-optimizer",
    ),
    # The tokenizer.
    Row("--tokenizer-type ByteLevelTokenizer", see.core_tokenizer, "byte-level", "library"),
    Row("--vocab-size 50", see.core_tokenizer, 50),
    Row(
        "--tokenizer-special-tokens <x>",
        see.core_tokenizer,
        ["<x>"],
        "additional_special_tokens",
        **SPM,
    ),
    Row("--tokenizer-hf-use-fast", see.core_tokenizer, True, "use_fast", **SPM),
    Row(
        "--tokenizer-hf-include-special-tokens",
        see.core_tokenizer,
        True,
        "include_special_tokens",
        **SPM,
    ),
    Row("--trust-remote-code", see.core_tokenizer, True, **SPM),
    # Links.
    Row("--hetero-tcp-connections 2", see.channel, 2, "connections", **PAIR),
    Row("--hetero-ring-mib 32", see.channel, 32 << 20, "ring_bytes", **PAIR),
    Row("--hetero-chunk-kib 64", see.channel, 64 << 10, "chunk_bytes", **PAIR),
    Row("--hetero-checksum", see.channel, True, "checksum", **PAIR),
    Row("--hetero-pipeline-layers 3 5", see.layout, ((3,), (5,)), "layers", **PAIR),
    Row("--hetero-vendors nvidia amd", see.layout, ["nvidia", "amd"], "vendor", **PAIR),
    Row("--hetero-pipeline-sizes 1 3", see.layout, [1, 3], "sizes", base=MIXED, world_size=4),
    Row("--hetero-tensor-sizes 2 1", see.layout, [2, 1], "tensor", base=MIXED, world_size=6),
    Row("--hetero-data-sizes 4 2", see.layout, [4, 2], "data", base=MIXED, world_size=6),
    Row("--hetero-micro-batch-sizes 4 4", see.layout, [4, 4], "micro_batch_size", **PAIR),
    Row("--hetero-recompute full none", see.layout, ["full", "none"], "recompute", **PAIR),
    Row("--distributed-backend gloo", see.backends, "gloo", "across vendors"),
]
