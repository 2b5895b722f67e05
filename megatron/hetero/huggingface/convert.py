"""Converts models from Hugging Face's format to checkpoints and back, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hetero.errors import UserError
from megatron.hetero.checkpoint import folder as checkpoint_folders
from megatron.hetero.checkpoint.conversion import (
    FILE_BYTES,
    Converted,
    byte_progress,
    missing_argument,
    new_folder,
    precision_args,
    require_empty,
    shards,
    write_converted,
)
from megatron.hetero.checkpoint.index import Index
from megatron.hetero.checkpoint.reader import CheckpointReader
from megatron.hetero.checkpoint.regions import Region
from megatron.hetero.checkpoint.safetensors_writer import WriteItem
from megatron.hetero.checkpoint.tensor_names import EMBEDDING
from megatron.hetero.huggingface import hub_folders
from megatron.hetero.huggingface.configuration import (
    args_from_config,
    config_from_args,
    untold_args,
)
from megatron.hetero.huggingface.export_tokenizer import TokenizerSource
from megatron.hetero.huggingface.families import BY_TYPE
from megatron.hetero.huggingface.mapping import ModelShape, Rule, rules
from megatron.hetero.huggingface.token_ids import tokens_without_row
from megatron.hetero.tokenizer.files import COMPANION_FOLDER
from megatron.hetero.tokenizer.vocabulary import padded_vocab_size

# The copy of a tied embedding that some releases store, and a buffer of old releases.
_IGNORED_TENSORS = ("lm_head.weight", "rotary_emb.inv_freq")


@dataclass(frozen=True)
class ConvertedModel(Converted):
    """The result of a conversion from or to Hugging Face's format."""

    has_tokenizer: bool = False
    dropped_flags: tuple[str, ...] = ()
    """Flags that config.json cannot express, with their values. Only training uses them."""


@dataclass(frozen=True)
class _ExportTask:
    """One of our tensors, to be split into Hugging Face's of the same dtype."""

    rule: Rule
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.rule.size * self.dtype.itemsize


def to_megatron(
    source: Path, target: Path, *, divisible_by: int | None = None, shard_bytes: int = FILE_BYTES
) -> ConvertedModel:
    """Write `target`/release from a Hugging Face folder; it trains with --load `target`.

    `divisible_by` pads the vocabulary with rows of zeros; without it the rows are the model's own.
    `shard_bytes` limits the size of a file of weights. Raises HeteroError.
    """
    model = hub_folders.ModelFolder(source)
    args = args_from_config(model.config, source=str(source / hub_folders.CONFIG))
    vocabulary = args["vocab_size"]
    if divisible_by is not None:
        args["make_vocab_size_divisible_by"] = divisible_by
        args["padded_vocab_size"] = padded_vocab_size(
            vocabulary, make_divisible_by=divisible_by, tensor_parallel_size=1
        )
    rows = args["padded_vocab_size"]
    model.read_headers()
    family = BY_TYPE[model.config["model_type"]]
    shape = ModelShape.from_args(args, family=family, vocabulary=vocabulary, rows=rows)
    further = _layers_of_further_tokens(model, shape)
    items = _import_items(model, shape, left_out=further)
    args |= precision_args(items[0].dtype)
    notes: tuple[str, ...] = ()
    if further:
        which = "it predicts" if len(further) == 1 else "they predict"
        notes = (f"{', '.join(further)}: left out, because {which} further tokens only",)
    if model.has_tokenizer:
        args |= {
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": f"{checkpoint_folders.RELEASE}/{COMPANION_FOLDER}",
        }
        note = tokens_without_row(source, rows)
        notes += () if note is None else (note,)

    def add_companions(folder: Path) -> None:
        (folder / COMPANION_FOLDER).mkdir()
        hub_folders.copy_companions(source, folder / COMPANION_FOLDER)

    folder = write_converted(
        target, items, args=args, file_bytes=shard_bytes, add_companions=add_companions
    )
    return ConvertedModel(
        folder=folder,
        parameters=_parameters(shape),
        rows=rows,
        source=str(source),
        notes=notes,
        has_tokenizer=model.has_tokenizer,
    )


def to_huggingface(
    source: Path,
    target: Path,
    *,
    iteration: int | None = None,
    vocabulary: int | None = None,
    tokenizer: Path | None = None,
    shard_bytes: int = FILE_BYTES,
) -> ConvertedModel:
    """Write a Hugging Face folder from the checkpoint of an iteration, by default the newest.

    A damaged checkpoint is refused; an older one is not taken instead. Raises HeteroError.

    Args:
        source: the folder of the checkpoints.
        target: must not exist, or be empty.
        iteration: of the checkpoint.
        vocabulary: how many rows of the embedding to keep, by default as many as there were tokens,
            or as Hugging Face's model had.
        tokenizer: a folder of Hugging Face's format or a SentencePiece model, by default the
            checkpoint's.
        shard_bytes: the largest size of a file of weights.
    """
    require_empty(target)
    with CheckpointReader.open(source, iteration=iteration, older=False) as reader:
        folder, index, title, notes = reader.folder, reader.index, reader.title, reader.notes
    rows = index.tensors[EMBEDDING].shape[0] if EMBEDDING in index.tensors else 0
    kept_rows = _kept_rows(index.args, rows, vocabulary, folder)
    own = TokenizerSource.of_checkpoint(index.args, folder)
    preferred = own.config().get("model_type")
    config, shape = _config_and_shape(index, folder, kept_rows, rows, preferred)
    tasks = _export_tasks(index, shape, folder)
    chosen = own if tokenizer is None else TokenizerSource.of_path(tokenizer)
    with (
        new_folder(target) as temporary,
        byte_progress(sum(task.bytes for task in tasks)) as advance,
    ):
        files = list(shards(tasks, shard_bytes))
        _write_weights(folder, index, files, temporary, advance)
        exported = chosen.write(temporary)
        config |= exported.special
        (temporary / hub_folders.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    if exported.problem is not None:
        notes = (*notes, f"no tokenizer was written: {exported.problem}")
    if exported.note is not None:
        notes = (*notes, exported.note)
    return ConvertedModel(
        folder=target,
        parameters=_parameters(shape),
        rows=kept_rows,
        source=title,
        notes=notes,
        has_tokenizer=exported.problem is None,
        dropped_flags=untold_args(index.args, BY_TYPE[config["model_type"]]),
    )


def _parameters(shape: ModelShape) -> int:
    """The number of parameters of Hugging Face's model, without padding."""
    return sum(part.size for rule in rules(shape) for part in rule.parts)


def _layers_of_further_tokens(model: hub_folders.ModelFolder, shape: ModelShape) -> tuple[str, ...]:
    """The names of layers after the last, which the model has for predicting further tokens."""
    key = BY_TYPE[model.config["model_type"]].further_tokens
    count = 0 if key is None else model.config.get(key) or 0
    after = (f"model.layers.{shape.layers + number}" for number in range(count))
    return tuple(layer for layer in after if any(n.startswith(f"{layer}.") for n in model.names()))


def _import_items(
    model: hub_folders.ModelFolder, shape: ModelShape, *, left_out: Sequence[str]
) -> list[WriteItem]:
    """Our tensors, to be read from the model's. Raises UserError if they do not match.

    `left_out`: layers of which no tensor is read.
    """
    ignored = tuple(f"{layer}." for layer in left_out)
    if shape.tied:
        _require_tied(model)
    items, used = [], set()
    for rule in rules(shape):
        dtypes = [model.require_tensor(part) for part in rule.parts]
        if len(set(dtypes)) > 1:
            raise UserError(
                f"{', '.join(part.name for part in rule.parts)} in {model.folder} are of different "
                "dtypes; save the model in one"
            )
        source = partial(_read_joined, model, rule)
        regions = (Region.whole(rule.shape),)
        items.append(WriteItem(rule.name, rule.shape, rule.dtype or dtypes[0], regions, source))
        used |= {part.name for part in rule.parts}
    for name in model.names():
        is_ignored = name.endswith(_IGNORED_TENSORS) or name.startswith(ignored)
        if name not in used and not is_ignored:
            raise UserError(
                f"{model.folder} holds the tensor {name}, which its {hub_folders.CONFIG} does not "
                "account for; take the files of one model"
            )
    return items


def _read_joined(model: hub_folders.ModelFolder, rule: Rule) -> torch.Tensor:
    return rule.join([model.tensor(part.name) for part in rule.parts])


def _require_tied(model: hub_folders.ModelFolder) -> None:
    """Refuse an output layer that is not the embedding, though the configuration calls it tied."""
    embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    if {embedding, output} <= set(model.names()) and not torch.equal(
        model.tensor(embedding), model.tensor(output)
    ):
        raise UserError(
            f"{model.folder} has another {output} than {embedding}, and its "
            f"{hub_folders.CONFIG} says tie_word_embeddings; set that to false if the model was "
            "trained with both"
        )


def _export_tasks(index: Index, shape: ModelShape, folder: Path) -> list[_ExportTask]:
    """Our tensors. Raises UserError unless their shapes are those that the arguments give."""
    tasks = []
    for rule in rules(shape):
        stored = index.tensors.get(rule.name)
        if stored is None or stored.shape != rule.shape:
            actual = "nothing" if stored is None else f"the shape {list(stored.shape)}"
            raise UserError(
                f"the checkpoint {folder} has {actual} for {rule.name}, where its arguments say "
                f"{list(rule.shape)}; save it again with this version"
            )
        tasks.append(_ExportTask(rule, getattr(torch, stored.dtype)))
    return tasks


def _config_and_shape(
    index: Index, folder: Path, vocabulary: int, rows: int, preferred: str | None
) -> tuple[dict[str, Any], ModelShape]:
    """config.json and the shapes of a checkpoint's model."""
    try:
        dtype = index.tensors[EMBEDDING].dtype
        config = config_from_args(
            index.args,
            vocabulary=vocabulary,
            dtype=dtype,
            source=f"the checkpoint {folder}",
            preferred=preferred,
        )
        family = BY_TYPE[config["model_type"]]
        return config, ModelShape.from_args(
            index.args, family=family, vocabulary=vocabulary, rows=rows
        )
    except KeyError as error:
        raise missing_argument(folder, error) from error


def _kept_rows(args: Mapping[str, Any], rows: int, requested: int | None, folder: Path) -> int:
    """The number of the embedding's rows to export. Raises UserError if there are fewer."""
    if requested is not None:
        if requested > rows:
            raise UserError(
                f"the checkpoint {folder} has {rows} rows of vocabulary, not {requested}"
            )
        return requested
    # --vocab-size may not count the end-of-document token, Qwen2's models have more rows than
    # tokens, and an added token may have no row.
    kept = max(args.get("tokenizer_vocab_size") or 0, args.get("vocab_size") or 0)
    return min(kept or rows, rows)


def _write_weights(
    source: Path,
    index: Index,
    files: Sequence[Sequence[_ExportTask]],
    target: Path,
    advance: Callable[[int], object],
) -> None:
    """Write the shards, and their index if there are several."""

    def split_tensors(tasks: Sequence[_ExportTask]) -> Iterator[tuple[str, torch.Tensor]]:
        for group in shards(tasks, hub_folders.MAPPED_BYTES):
            # Opened anew for each group, because that unmaps the files.
            with CheckpointReader(source, index) as reader:
                for task in group:
                    parts = task.rule.split(reader.tensor(task.rule.name))
                    for part, tensor in zip(task.rule.parts, parts, strict=True):
                        yield part.name, tensor
                    advance(task.bytes)

    weight_map: dict[str, str] = {}
    total = 0
    for number, tasks in enumerate(files):
        name = hub_folders.shard_name(number, len(files))
        parts = [(part, task.dtype) for task in tasks for part in task.rule.parts]
        hub_folders.write_shard(target / name, parts, split_tensors(tasks))
        weight_map |= {part.name: name for part, _ in parts}
        total += sum(part.size * dtype.itemsize for part, dtype in parts)
    if len(files) > 1:
        hub_folders.write_index(target, weight_map, total_bytes=total)
