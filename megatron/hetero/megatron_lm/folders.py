"""Finds Megatron-LM's checkpoint in the folder of its --save, and its format. No torch.

SAVE/latest_checkpointed_iteration.txt       the tracker: a number, or `release`
SAVE/iter_0000010/metadata.json, .metadata   torch_dist
SAVE/iter_0000010/mp_rank_00_000/            torch, the older layout: a folder for each rank
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from pathlib import Path

from hetero.errors import UserError
from megatron.hetero.checkpoint import folder as folders
from megatron.hetero.checkpoint.index import INDEX_FILE, DamagedCheckpoint

METADATA = ".metadata"
"""DCP's list of tensors and of their places in files."""
CONFIG = "metadata.json"
"""The name of the format."""
COMMON = "common.pt"
"""State that is the same on all ranks."""
RANK_FILE = "model_optim_rng.pt"


class Format(enum.Enum):
    """The values of Megatron-LM's --ckpt-format that can be converted."""

    TORCH_DIST = "torch_dist"
    TORCH = "torch"


@dataclass(frozen=True)
class MegatronCheckpoint:
    """A checkpoint's own folder."""

    folder: Path
    format: Format
    iteration: int | None
    """None for a release."""


def find_megatron_checkpoint(source: Path, *, iteration: int | None = None) -> MegatronCheckpoint:
    """The checkpoint of an iteration, or the tracker's; `source` may also be its own folder.

    Raises UserError or DamagedCheckpoint.
    """
    if not source.is_dir():
        raise UserError(f"{source} is not a folder; name the one that Megatron-LM's --save named")
    if (source / INDEX_FILE).exists() or any(source.glob(f"*/{INDEX_FILE}")):
        raise UserError(
            f"{source} holds checkpoints of this program, which --load takes as they are"
        )
    if (ckpt_format := _format_of(source)) is not None:
        return MegatronCheckpoint(source, ckpt_format, _iteration_of(source.name))
    name = _folder_name(source, iteration)
    folder = source / name
    if not folder.is_dir():
        raise UserError(f"{source} holds no {name}; name another folder, or a --ckpt-step")
    ckpt_format = _format_of(folder)
    if ckpt_format is None:
        raise DamagedCheckpoint(
            f"{folder} has neither {CONFIG} nor a folder mp_rank_00: it is not whole, or no "
            "checkpoint of Megatron-LM in the formats torch_dist and torch"
        )
    return MegatronCheckpoint(folder, ckpt_format, _iteration_of(name))


def _folder_name(source: Path, iteration: int | None) -> str:
    if iteration is not None:
        return folders.folder_name(iteration)
    tracker = folders.read_tracker(source)
    if tracker.folder is not None:
        return tracker.folder
    if tracker.exists:
        raise DamagedCheckpoint(
            f"{source / folders.TRACKER} names no iteration; say which with --ckpt-step"
        )
    raise UserError(
        f"{source} has no {folders.TRACKER}; name the folder that Megatron-LM's --save named, or a "
        "checkpoint's own"
    )


def _iteration_of(name: str) -> int | None:
    head, _, digits = name.partition("_")
    return int(digits) if head == "iter" and digits.isdecimal() else None


def _format_of(folder: Path) -> Format | None:
    """The format of a checkpoint's own folder; None if it is no such folder."""
    if (folder / CONFIG).exists():
        _require_torch_dist(folder)
        return Format.TORCH_DIST
    if next(folder.glob("mp_rank_*"), None) is not None:
        return Format.TORCH
    if (folder / METADATA).exists():
        raise UserError(
            f"{folder} has {METADATA} and no {CONFIG}: it is in the format torch_dcp or "
            "fsdp_dtensor, or was not written to its end; only torch_dist and torch can be "
            "converted"
        )
    return None


def _require_torch_dist(folder: Path) -> None:
    path = folder / CONFIG
    try:
        backend = json.loads(path.read_text())["sharded_backend"]
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} is cut short or not Megatron-LM's") from error
    if backend != Format.TORCH_DIST.value:
        raise UserError(
            f"{folder} is in the format {backend}; load it in Megatron-LM and save it with "
            "--ckpt-format torch_dist"
        )
