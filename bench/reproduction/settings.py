"""What the rows of the published table have in common: the models, their split, their flags.

The published figures are those of "Joint Training on AMD and NVIDIA GPUs", arXiv 2602.18007: 8 H200
of one node and 8 MI325X of another, 8 BlueField-3 NICs in each, TP1 PP2, TFLOP/s per GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hetero import presets
from hetero.errors import UserError

SOURCE = "arXiv 2602.18007"
SOURCE_SETTING = "8 H200 + 8 MI325X in two nodes over RoCE, TP1 PP2"

HOMOGENEOUS = "homogeneous"
ROWS = (HOMOGENEOUS, "device-direct", "cpu-forward", "gloo")
"""The published rows by the names that our transports have, in the order in which they run."""
EVERY_GROUP = "gloo-every-group"
"""Another row of the publication: gloo between the stages, and for every group as well."""
VENDORS = ("nvidia", "amd")
"""The vendor of each stage. AMD comes last, as published: its share of layers is the smaller."""

TRAINING_FLAGS = (
    "--lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-iters 1 --weight-decay 0.1"
    " --clip-grad 1.0 --adam-beta2 0.95 --use-distributed-optimizer --eval-iters 0"
    " --log-interval 1 --split 100,0,0 --cross-entropy-loss-fusion"
)
"""The same for every row and model."""


@dataclass(frozen=True)
class Published:
    """A figure of the publication, and the row of its table that it comes from."""

    tflops: float
    what: str


@dataclass(frozen=True)
class ModelSetting:
    """A model as the table runs it."""

    name: str
    preset: Path
    layers: tuple[int, ...] | None = None
    """Of each stage; None for equal halves."""
    seq_length: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    published: Mapping[str, Published] = field(default_factory=dict)
    """By row; "homogeneous, amd" is what takes the place of "homogeneous" on AMD's GPUs."""


LLAMA3_8B = ModelSetting(
    name="llama3_8b",
    preset=presets.FOLDER / "llama3.1_8b.yaml",
    # The output layer weighs as much as 2.4 layers, so its stage holds fewer.
    layers=(17, 15),
    seq_length=4096,
    micro_batch_size=1,
    global_batch_size=128,
    published={
        HOMOGENEOUS: Published(549.7, "NVIDIA only"),
        f"{HOMOGENEOUS}, amd": Published(534.9, "AMD only"),
        "device-direct": Published(539.6, "device-direct"),
        "cpu-forward": Published(236.5, "Gloo on the pipeline group, one NIC per GPU"),
        "gloo": Published(160.8, "Gloo on the pipeline group"),
        EVERY_GROUP: Published(11.1, "Gloo for every group, data-parallel ones of 8 ranks too"),
    },
)

QWEN2_7B = ModelSetting(
    name="qwen2_7b",
    preset=presets.FOLDER / "qwen2_7b.yaml",
    layers=(16, 12),
    seq_length=4096,
    micro_batch_size=1,
    global_batch_size=128,
    published={
        HOMOGENEOUS: Published(557.4, "NVIDIA only"),
        f"{HOMOGENEOUS}, amd": Published(514.5, "AMD only"),
        "device-direct": Published(526.4, "device-direct"),
    },
)

MODELS = {setting.name: setting for setting in (LLAMA3_8B, QWEN2_7B)}


def model_setting(name: str) -> ModelSetting:
    """A published model by its name, or any other by its preset file, without published figures."""
    if name in MODELS:
        return MODELS[name]
    preset = Path(name)
    if not preset.is_file():
        raise UserError(
            f"--model {name} is neither one of {', '.join(MODELS)} nor a preset file; see "
            "examples/presets"
        )
    return ModelSetting(name=preset.stem, preset=preset.resolve())


def published_of(setting: ModelSetting, row: str, *, vendor: str) -> Published | None:
    """The figure to put beside a row that ran on GPUs of `vendor`."""
    return setting.published.get(f"{row}, {vendor}") or setting.published.get(row)
