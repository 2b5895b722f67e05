"""Converts a checkpoint of Megatron-LM's, in either format, to one of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hetero.errors import UserError
from megatron.hetero.checkpoint.conversion import (
    FILE_BYTES,
    Converted,
    precision_args,
    write_converted,
)
from megatron.hetero.checkpoint.index import DTYPES, DamagedCheckpoint, TrainState
from megatron.hetero.checkpoint.safetensors_writer import WriteItem
from megatron.hetero.checkpoint.tensor_names import (
    ADAM_MOMENTS,
    EMBEDDING,
    MAIN_COPY,
    optimizer_name,
)
from megatron.hetero.megatron_lm.arguments import args_from_namespace
from megatron.hetero.megatron_lm.folders import (
    Format,
    MegatronCheckpoint,
    find_megatron_checkpoint,
)
from megatron.hetero.megatron_lm.legacy_reader import LegacyReader
from megatron.hetero.megatron_lm.optimizer_states import Optimizer, find_optimizer
from megatron.hetero.megatron_lm.tensors import ModelTensor, model_tensors
from megatron.hetero.megatron_lm.torch_dist_reader import TorchDistReader

_MAX_LISTED = 3
"""Tensors that an error names."""

Reader = TorchDistReader | LegacyReader


def import_checkpoint(
    source: Path,
    target: Path,
    *,
    iteration: int | None = None,
    weights_only: bool = False,
    file_bytes: int = FILE_BYTES,
) -> Converted:
    """Write a checkpoint of ours under `target` from one of Megatron-LM's.

    With the optimizer's state, if there is one that can be read, it is `target`/iter_N, from which
    training resumes; without it, `target`/release, whose weights a run starts from. `file_bytes`
    limits the size of a file of weights. Raises HeteroError.
    """
    checkpoint = find_megatron_checkpoint(source, iteration=iteration)
    reader: Reader
    if checkpoint.format is Format.TORCH_DIST:
        reader = TorchDistReader(checkpoint.folder)
    else:
        reader = LegacyReader(checkpoint.folder)
    args = _model_args(reader)
    tensors = _require_model_tensors(reader, args)
    rows = tensors[0].shape[0]
    args |= {"padded_vocab_size": rows, **precision_args(reader.dtype(tensors[0]))}
    optimizer = None if weights_only else _optimizer_of(reader, checkpoint, tensors, args)
    items = list(_write_items(reader, tensors, optimizer))
    run = None if optimizer is None else _run_record(reader, args, optimizer)
    folder = write_converted(target, items, args=args, run=run, file_bytes=file_bytes)
    return Converted(
        folder=folder,
        parameters=sum(tensor.size for tensor in tensors),
        rows=rows,
        source=str(checkpoint.folder),
        iteration=None if run is None else int(run["iteration"]),
    )


def _model_args(reader: Reader) -> dict[str, Any]:
    """Our arguments of the checkpoint's model, by destination."""
    namespace = reader.common.get("args")
    if namespace is None:
        raise UserError(
            f"{reader.folder} holds no arguments, without which its model is unknown; load it in "
            "Megatron-LM and save it again"
        )
    return args_from_namespace(namespace, source=str(reader.folder))


def _require_model_tensors(reader: Reader, args: Mapping[str, Any]) -> list[ModelTensor]:
    """The tensors of the model that the arguments describe.

    Raises UserError or DamagedCheckpoint if the checkpoint lacks one, or holds others.
    """
    embedding = reader.stored_shape(model_tensors(args, rows=0)[0])
    if embedding is None:
        raise DamagedCheckpoint(f"{reader.folder} lacks {EMBEDDING}; copy the whole checkpoint")
    tensors = model_tensors(args, rows=embedding[0])
    problems, used = [], set()
    for tensor in tensors:
        shape = reader.stored_shape(tensor)
        if shape is None:
            problems.append(f"{tensor.name} is missing")
        elif shape != tensor.shape:
            problems.append(f"{tensor.name} is {list(shape)} instead of {list(tensor.shape)}")
        used |= set(reader.used_keys(tensor))
    if isinstance(reader, TorchDistReader):
        problems += reader.wrong_depths(args["num_layers"])
    problems += [
        f"{key} is no tensor of this model" for key in reader.weight_keys() if key not in used
    ]
    if problems:
        more = len(problems) - _MAX_LISTED
        raise UserError(
            f"{reader.folder} is not the dense GPT model that its arguments describe: "
            f"{'; '.join(problems[:_MAX_LISTED])}{f'; and {more} more' if more > 0 else ''}"
        )
    return tensors


def _optimizer_of(
    reader: Reader,
    checkpoint: MegatronCheckpoint,
    tensors: Sequence[ModelTensor],
    args: Mapping[str, Any],
) -> Optimizer | None:
    """The optimizer's state, which is read from `torch_dist` only; None if there is none."""
    if not isinstance(reader, TorchDistReader) or checkpoint.iteration is None:
        return None
    return find_optimizer(reader, tensors, args)


def _write_items(
    reader: Reader, tensors: Sequence[ModelTensor], optimizer: Optimizer | None
) -> Iterator[WriteItem]:
    """The tensors of our checkpoint, each read when its turn comes to be written."""
    for tensor in tensors:
        dtype = reader.dtype(tensor)
        if dtype is None or str(dtype).removeprefix("torch.") not in DTYPES:
            raise UserError(
                f"{tensor.name} of {reader.folder} is stored as {dtype}, which is not read"
            )
        if optimizer is None:
            yield _item(tensor.name, tensor, dtype, partial(reader.read, tensor))
        else:
            source = partial(_read_weight, reader, optimizer, tensor)
            yield _item(tensor.name, tensor, dtype, source)
            yield from _optimizer_items(reader, tensor, dtype, optimizer)


def _optimizer_items(
    reader: Reader, tensor: ModelTensor, dtype: torch.dtype, optimizer: Optimizer
) -> Iterator[WriteItem]:
    states = optimizer.states
    if dtype != torch.float32:
        if not optimizer.has_main_copy or not states.dtype(MAIN_COPY, tensor).is_floating_point:
            raise UserError(
                f"{reader.folder} holds no float32 copies of its weights (int16 remainders of "
                "--use-precision-aware-optimizer are not read); convert it with --weights-only"
            )
        source = partial(_read_main_copy, reader, optimizer, tensor)
        name = optimizer_name(MAIN_COPY, tensor.name)
        yield _item(name, tensor, states.dtype(MAIN_COPY, tensor), source)
    for moment in ADAM_MOMENTS:
        source = partial(states.read, moment, tensor)
        name = optimizer_name(moment, tensor.name)
        yield _item(name, tensor, states.dtype(moment, tensor), source)


def _item(
    name: str, tensor: ModelTensor, dtype: torch.dtype, source: partial[torch.Tensor]
) -> WriteItem:
    return WriteItem(name, tensor.shape, dtype, (tensor.region,), source)


def _read_weight(reader: Reader, optimizer: Optimizer, tensor: ModelTensor) -> torch.Tensor:
    """A weight; one in float32 must equal the optimizer's copy, which is not written then."""
    weight = reader.read(tensor)
    if optimizer.has_main_copy and weight.dtype == torch.float32:
        main_copy = optimizer.states.read(MAIN_COPY, tensor)
        _require_rounded_from(main_copy, weight, tensor, reader.folder)
    return weight


def _read_main_copy(reader: Reader, optimizer: Optimizer, tensor: ModelTensor) -> torch.Tensor:
    main_copy = optimizer.states.read(MAIN_COPY, tensor)
    _require_rounded_from(main_copy, reader.read(tensor), tensor, reader.folder)
    return main_copy


def _require_rounded_from(
    main_copy: torch.Tensor, weight: torch.Tensor, tensor: ModelTensor, folder: Path
) -> None:
    """Raise UserError unless the optimizer's copy is that of this weight, and so its state."""
    if not torch.equal(main_copy.to(weight.dtype), weight):
        raise UserError(
            f"in {folder} the optimizer's copy of {tensor.name} is not what the model's weights "
            "were rounded from, so its state belongs to other weights; convert it with "
            "--weights-only"
        )


def _run_record(reader: Reader, args: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The progress of the run, as our checkpoints store it."""
    common = reader.common
    scheduler = common.get("opt_param_scheduler", common.get("lr_scheduler"))
    if not isinstance(scheduler, dict) or "iteration" not in common:
        raise UserError(
            f"{reader.folder} has no schedule, or no iteration; convert it with --weights-only"
        )
    train_state = TrainState(
        iteration=int(common["iteration"]),
        consumed_train_samples=int(args.get("consumed_train_samples", 0)),
        consumed_valid_samples=int(args.get("consumed_valid_samples", 0)),
    )
    return {
        **train_state.to_record(),
        "holds": {"optimizer": True, "random states": False},
        "scheduler": scheduler,
        "loss_scaler": dict(optimizer.loss_scaler),
        "optimizer_step": optimizer.step,
        "simulated": False,
    }
