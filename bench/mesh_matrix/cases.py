"""The plans that are tried, and the flags of the model that all of them train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from hetero.plan import Mesh, Plan

STEP = 4
"""Sequences of one step of the pipeline."""
SEQUENCE, HIDDEN, GLOBAL_BATCH, ITERATIONS = 32, 32, 24, 20
TINY_MODEL = (
    f"--hidden-size {HIDDEN} --num-attention-heads 4 --ffn-hidden-size 64 "
    f"--seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 "
    f"--attention-dropout 0 --global-batch-size {GLOBAL_BATCH} --train-iters {ITERATIONS} "
    "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 "
    "--clip-grad 0.1 --use-distributed-optimizer --log-interval 1 --eval-iters 0 --num-workers 0 "
    f"--padded-vocab-size 8192 --micro-batch-size {STEP}"
)
UNTIED, PER_TOKEN = "--untie-embeddings-and-output-weights", "--calculate-per-token-loss"


@dataclass(frozen=True)
class Case:
    """One plan. Two that train the same model are compared with the same run of one process."""

    plan: Plan
    flags: str = ""
    """What the run of one process has too."""

    @property
    def name(self) -> str:
        meshes = []
        for index, mesh in enumerate(self.plan.meshes):
            stages = [b.stage for b in self.plan.blocks if b.mesh == index]
            layers = ",".join("+".join(map(str, self.plan.layers[stage])) for stage in stages)
            parallel = " sp" * bool(mesh.sequence_parallel)
            whole = " whole optimizer" * (mesh.distributed_optimizer is False)
            meshes.append(f"TP{mesh.tensor} DP{mesh.data}{parallel}{whole} ({layers})")
        words = {UNTIED: "untied", PER_TOKEN: "per-token loss"}
        more = [word for flag, word in words.items() if flag in self.flags]
        return ", ".join([" / ".join(meshes), *more])

    @property
    def model_flags(self) -> str:
        return f"{TINY_MODEL} --num-layers {self.plan.num_layers} {self.flags}"

    @property
    def bytes_of_tensors(self) -> int:
        """What activations and gradients at boundaries have, in float32, each counted once."""
        chunks, stages = self.plan.chunks, self.plan.stages
        crossings = sum(
            # The last stage's last chunk has no chunk after it.
            chunks - (edge.target < edge.source)
            for edge in self.plan.edges()
            if edge.is_boundary and stages > 1
        )
        tensor = SEQUENCE * HIDDEN * 4 * GLOBAL_BATCH
        return 2 * crossings * tensor * ITERATIONS


def all_cases() -> Iterator[Case]:
    """Every shape beside every other on eight processes, and what else plans can have."""
    shapes = [(t, d) for t, d in product((1, 2, 4), repeat=2) if t * d <= 4]
    for first, last in product(shapes, shapes):
        yield Case(_plan([_mesh(*first), _mesh(*last)], [2, 2]))
        if max(first[0], last[0]) > 1:
            # Every second with uneven layers.
            layers = [1, 3] if first[0] < last[0] else [3, 1]
            yield Case(_plan([_mesh(*first, parallel=True), _mesh(*last, parallel=True)], layers))
    wide, tall = _mesh(1, 2), _mesh(2, 1, parallel=True)
    yield Case(_plan([tall, wide], [2, 2]), UNTIED)
    yield Case(_plan([_mesh(1, 4), _mesh(2, 2)], [1, 3]), UNTIED)
    yield Case(_plan([tall, wide], [2, 2]), PER_TOKEN)
    yield Case(_plan([_mesh(1, 4), _mesh(4, 1, parallel=True)], [3, 1]), PER_TOKEN)
    yield Case(_plan([replace(_mesh(2, 2), distributed_optimizer=False), _mesh(1, 4)], [2, 2]))
    yield Case(_plan([tall, wide, _mesh(2, 2)], [1, 2, 1]))
    yield Case(_plan([_mesh(1, 1), _mesh(4, 1, parallel=True), _mesh(1, 2)], [1, 1, 2]), UNTIED)
    yield Case(_plan([wide, _mesh(1, 1), tall], [2, 1, 1]), PER_TOKEN)
    yield Case(_plan([replace(wide, stages=2), _mesh(4, 1)], [1, 2, 1]))
    yield Case(_plan([tall, replace(wide, stages=2)], [2, 1, 1]))
    yield Case(_plan([tall, wide], [(1, 1), (1, 1)]))
    yield Case(_plan([_mesh(1, 4), _mesh(4, 1)], [(2, 1), (1, 2)]), UNTIED)
    yield Case(_plan([tall, _mesh(1, 4), _mesh(1, 1)], [(1, 2), (1, 1), (2, 1)]))


def _mesh(tensor: int, data: int, *, parallel: bool = False) -> Mesh:
    return Mesh(
        "nvidia",
        stages=1,
        tensor=tensor,
        data=data,
        micro_batch_size=STEP // data,
        sequence_parallel=parallel and tensor > 1,
    )


def _plan(meshes: Sequence[Mesh], layers: Sequence[int | tuple[int, ...]]) -> Plan:
    vendors = ("nvidia", "amd")
    named = (replace(mesh, vendor=vendors[i % 2]) for i, mesh in enumerate(meshes))
    chunks = (item if isinstance(item, tuple) else (item,) for item in layers)
    return Plan(meshes=tuple(named), layers=tuple(chunks))
