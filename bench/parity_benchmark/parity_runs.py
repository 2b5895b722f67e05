"""What bench/benchmark_parity.py trains: the models, and the runs of each with their flags."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.reproduction.settings import HOMOGENEOUS, LLAMA3_8B, VENDORS
from hetero.tools.runs import homogeneous_flags, mixed_flags
from megatron.hetero.arguments import build_parser, parse_args
from megatron.hetero.arguments.config_file import expand_config_files

PAIR = 2
"""Processes of one run: two pipeline stages."""
SEED = 1
FURTHER_SEEDS = (2, 3)

DETERMINISTIC, FAST = "deterministic", "fast"
KERNELS = {DETERMINISTIC: ("--deterministic-mode",), FAST: ("--cross-entropy-loss-fusion",)}
"""By the name of the comparison, what its runs add: with the first, bits must not differ."""

_TRAINING_FLAGS = (
    "--bf16 --lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.1 --clip-grad 1.0"
    " --adam-beta2 0.95 --use-distributed-optimizer --eval-iters 0 --log-interval 10"
    " --split 100,0,0"
)
_LLAMA_113M = (
    "--num-layers 16 --hidden-size 768 --num-attention-heads 12 --group-query-attention"
    " --num-query-groups 4 --ffn-hidden-size 2048 --position-embedding-type rope"
    " --normalization RMSNorm --swiglu --disable-bias-linear"
    " --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0"
    " --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4"
    " --global-batch-size 32 --lr 6e-4 --min-lr 6e-5"
)
_LLAMA_8B = "--seq-length 4096 --micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --min-lr 1e-5"


@dataclass(frozen=True)
class Setting:
    """A model, and what is asked of it unless the command line says otherwise."""

    name: str
    flags: tuple[str, ...]
    iterations: int
    kernels: tuple[str, ...]
    transports: tuple[str, ...]
    per_pair: int
    """Runs that share one pair of GPUs at the same time."""
    deadline: float
    """Seconds of one run."""
    preset: Path | None = None
    """A file of flags that come before `flags`."""
    layers: tuple[int, ...] | None = None
    """Of each stage; None for equal halves."""


LLAMA_113M = Setting(
    name="llama_113m",
    flags=tuple(_LLAMA_113M.split()),
    iterations=500,
    kernels=(DETERMINISTIC, FAST),
    transports=("device-direct", "cpu-forward"),
    per_pair=3,
    deadline=300.0,
)
LLAMA_8B = Setting(
    name=LLAMA3_8B.name,
    flags=tuple(_LLAMA_8B.split()),
    iterations=50,
    kernels=(DETERMINISTIC,),
    transports=("device-direct",),
    per_pair=1,
    deadline=300.0,
    preset=LLAMA3_8B.preset,
    layers=LLAMA3_8B.layers,
)
SETTINGS = {setting.name: setting for setting in (LLAMA_113M, LLAMA_8B)}


@dataclass(frozen=True)
class Run:
    """One run of pretrain_gpt.py on a pair of GPUs."""

    kernels: str
    transport: str
    """HOMOGENEOUS, or what carries tensors between the two stages."""
    seed: int
    is_again: bool = False
    """The reference once more: what is between the two is the kernels' own doing."""

    @property
    def name(self) -> str:
        again = ", again" if self.is_again else ""
        return f"{self.kernels}, {self.transport}, seed {self.seed}{again}"

    @property
    def file_stem(self) -> str:
        again = "_again" if self.is_again else ""
        return f"{self.kernels}_{self.transport}_{self.seed}{again}"

    @property
    def is_homogeneous(self) -> bool:
        return self.transport == HOMOGENEOUS

    @property
    def is_reference(self) -> bool:
        return self.is_homogeneous and self.seed == SEED and not self.is_again


def planned_runs(kernels: Sequence[str], transports: Sequence[str]) -> Iterator[Run]:
    """All runs, the slowest kernels first: what is started last should not take longest."""
    for name in kernels:
        for transport in (HOMOGENEOUS, *transports):
            yield Run(name, transport, SEED)
        if name != DETERMINISTIC:
            for seed in FURTHER_SEEDS:
                yield Run(name, HOMOGENEOUS, seed)
            yield Run(name, HOMOGENEOUS, SEED, is_again=True)


def run_flags(
    setting: Setting, run: Run, *, iterations: int, data: Sequence[str], extra: Sequence[str]
) -> list[str]:
    """All flags of a run; `extra`, the user's own, win over all others but the data's."""
    flags: list[str] = []
    if setting.preset is not None:
        flags += expand_config_files(["--yaml-cfg", str(setting.preset)], build_parser())[0]
    flags += [*_TRAINING_FLAGS.split(), *setting.flags, "--train-iters", str(iterations)]
    flags += KERNELS[run.kernels]
    if run.is_homogeneous:
        flags += homogeneous_flags(stages=PAIR, layers=setting.layers)
    else:
        flags += mixed_flags(
            vendors=VENDORS, sizes=(1, 1), layers=setting.layers, transport=run.transport
        )
    return [*flags, "--seed", str(run.seed), *extra, *data]


def parsed_run(
    setting: Setting, run: Run, *, iterations: int, extra: Sequence[str]
) -> argparse.Namespace:
    """The checked arguments of a run, before its data exist. Raises UserError."""
    data = ("--mock-data", "--tokenizer-type", "ByteLevelTokenizer")
    flags = run_flags(setting, run, iterations=iterations, data=data, extra=extra)
    return parse_args(flags, world_size=PAIR)
