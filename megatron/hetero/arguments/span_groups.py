"""The groups of spans of --otel-span-groups, as Megatron-LM names them."""

from __future__ import annotations

from enum import StrEnum


class SpanGroup(StrEnum):
    """Those that this program has spans of."""

    JOB = "job"
    MODEL_INIT = "model_init"
    LOAD_CHECKPOINT = "load_checkpoint"
    CHECKPOINT = "checkpoint"
    EVALUATE = "evaluate"
    FIRST_ITERATION = "first_iteration"
    STEP = "step"
    FORWARD_BACKWARD = "forward_backward"
    MICROBATCH = "microbatch"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer"
    DATA_LOADING = "data_loading"


_COARSE = frozenset(
    {SpanGroup.JOB, SpanGroup.CHECKPOINT, SpanGroup.EVALUATE, SpanGroup.FIRST_ITERATION}
)
_ALL = frozenset(SpanGroup)
PRESETS = {
    "default": _COARSE,
    "per_step": _ALL - {SpanGroup.MICROBATCH},
    "profiling": _ALL,
    "all": _ALL,
}
UNSPECIFIED = "all"
"""What --otel-span-groups stands for where it is not given: one trace for each step."""
ABSENT = frozenset({"layer", "activation_offload", "trace_region", "inference"})
"""Groups of Megatron-LM without a span here."""


def resolve_groups(spec: str) -> frozenset[SpanGroup]:
    """The groups of a list of presets and groups, with commas between. Raises ValueError."""
    found: frozenset[SpanGroup] = frozenset()
    for word in filter(None, (part.strip() for part in spec.split(","))):
        if word in PRESETS:
            found |= PRESETS[word]
        elif word in list(SpanGroup):
            found |= {SpanGroup(word)}
        elif word not in ABSENT:
            raise ValueError(
                f"{word!r} is no group of spans; give {', '.join(PRESETS)} or some of "
                f"{', '.join(SpanGroup)}"
            )
    return found
