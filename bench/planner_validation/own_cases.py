"""Which plans of our own are predicted and then run: one model, two devices, one of them slowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetero.plan import Mesh, Plan
from hetero.planner.placement import Placement
from hetero.planner.training_options import TrainingOptions

FAST, SLOW = "nvidia", "amd"
"""The vendors that are played. The second is the one that HETERO_SLOWDOWN makes slower."""
FACTORS = 1.0, 1.5, 2.0
PLANNED, EVEN = "planned", "even"

_LLAMA: Mapping[str, Any] = {
    "group-query-attention": True,
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
    "attention-dropout": 0,
    "hidden-dropout": 0,
    "lr": 1e-4,
    "mock-data": True,
    "tokenizer-type": "NullTokenizer",
    "num-workers": 0,
    "eval-iters": 0,
    "log-interval": 1,
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A model whose layers take most of a step on a device, and how it is trained."""

    model: Mapping[str, Any]
    layers: int
    global_batch: int
    iterations: int
    seconds_a_point: float
    """Of the profile."""
    dtype: str
    options: TrainingOptions

    def flags(self) -> dict[str, Any]:
        shape = {**_LLAMA, **self.model, "num-layers": self.layers}
        return shape | ({"bf16": True} if self.dtype == "bf16" else {})


ON_CPU = Scale(
    model={
        "hidden-size": 512,
        "ffn-hidden-size": 1408,
        "num-attention-heads": 8,
        "num-query-groups": 4,
        "seq-length": 128,
        "max-position-embeddings": 128,
        "padded-vocab-size": 2048,
        "vocab-size": 2000,
    },
    layers=8,
    global_batch=12,
    iterations=7,
    seconds_a_point=5.0,
    dtype="fp32",
    options=TrainingOptions(
        activation_bytes=4, parameter_bytes=4, state_bytes=8, reserved_bytes=0.0
    ),
)

# A GPU computes a layer for several times as long as its CPU takes to enqueue it: else a slow CPU
# would decide.
ON_GPU = Scale(
    model={
        "hidden-size": 4096,
        "ffn-hidden-size": 14336,
        "num-attention-heads": 32,
        "num-query-groups": 8,
        "seq-length": 8192,
        "max-position-embeddings": 8192,
        "padded-vocab-size": 32000,
        "vocab-size": 31900,
    },
    layers=8,
    global_batch=6,
    iterations=6,
    seconds_a_point=0.3,
    dtype="bf16",
    options=TrainingOptions(reserved_bytes=0.0),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan, on two devices of which the second vendor's is so many times slower."""

    name: str
    factor: float
    layers: tuple[int, int] | None = None
    """Of a pipeline's two stages; None for whole replicas, one on each vendor."""
    order: tuple[str, str] = (FAST, SLOW)
    shares: tuple[int, int] = (1, 1)
    """Micro-batches of each replica."""
    micro_batch: int = 1
    recompute: tuple[str, str] = ("none", "none")

    def placement(self, scale: Scale) -> Placement:
        meshes = tuple(
            Mesh(vendor, stages=1, micro_batch_size=self.micro_batch, recompute=recompute)
            if self.layers
            else Mesh(
                vendor,
                stages=1,
                share=share,
                micro_batch_size=self.micro_batch,
                recompute=recompute,
            )
            for vendor, share, recompute in zip(
                self.order, self.shares, self.recompute, strict=True
            )
        )
        layers = tuple((count,) for count in self.layers or (scale.layers,))
        plan = Plan(meshes=meshes, layers=layers, whole_replicas=self.layers is None)
        return Placement(plan, self.order, scale.global_batch)


def cases(scale: Scale, planned: Mapping[float, Case]) -> list[Case]:
    """All that are run, with what the planner chose for each factor above 1."""
    half, both = (scale.layers // 2, scale.layers // 2), ("full", "full")
    more = (scale.layers * 3 // 4, scale.layers // 4)
    found = [Case(name=f"{EVEN} x{factor:g}", factor=factor, layers=half) for factor in FACTORS]
    return [
        *found,
        *planned.values(),
        Case(name="most on the slow", factor=1.5, layers=more[::-1]),
        Case(name="slow one first", factor=2.0, layers=more[::-1], order=(SLOW, FAST)),
        Case(name="two samples", factor=1.5, layers=half, micro_batch=2),
        Case(name="recompute", factor=1.0, layers=half, recompute=both),
        Case(name="replicas x2", factor=2.0),
        Case(name="replicas 2:1 x2", factor=2.0, shares=(2, 1)),
        Case(name="replicas 2:1 x1.5", factor=1.5, shares=(2, 1), recompute=both),
    ]
