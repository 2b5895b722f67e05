"""Converts a checkpoint of ours to one of Megatron-LM's, in either format."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
from megatron.hetero.checkpoint.reader import CheckpointReader
from megatron.hetero.checkpoint.regions import Region
from megatron.hetero.checkpoint.tensor_names import EMBEDDING, VOCABULARY
from megatron.hetero.megatron_lm.arguments import namespace_from_args, require_expressible
from megatron.hetero.megatron_lm.export_torch_dist import export_torch_dist
from megatron.hetero.megatron_lm.folders import Format
from megatron.hetero.megatron_lm.legacy_writer import RankLayout, write_legacy
from megatron.hetero.megatron_lm.tensors import ModelTensor, model_tensors
from megatron.hetero.tokenizer.vocabulary import padded_vocab_size


@dataclass(frozen=True)
class ExportOptions:
    """Format, layout and contents of the exported checkpoint."""

    format: Format
    layout: RankLayout = field(default_factory=RankLayout)
    """Of the format `torch`, which no other layout can load."""
    weights_only: bool = False
    distributed_optimizer: bool | None = None
    """Whether to write the distributed optimizer's state; None: if the run used it."""
    local_names: bool = False
    """In the format `torch`: names of local layers instead of Transformer Engine's."""
    divisible_by: int | None = None
    """--make-vocab-size-divisible-by; None keeps the embedding's rows."""


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
    if options.format is Format.TORCH:
        options.layout.require_divisible(tensors, index.args["num_layers"])
    rows = tensors[0].shape[0]
    namespace = _namespace(index, options, rows=rows, with_optimizer=with_optimizer)
    name = folders.folder_name(index.iteration) if with_optimizer else folders.RELEASE
    with (
        new_folder(target) as temporary,
        byte_progress(_stored_bytes(index, tensors, with_optimizer)) as advance,
    ):
        (temporary / name).mkdir()
        reader = _TensorReader(folder, index, advance)
        if options.format is Format.TORCH_DIST:
            export_torch_dist(
                temporary / name,
                index,
                tensors,
                read=reader.read_whole,
                args=namespace,
                with_optimizer=with_optimizer,
            )
        else:
            write_legacy(
                temporary / name,
                tensors,
                num_layers=index.args["num_layers"],
                layout=options.layout,
                read=reader.read_regions,
                args=namespace,
                fused_norms=not options.local_names,
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
    is_exported = (
        options.format is Format.TORCH_DIST
        and not options.weights_only
        and bool(index.run.get("holds", {}).get("optimizer", False))
    )
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
            tensor_parallel_size=options.layout.tensor,
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
    layout = options.layout
    chunks = layout.chunks_per_stage(index.args["num_layers"])
    distributed = options.distributed_optimizer
    if distributed is None:
        distributed = index.args.get("use_distributed_optimizer", False)
    return namespace_from_args(
        index.args,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        virtual=chunks if chunks > 1 else None,
        params_dtype=_dtype(index, EMBEDDING),
        padded_vocab_size=rows,
        iteration=index.iteration,
        consumed_train_samples=int(index.run.get("consumed_train_samples", 0)),
        consumed_valid_samples=int(index.run.get("consumed_valid_samples", 0)),
        use_distributed_optimizer=distributed,
        transformer_impl="local" if options.local_names else "transformer_engine",
        ckpt_format=options.format.value,
        no_save_optim=not with_optimizer,
        no_save_rng=True,
    )


class _TensorReader:
    """Reads tensors of our checkpoint, each with a reader of its own, which unmaps the file."""

    def __init__(self, folder: Path, index: Index, advance: Callable[[int], object]) -> None:
        self._folder, self._index, self._advance = folder, index, advance

    def read_whole(self, name: str, tensor: ModelTensor) -> torch.Tensor:
        """The stored tensor `name` with the rows of `tensor`: padded with zeros, or truncated."""
        return self._read(name, [tensor.region]).view(tensor.shape)

    def read_regions(self, tensor: ModelTensor, regions: Sequence[Region]) -> torch.Tensor:
        """The elements of a weight's regions, one region after the other, flat."""
        return self._read(tensor.name, regions)

    def _read(self, name: str, regions: Sequence[Region]) -> torch.Tensor:
        dtype = _dtype(self._index, name)
        flat = torch.zeros(sum(region.size for region in regions), dtype=dtype)
        with CheckpointReader(self._folder, self._index) as reader:
            reader.read_into(flat, name, regions)
        self._advance(flat.numel() * dtype.itemsize)
        return flat
