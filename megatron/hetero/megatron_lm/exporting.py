"""Converts a checkpoint of ours to one of Megatron-LM's, in its format `torch_dist`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from hetero.errors import UserError
from megatron.hetero.checkpoint import folder as folders
from megatron.hetero.checkpoint.conversion import (
    Converted,
    byte_progress,
    missing_argument,
    new_folder,
    require_empty,
)
from megatron.hetero.checkpoint.index import DamagedCheckpoint, Index
from megatron.hetero.checkpoint.reader import CheckpointReader, TensorRead
from megatron.hetero.checkpoint.tensor_names import EMBEDDING, VOCABULARY
from megatron.hetero.megatron_lm.arguments import namespace_from_args, require_expressible
from megatron.hetero.megatron_lm.export_torch_dist import export_torch_dist
from megatron.hetero.megatron_lm.folders import Format
from megatron.hetero.megatron_lm.tensors import ModelTensor, model_tensors
from megatron.hetero.tokenizer.vocabulary import padded_vocab_size


@dataclass(frozen=True)
class ExportOptions:
    """Contents of the exported checkpoint."""

    weights_only: bool = False
    distributed_optimizer: bool | None = None
    """Whether to write the distributed optimizer's state; None: if the run used it."""
    divisible_by: int | None = None
    """--make-vocab-size-divisible-by; None keeps the embedding's rows."""
    tensor_parallel_size: int = 1
    """That from which Megatron-LM computes the rows."""


def export_checkpoint(
    source: Path, target: Path, options: ExportOptions, *, iteration: int | None = None
) -> Converted:
    """Write `target`, for Megatron-LM's --load, from a checkpoint of ours.

    With the optimizer's state it has the same iteration; without it, it is a release. If the newest
    checkpoint is damaged, it is refused rather than an older one taken. Raises HeteroError.
    """
    require_empty(target)
    with CheckpointReader.open(source, iteration=iteration, older=False) as opened:
        folder, index, title, notes = opened.folder, opened.index, opened.title, opened.notes
    tensors = _model_tensors(index, folder, options)
    with_optimizer = _has_optimizer(index, folder, options)
    rows = tensors[0].shape[0]
    namespace = _namespace(index, options, rows=rows, with_optimizer=with_optimizer)
    name = folders.folder_name(index.iteration) if with_optimizer else folders.RELEASE
    with (
        new_folder(target) as temporary,
        byte_progress(_stored_bytes(index, tensors, with_optimizer)) as advance,
    ):
        (temporary / name).mkdir()
        export_torch_dist(
            temporary / name,
            index,
            tensors,
            read=partial(_read_whole, folder, index, advance),
            args=namespace,
            with_optimizer=with_optimizer,
        )
        folders.sync_folder(temporary / name)
        tracked = str(index.iteration) if with_optimizer else folders.RELEASE
        folders.write_tracker(temporary, tracked)
    return Converted(
        folder=target / name,
        parameters=sum(tensor.size for tensor in tensors),
        rows=rows,
        source=title,
        iteration=index.iteration if with_optimizer else None,
        notes=notes,
    )


def _has_optimizer(index: Index, folder: Path, options: ExportOptions) -> bool:
    """Whether the optimizer's state is exported. Raises UserError unless it is Adam's."""
    holds = bool(index.run.get("holds", {}).get("optimizer", False))
    is_exported = holds and not options.weights_only
    if is_exported and index.args.get("optimizer") != "adam":
        raise UserError(
            f"{folder} holds the state of --optimizer {index.args.get('optimizer')}; only Adam's "
            "is converted, so export it with --weights-only"
        )
    return is_exported


def _stored_bytes(index: Index, tensors: Sequence[ModelTensor], with_optimizer: bool) -> int:
    weights = {tensor.name for tensor in tensors}
    return sum(
        stored.size * _dtype(index, name).itemsize
        for name, stored in index.tensors.items()
        if name in weights or (with_optimizer and name.startswith("optimizer."))
    )


def _dtype(index: Index, name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, index.tensors[name].dtype)
    return dtype


def _model_tensors(index: Index, folder: Path, options: ExportOptions) -> list[ModelTensor]:
    """The model's tensors, the embedding first, with as many rows of vocabulary as are asked for.

    Raises UserError or DamagedCheckpoint unless the checkpoint holds them.
    """
    if EMBEDDING not in index.tensors:
        raise DamagedCheckpoint(f"{folder} holds no {EMBEDDING}")
    rows = stored_rows = index.tensors[EMBEDDING].shape[0]
    args = index.args
    require_expressible(args, source=f"the checkpoint {folder}")
    if options.divisible_by is not None:
        tokens = args.get("tokenizer_vocab_size") or args.get("vocab_size") or stored_rows
        rows = padded_vocab_size(
            int(tokens),
            make_divisible_by=options.divisible_by,
            tensor_parallel_size=options.tensor_parallel_size,
        )
    try:
        tensors = model_tensors(args, rows=stored_rows)
    except KeyError as error:
        raise missing_argument(folder, error) from error
    for tensor in tensors:
        stored = index.tensors.get(tensor.name)
        if stored is None or stored.shape != tensor.shape:
            raise DamagedCheckpoint(f"{folder} has no {tensor.name} of {list(tensor.shape)}")
    return [replace(t, shape=(rows, *t.shape[1:])) if t.name in VOCABULARY else t for t in tensors]


def _namespace(
    index: Index, options: ExportOptions, *, rows: int, with_optimizer: bool
) -> Namespace:
    """Megatron-LM's arguments of the exported checkpoint."""
    distributed = options.distributed_optimizer
    if distributed is None:
        distributed = index.args.get("use_distributed_optimizer", False)
    return namespace_from_args(
        index.args,
        tensor=options.tensor_parallel_size,
        pipeline=1,
        virtual=None,
        params_dtype=_dtype(index, EMBEDDING),
        padded_vocab_size=rows,
        iteration=index.iteration,
        consumed_train_samples=int(index.run.get("consumed_train_samples", 0)),
        consumed_valid_samples=int(index.run.get("consumed_valid_samples", 0)),
        use_distributed_optimizer=distributed,
        transformer_impl="transformer_engine",
        ckpt_format=Format.TORCH_DIST.value,
        no_save_optim=not with_optimizer,
        no_save_rng=True,
    )


def _read_whole(
    folder: Path, index: Index, advance: Callable[[int], object], name: str, tensor: ModelTensor
) -> torch.Tensor:
    """The stored tensor `name` with the rows of `tensor`: padded with zeros, or truncated."""
    dtype = _dtype(index, name)
    flat = torch.zeros(tensor.size, dtype=dtype)
    # A reader of its own, which unmaps the file.
    with CheckpointReader(folder, index) as reader:
        reader.read_into([TensorRead(flat, name, [tensor.region])])
    advance(flat.numel() * dtype.itemsize)
    return flat.view(tensor.shape)
