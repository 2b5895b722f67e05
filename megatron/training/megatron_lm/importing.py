"""From a checkpoint of Megatron-LM's, in either format, to one of ours, a tensor at a time.

The result is written under a temporary name and renamed once it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero.errors import UserError
from megatron.training.checkpoint import folder as folders
from megatron.training.checkpoint.conversion import (
    no_new_parents,
    progress,
    require_empty,
    shards,
)
from megatron.training.checkpoint.index import DTYPES, DamagedCheckpoint
from megatron.training.checkpoint.lock import LOCK_FILE
from megatron.training.checkpoint.safetensors_writer import WriteItem
from megatron.training.checkpoint.tensor_names import EMBEDDING, optimizer_name
from megatron.training.checkpoint.train_state import TrainState
from megatron.training.checkpoint.writer import write_checkpoint, write_release
from megatron.training.megatron_lm import optimizer_states
from megatron.training.megatron_lm.arguments import to_ours
from megatron.training.megatron_lm.folders import Format, find
from megatron.training.megatron_lm.legacy import LegacyReader
from megatron.training.megatron_lm.optimizer_states import MAIN, MOMENTS, Optimizer
from megatron.training.megatron_lm.tensors import ModelTensor, model_tensors
from megatron.training.megatron_lm.torch_dist import TorchDistReader, expected_keys

FILE_BYTES = 5_000_000_000
_SHOWN = 3
"""Tensors that an error names."""


@dataclass(frozen=True)
class Converted:
    """What a conversion wrote."""

    folder: Path
    parameters: int
    rows: int
    """Of the embedding, as written."""
    iteration: int | None
    """None where the weights were written alone."""
    source: str
    """What was read."""
    notes: tuple[str, ...] = ()
    """Why it is not simply the newest."""


@dataclass(frozen=True)
class _Task:
    """One tensor of ours, and how it is read."""

    name: str
    tensor: ModelTensor
    dtype: torch.dtype
    source: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        return self.tensor.size * self.dtype.itemsize


def import_checkpoint(
    source: Path,
    target: Path,
    *,
    iteration: int | None = None,
    weights_only: bool = False,
    file_bytes: int = FILE_BYTES,
) -> Converted:
    """Write a checkpoint of ours under `target` from one of Megatron-LM's.

    With the optimizer's state, where there is one to be read, it is `target`/iter_N and training
    goes on from it; without it is `target`/release, the weights to begin from. Raises HeteroError.
    """
    found = find(source, iteration=iteration)
    reader: TorchDistReader | LegacyReader
    if found.format is Format.TORCH_DIST:
        reader = TorchDistReader(found.folder)
    else:
        reader = LegacyReader(found.folder)
        reader.require_sizes(reader.common["args"])
    stored_args = reader.common.get("args")
    if stored_args is None:
        raise UserError(
            f"{found.folder} holds no arguments, without which its model is unknown; load it in "
            "Megatron-LM and save it again"
        )
    args = to_ours(stored_args, source=str(found.folder))
    tensors = _tensors_of(reader, args)
    rows = tensors[0].shape[0]
    args |= {"padded_vocab_size": rows, **_precision(reader.dtype(tensors[0]))}
    optimizer = None
    if isinstance(reader, TorchDistReader) and not weights_only and found.iteration is not None:
        optimizer = optimizer_states.find(reader, tensors, args)
    tasks = list(_import_tasks(reader, tensors, optimizer))
    run = None if optimizer is None else _run_record(reader.common, args, optimizer, found.folder)
    step = None if run is None else int(run["iteration"])
    name = folders.RELEASE if step is None else folders.folder_name(step)
    # Whose lock it is, the writer finds out.
    require_empty(target, besides=(name + folders.SAVING, LOCK_FILE))
    with no_new_parents(target / name), progress(sum(task.bytes for task in tasks)) as advance:
        files = ([_piece(task, advance) for task in shard] for shard in shards(tasks, file_bytes))
        if run is None:
            folder = write_release(target, files, args=args)
        else:
            folder = write_checkpoint(target, name, files, args=args, run=run)
    parameters = sum(tensor.size for tensor in tensors)
    return Converted(folder, parameters, rows, step, source=str(found.folder))


def _tensors_of(
    reader: TorchDistReader | LegacyReader, args: Mapping[str, Any]
) -> list[ModelTensor]:
    """The model's tensors, all of which the checkpoint has as its arguments say, and no others."""
    embedding = reader.stored_shape(model_tensors(args, rows=0)[0])
    if embedding is None:
        raise DamagedCheckpoint(f"{reader.folder} lacks {EMBEDDING}; copy the whole checkpoint")
    tensors = model_tensors(args, rows=embedding[0])
    wrong, used = [], set()
    for tensor in tensors:
        shape = reader.stored_shape(tensor)
        if shape is None:
            wrong.append(f"{tensor.name} is missing")
        elif shape != tensor.shape:
            wrong.append(f"{tensor.name} is {list(shape)} instead of {list(tensor.shape)}")
        used |= set(reader.used_keys(tensor))
    if isinstance(reader, TorchDistReader):
        wrong += reader.other_depths(args["num_layers"])
    wrong += [
        f"{key} is none of this model's"
        for key in expected_keys(reader.weight_keys())
        if key not in used
    ]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise UserError(
            f"{reader.folder} is not the dense GPT model that its arguments tell of: "
            f"{'; '.join(wrong[:_SHOWN])}{more}"
        )
    return tensors


def _import_tasks(
    reader: TorchDistReader | LegacyReader,
    tensors: Sequence[ModelTensor],
    optimizer: Optimizer | None,
) -> Iterator[_Task]:
    for tensor in tensors:
        dtype = reader.dtype(tensor)
        if dtype is None or str(dtype).removeprefix("torch.") not in DTYPES:
            raise UserError(
                f"{tensor.name} of {reader.folder} is stored as {dtype}, which is not read"
            )

        def weight(tensor: ModelTensor = tensor) -> torch.Tensor:
            values = reader.read(tensor)
            if optimizer is not None and optimizer.has_main and values.dtype == torch.float32:
                _require_same(optimizer.states.read(MAIN, tensor), values, tensor, reader.folder)
            return values

        yield _Task(tensor.name, tensor, dtype, weight)
        if optimizer is not None:
            yield from _optimizer_tasks(reader, tensor, dtype, optimizer)


def _optimizer_tasks(
    reader: TorchDistReader | LegacyReader,
    tensor: ModelTensor,
    dtype: torch.dtype,
    optimizer: Optimizer,
) -> Iterator[_Task]:
    def main() -> torch.Tensor:
        values = optimizer.states.read(MAIN, tensor)
        _require_same(values, reader.read(tensor), tensor, reader.folder)
        return values

    if dtype != torch.float32:
        if not optimizer.has_main or not optimizer.states.dtype(MAIN, tensor).is_floating_point:
            raise UserError(
                f"{reader.folder} holds no float32 copies of its weights (int16 remainders of "
                "--use-precision-aware-optimizer are not read); convert it with --weights-only"
            )
        yield _Task(
            optimizer_name(MAIN, tensor.name), tensor, optimizer.states.dtype(MAIN, tensor), main
        )
    for moment in MOMENTS:

        def values(moment: str = moment) -> torch.Tensor:
            return optimizer.states.read(moment, tensor)

        kind = optimizer.states.dtype(moment, tensor)
        yield _Task(optimizer_name(moment, tensor.name), tensor, kind, values)


def _require_same(
    main: torch.Tensor, weights: torch.Tensor, tensor: ModelTensor, folder: Path
) -> None:
    """Weights are the optimizer's copies, rounded: else these would be another tensor's."""
    if not torch.equal(main.to(weights.dtype), weights):
        raise UserError(
            f"in {folder} the optimizer's copy of {tensor.name} is not what the model's weights "
            "were rounded from, so its state belongs to other weights; convert it with "
            "--weights-only"
        )


def _run_record(
    common: Mapping[str, Any], args: Mapping[str, Any], optimizer: Optimizer, folder: Path
) -> dict[str, Any]:
    scheduler = common.get("opt_param_scheduler", common.get("lr_scheduler"))
    if not isinstance(scheduler, dict) or "iteration" not in common:
        raise UserError(
            f"{folder} says nothing of the schedule or of its iteration; convert it with "
            "--weights-only"
        )
    progress_made = TrainState(
        iteration=int(common["iteration"]),
        consumed_train_samples=int(args.get("consumed_train_samples", 0)),
        consumed_valid_samples=int(args.get("consumed_valid_samples", 0)),
    )
    return {
        **progress_made.to_record(),
        "holds": {"optimizer": True, "random states": False},
        "scheduler": scheduler,
        "loss_scaler": dict(optimizer.loss_scaler),
        "optimizer_step": optimizer.step,
        "simulated": False,
    }


def _piece(task: _Task, advance: Callable[[int], object]) -> WriteItem:
    def read() -> torch.Tensor:
        advance(task.bytes)
        return task.source()

    return WriteItem(task.name, task.tensor.shape, task.dtype, (task.tensor.region,), read)


def _precision(dtype: torch.dtype | None) -> dict[str, Any]:
    return {
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": str(dtype).removeprefix("torch."),
    }
