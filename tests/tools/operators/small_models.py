"""A small model whose operators are run in this process."""

from __future__ import annotations

from functools import cache

from hetero.tools.operators.comparison import Comparison, compare
from hetero.tools.operators.dump import REFERENCE, Dump
from hetero.tools.operators.layer_flags import layer_arguments
from hetero.tools.operators.recording import default_device, record

LLAMA = (
    "--num-layers 1 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 "
    "--group-query-attention --num-query-groups 2 --seq-length 48 --max-position-embeddings 64 "
    "--micro-batch-size 2 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --padded-vocab-size 320"
)
GPT = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 48 "
    "--max-position-embeddings 48 --micro-batch-size 2 --padded-vocab-size 320"
)


def computed(flags: str, dtype: str = "bf16", *, layers: int = 1, device: str = "") -> Dump:
    """What the operators of one model compute here; nothing may be cached of it."""
    args = layer_arguments(flags.split(), dtype=dtype, layers=layers)
    return record(args, device=device or default_device(), sample=0)


@cache
def reference(flags: str, dtype: str = "bf16", *, layers: int = 1) -> Dump:
    return computed(flags, dtype, layers=layers, device=REFERENCE)


def checked(flags: str, dtype: str = "bf16", *, layers: int = 1) -> Comparison:
    ours = computed(flags, dtype, layers=layers)
    return compare(ours, reference(flags, dtype, layers=layers))
