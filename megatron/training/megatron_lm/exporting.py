"""From a checkpoint of ours to one of Megatron-LM's, in either format, a tensor at a time.

The result is written under a temporary name and renamed once it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hetero.errors import UserError
from megatron.training.checkpoint import folder as folders
from megatron.training.checkpoint.conversion import (
    CONVERTING,
    progress,
    require_empty,
    temporary_folder,
)
from megatron.training.checkpoint.index import DamagedCheckpoint, Index
from megatron.training.checkpoint.reader import CheckpointReader
from megatron.training.checkpoint.regions import Region
from megatron.training.checkpoint.tensor_names import EMBEDDING, VOCABULARY
from megatron.training.megatron_lm import export_torch_dist, legacy_writer
from megatron.training.megatron_lm.arguments import to_theirs
from megatron.training.megatron_lm.folders import Format
from megatron.training.megatron_lm.importing import Converted
from megatron.training.megatron_lm.legacy_writer import RankLayout
from megatron.training.megatron_lm.tensors import ModelTensor, model_tensors


@dataclass(frozen=True)
class ExportOptions:
    """How Megatron-LM is to find a checkpoint."""

    format: Format
    layout: RankLayout = field(default_factory=RankLayout)
    weights_only: bool = False
    distributed_optimizer: bool | None = None
    """Whose state is written: the run's own kind where it is None."""
    local_names: bool = False
    """In the format `torch`: names of the local layers instead of Transformer Engine's."""
    divisible_by: int | None = None


def export_checkpoint(
    source: Path, target: Path, options: ExportOptions, *, iteration: int | None = None
) -> Converted:
    """Write `target`, for Megatron-LM's --load, from a checkpoint of ours.

    With the optimizer's state it is of the same iteration, without it is a release. A newest one
    that is damaged is refused, as for Hugging Face. Raises HeteroError.
    """
    require_empty(target)
    with CheckpointReader.open(source, iteration=iteration, older=False) as opened:
        folder, index, title, notes = opened.folder, opened.index, opened.title, opened.notes
    tensors, rows = _stored_tensors(index, folder, options)
    optimizer = (
        options.format is Format.TORCH_DIST
        and not options.weights_only
        and bool(index.run.get("holds", {}).get("optimizer", False))
    )
    if optimizer and index.args.get("optimizer") != "adam":
        raise UserError(
            f"{folder} holds the state of --optimizer {index.args.get('optimizer')}; only Adam's "
            "is converted, so export it with --weights-only"
        )
    name = folders.folder_name(index.iteration) if optimizer else folders.RELEASE
    theirs = _their_args(index, options, rows=rows, optimizer=optimizer)
    if options.format is Format.TORCH:
        options.layout.require_fit(tensors, index.args["num_layers"])
    weights = {tensor.name for tensor in tensors}
    total = sum(
        stored.size * getattr(torch, stored.dtype).itemsize
        for name, stored in index.tensors.items()
        if name in weights or (optimizer and name.startswith("optimizer."))
    )
    with (
        temporary_folder(target.with_name(target.name + CONVERTING)) as temporary,
        progress(total) as advance,
    ):
        (temporary / name).mkdir()
        values = _Values(folder, index, advance)
        if options.format is Format.TORCH_DIST:
            export_torch_dist.export(
                temporary / name,
                index,
                tensors,
                read=values.whole,
                args=theirs,
                optimizer=optimizer,
            )
        else:
            legacy_writer.write(
                temporary / name,
                tensors,
                layers=index.args["num_layers"],
                layout=options.layout,
                read=values.regions,
                args=theirs,
                fused_norms=not options.local_names,
            )
        folders.sync_folder(temporary / name)
        folders.write_tracker(temporary, str(index.iteration) if optimizer else folders.RELEASE)
        # An empty folder may be there; a rename replaces it.
        temporary.replace(target)
    parameters = sum(tensor.size for tensor in tensors)
    return Converted(
        target / name,
        parameters,
        rows,
        index.iteration if optimizer else None,
        source=title,
        notes=notes,
    )


def _stored_tensors(
    index: Index, folder: Path, options: ExportOptions
) -> tuple[list[ModelTensor], int]:
    """The model's tensors with the rows that they are to have, and those rows."""
    if EMBEDDING not in index.tensors:
        raise DamagedCheckpoint(f"{folder} holds no {EMBEDDING}")
    stored = index.tensors[EMBEDDING].shape[0]
    rows = stored
    args = index.args
    if options.divisible_by is not None:
        tokens = args.get("tokenizer_vocab_size") or args.get("vocab_size") or stored
        multiple = options.divisible_by * options.layout.tensor
        rows = -(-int(tokens) // multiple) * multiple
    try:
        tensors = model_tensors(args, rows=stored)
    except KeyError as error:
        raise UserError(
            f"the checkpoint {folder} does not say {error.args[0]}, which decides its model's "
            "shape; save it again with this version"
        ) from error
    for tensor in tensors:
        found = index.tensors.get(tensor.name)
        if found is None or found.shape != tensor.shape:
            raise DamagedCheckpoint(f"{folder} has no {tensor.name} of {list(tensor.shape)}")
    padded = [
        replace(t, shape=(rows, *t.shape[1:])) if t.name in VOCABULARY else t for t in tensors
    ]
    return padded, rows


def _their_args(index: Index, options: ExportOptions, *, rows: int, optimizer: bool) -> Any:
    layout, layers = options.layout, index.args["num_layers"]
    chunks = layout.chunks(layers)
    args = dict(index.args)
    distributed = args.get("use_distributed_optimizer", False)
    if options.distributed_optimizer is not None:
        distributed = options.distributed_optimizer
    return to_theirs(
        args,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        virtual=chunks if chunks > 1 else None,
        params_dtype=getattr(torch, index.tensors[EMBEDDING].dtype),
        padded_vocab_size=rows,
        iteration=index.iteration,
        consumed_train_samples=int(index.run.get("consumed_train_samples", 0)),
        consumed_valid_samples=int(index.run.get("consumed_valid_samples", 0)),
        use_distributed_optimizer=distributed,
        transformer_impl="local" if options.local_names else "transformer_engine",
        ckpt_format=options.format.value,
        no_save_optim=not optimizer,
        no_save_rng=True,
    )


class _Values:
    """Reads a checkpoint of ours, each time with a reader of its own, which unmaps the file."""

    def __init__(self, folder: Path, index: Index, advance: Callable[[int], object]) -> None:
        self._folder, self._index, self._advance = folder, index, advance

    def whole(self, name: str, tensor: ModelTensor) -> torch.Tensor:
        """A stored tensor with as many rows as `tensor` has: padding of zeros, or less of it."""
        return self._read(name, [tensor.region]).view(tensor.shape)

    def regions(self, tensor: ModelTensor, wanted: Sequence[Region]) -> torch.Tensor:
        """Boxes of a weight, one after the other, flat."""
        return self._read(tensor.name, wanted)

    def _read(self, name: str, wanted: Sequence[Region]) -> torch.Tensor:
        dtype = getattr(torch, self._index.tensors[name].dtype)
        flat = torch.zeros(sum(region.size for region in wanted), dtype=dtype)
        with CheckpointReader(self._folder, self._index) as reader:
            reader.read_into(flat, name, wanted)
        self._advance(flat.numel() * dtype.itemsize)
        return flat
