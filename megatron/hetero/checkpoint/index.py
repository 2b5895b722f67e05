"""The index of a checkpoint: its tensors, their regions in each file, its files. JSON, no torch.

`index.json` is written last. It has a digest of itself, and the size and checksums of every other
file, so that a reader can tell whether the checkpoint is complete.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetero.errors import HeteroError
from hetero.recover.stored_files import INDEX_FILE, StoredFile
from megatron.hetero.checkpoint.regions import Region
from megatron.hetero.checkpoint.tensor_names import (
    AMAX_HISTORY,
    EMBEDDING,
    EXPERT_BIAS,
    OUTPUT_LAYER,
)

FORMAT_VERSION = 1
DTYPES = ("float32", "float64", "bfloat16", "float16", "uint8", "int32", "int64")


class DamagedCheckpoint(HeteroError):
    """A checkpoint is incomplete or changed. The message names the file and what is wrong.

    `file`: the one whose bytes are not those that were written, where that is what is wrong.
    """

    exit_code = 2

    def __init__(self, text: str, *, file: Path | None = None) -> None:
        super().__init__(text)
        self.file = file


@dataclass(frozen=True)
class StoredRegion:
    """A region of a tensor: `region.size` elements of a file's flat tensor, from `offset` on."""

    file: str
    offset: int
    region: Region


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the whole model. A file with a part of it has a flat tensor of its name."""

    shape: tuple[int, ...]
    dtype: str
    regions: tuple[StoredRegion, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Index:
    """A checkpoint without its tensors' elements.

    `args` are the flags of the run that wrote it, `run` its progress: see `TrainState`.
    """

    args: Mapping[str, Any]
    run: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]

    @property
    def iteration(self) -> int:
        return int(self.run.get("iteration", 0))

    def to_json(self) -> str:
        body = {
            "format": FORMAT_VERSION,
            "args": dict(self.args),
            "run": dict(self.run),
            "tensors": {name: tensor_record(t) for name, t in sorted(self.tensors.items())},
            "files": {name: [f.size, list(f.blocks)] for name, f in sorted(self.files.items())},
        }
        # The reader repeats this: numbers and names survive a round trip through JSON.
        return json.dumps({"sha256": _digest(body), "checkpoint": body})


def tensor_record(tensor: StoredTensor) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "boxes": [
            [b.file, b.offset, list(b.region.start), list(b.region.shape)] for b in tensor.regions
        ],
    }


def tensor_from_record(record: Mapping[str, Any]) -> StoredTensor:
    return StoredTensor(
        shape=tuple(record["shape"]),
        dtype=record["dtype"],
        regions=tuple(
            StoredRegion(file, offset, Region(tuple(start), tuple(shape)))
            for file, offset, start, shape in record["boxes"]
        ),
    )


def is_plain(value: Any) -> bool:
    """Whether JSON can represent a flag's value; lists and tuples count as equal."""
    if isinstance(value, list | tuple):
        return all(is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def parse_index(text: str) -> Index:
    """Parse an index. Raises DamagedCheckpoint."""
    try:
        record = json.loads(text)
        body = record["checkpoint"]
        version = body["format"]
        if version != FORMAT_VERSION:
            raise DamagedCheckpoint(
                f"{INDEX_FILE} has format {version!r}, this program reads {FORMAT_VERSION}"
            )
        if _digest(body) != record["sha256"]:
            raise DamagedCheckpoint(f"{INDEX_FILE} was changed after it was written")
        index = Index(
            args=body["args"],
            run=body["run"],
            tensors={name: tensor_from_record(t) for name, t in body["tensors"].items()},
            files={
                name: StoredFile(size, tuple(blocks))
                for name, (size, blocks) in body["files"].items()
            },
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{INDEX_FILE} is cut short or no index") from error
    _check_coverage(index)
    return index


def read_index(folder: Path) -> Index:
    """Read the index of a checkpoint's folder. Raises DamagedCheckpoint."""
    try:
        return parse_index((folder / INDEX_FILE).read_text())
    except FileNotFoundError:
        raise DamagedCheckpoint(_without_index(folder)) from None
    except UnicodeDecodeError:
        raise DamagedCheckpoint(f"{INDEX_FILE} is no text") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{INDEX_FILE} cannot be read ({error.strerror})") from error


def _without_index(folder: Path) -> str:
    if not folder.is_dir():
        return "it does not exist"
    if is_megatron_lm_checkpoint(folder):
        return f"it was {import_hint(folder.parent)}"
    return f"it has no {INDEX_FILE}"


def is_megatron_lm_checkpoint(folder: Path) -> bool:
    """Whether a folder is one checkpoint of Megatron-LM."""
    return (folder / ".metadata").exists() or next(folder.glob("mp_rank_*"), None) is not None


def import_hint(source: Path) -> str:
    """The end of an error message about checkpoints of Megatron-LM: what to do."""
    return (
        "written by Megatron-LM; convert it with `hetero convert "
        f"import-megatron {source} NEW_FOLDER` and name the new folder instead"
    )


def _check_coverage(index: Index) -> None:
    """Raise DamagedCheckpoint unless regions cover every tensor, in files that are listed."""
    for name, tensor in index.tensors.items():
        if tensor.dtype not in DTYPES:
            raise DamagedCheckpoint(f"tensor {name} has the unknown dtype {tensor.dtype!r}")
        if any(stored.file not in index.files for stored in tensor.regions):
            raise DamagedCheckpoint(f"tensor {name} lies in a file that {INDEX_FILE} does not list")
        inside = all(stored.region.lies_in(tensor.shape) for stored in tensor.regions)
        if not inside or sum(stored.region.size for stored in tensor.regions) != tensor.size:
            raise DamagedCheckpoint(f"tensor {name} is not whole")


def require_complete_model(
    index: Index, *, num_layers: int, tied: bool, mtp_layers: int = 0
) -> None:
    """Raise DamagedCheckpoint if a layer is missing, or a tensor that other layers have.

    Layers with experts are compared with each other, those without, and those of multi-token
    prediction. Maxima of fp8 tensors are not asked for: not all layers have them.
    """
    weights = {
        name
        for name in index.tensors
        if not name.startswith(("optimizer.", "rng.")) and not name.endswith(AMAX_HISTORY)
    }
    layers = _names_of_layers(weights, "decoder", num_layers)
    mixing = {layer for layer, names in layers.items() if any(map(_is_of_mixture, names))}
    dense = {layer: names for layer, names in layers.items() if layer not in mixing}
    predicting = _names_of_layers(weights, "mtp", mtp_layers)
    for alike in ({layer: layers[layer] for layer in mixing}, dense, predicting):
        everywhere = set().union(*alike.values())
        for layer, names in sorted(alike.items()):
            for missing in sorted(everywhere - names):
                raise DamagedCheckpoint(f"tensor {missing} of layer {layer} is missing")
    if mtp_layers and not predicting[0]:
        raise DamagedCheckpoint("the layers for multi-token prediction are missing")
    needed = [EMBEDDING, "decoder.final_layernorm.weight"]
    needed += [] if tied else [OUTPUT_LAYER]
    for name in needed:
        if name not in weights:
            raise DamagedCheckpoint(f"tensor {name} is missing")
    for name in index.tensors:
        if name.startswith("optimizer."):
            _, state, parameter = name.split(".", 2)
            if parameter not in weights:
                raise DamagedCheckpoint(f"tensor {parameter} is missing, though {name} is there")
    states = {name.split(".", 2)[1] for name in index.tensors if name.startswith("optimizer.")}
    for state in sorted(states):
        for parameter in sorted(weights):
            if parameter.endswith(EXPERT_BIAS):
                continue  # No optimizer updates it.
            if f"optimizer.{state}.{parameter}" not in index.tensors:
                raise DamagedCheckpoint(f"tensor optimizer.{state}.{parameter} is missing")


def _names_of_layers(weights: set[str], stack: str, least: int) -> dict[int, set[str]]:
    """What the names of a stack's tensors end in, by layer, of which there are so many at least."""
    layers: dict[int, set[str]] = {number: set() for number in range(least)}
    for name in weights:
        head, in_layers, rest = name.partition(".layers.")
        number, _, tensor = rest.partition(".")
        if in_layers and head == stack:
            layers.setdefault(int(number), set()).add(f"{head}.{tensor}")
    return layers


def _is_of_mixture(name: str) -> bool:
    return ".mlp.experts." in name or ".mlp.router." in name


@dataclass(frozen=True)
class TrainState:
    """Progress since the start of the run, across restarts."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    step_seconds: float = 0.0
    """Wall time of the iterations that this job has trained, without those rolled back."""

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> TrainState:
        return cls(**{name: type(no)(record.get(name, no)) for name, no in asdict(cls()).items()})


NEW_RUN = TrainState()
