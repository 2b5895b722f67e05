"""Whole models between the two formats, streamed: a tensor of ours is in memory at a time.

The result is written under a temporary name and renamed once it is whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hetero.errors import UserError
from megatron.training.checkpoint import folder as checkpoint_folders
from megatron.training.checkpoint.conversion import (
    CONVERTING,
    no_new_parents,
    progress,
    require_empty,
    shards,
    temporary_folder,
)
from megatron.training.checkpoint.index import Index
from megatron.training.checkpoint.lock import LOCK_FILE
from megatron.training.checkpoint.reader import CheckpointReader
from megatron.training.checkpoint.safetensors_writer import WriteItem
from megatron.training.checkpoint.tensor_names import EMBEDDING
from megatron.training.checkpoint.writer import write_release
from megatron.training.huggingface import hub_folders
from megatron.training.huggingface.configuration import args_from_config, config_from_args
from megatron.training.huggingface.mapping import ModelShape, Rule, rules

SHARD_BYTES = 5_000_000_000
"""Hugging Face's own limit for a file."""
COMPANION_FOLDER = "huggingface"
"""Inside a converted checkpoint: the tokenizer and the settings that came with the weights."""
# In the tied models of some releases, and constants of old ones.
_SUPERFLUOUS = ("lm_head.weight", "rotary_emb.inv_freq")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Converted:
    """What a conversion wrote."""

    folder: Path
    parameters: int
    bytes: int
    rows: int
    """Of the embedding, as written."""
    has_tokenizer: bool
    source: str
    """What was read."""
    notes: tuple[str, ...] = ()
    """Why it is not simply the newest."""
    unsaid: tuple[str, ...] = ()
    """Flags with their values that the other format has no word for; only training uses them."""


@dataclass(frozen=True)
class _Task:
    """One of our tensors on its way, in the one dtype of its parts."""

    rule: Rule
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.rule.size * self.dtype.itemsize


def to_megatron(
    source: Path, target: Path, *, divisible_by: int | None = None, shard_bytes: int = SHARD_BYTES
) -> Converted:
    """Write `target`/release from a Hugging Face folder; it trains with --load `target`.

    `divisible_by` pads the vocabulary with rows of zeros; without it the rows are the model's own.
    Raises UserError for input that cannot be converted.
    """
    model = hub_folders.ModelFolder(source)
    args = args_from_config(model.config, source=str(source / hub_folders.CONFIG))
    vocabulary = args["vocab_size"]
    if divisible_by is not None:
        args["make_vocab_size_divisible_by"] = divisible_by
        args["padded_vocab_size"] = -(-vocabulary // divisible_by) * divisible_by
    rows = args["padded_vocab_size"]
    model.open()
    tasks = _import_tasks(model, ModelShape.from_args(args, vocabulary=vocabulary, rows=rows))
    args |= _precision(tasks[0].dtype)
    unfinished = checkpoint_folders.RELEASE + checkpoint_folders.SAVING
    # Whose lock it is, the writer finds out.
    require_empty(target, besides=(unfinished, LOCK_FILE))
    final = target / checkpoint_folders.RELEASE
    if model.has_tokenizer:
        args |= {
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": str((final / COMPANION_FOLDER).absolute()),
        }

    def add_companions(folder: Path) -> None:
        (folder / COMPANION_FOLDER).mkdir()
        kept = (hub_folders.CONFIG, *hub_folders.COMPANIONS)
        hub_folders.copy_companions(source, folder / COMPANION_FOLDER, names=kept)

    with no_new_parents(final), progress(sum(task.bytes for task in tasks)) as advance:
        files = (
            [_piece(model, task, advance) for task in shard] for shard in shards(tasks, shard_bytes)
        )
        write_release(target, files, args=args, add_companions=add_companions)
    return _converted(
        tasks, folder=final, rows=rows, has_tokenizer=model.has_tokenizer, source=str(source)
    )


def to_huggingface(
    source: Path,
    target: Path,
    *,
    iteration: int | None = None,
    vocabulary: int | None = None,
    companions: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Converted:
    """Write a Hugging Face folder from the checkpoint of an iteration, the newest if left out.

    A newest one that is damaged is refused: nobody would see that an export is an older one's.

    `vocabulary` rows of the embedding are kept; left out, as many as there were tokens. The
    tokenizer comes from `companions`, or from where the checkpoint says. Raises HeteroError.
    """
    require_empty(target)
    with CheckpointReader.open(source, iteration=iteration, older=False) as reader:
        folder, index, title, notes = reader.folder, reader.index, reader.title, reader.notes
    rows = index.tensors[EMBEDDING].shape[0] if EMBEDDING in index.tensors else 0
    kept = _vocabulary(index.args, rows, vocabulary, folder)
    config, shape = _describe(index, folder, kept, rows)
    tasks = _export_tasks(index, shape, folder)
    beside = _companions(index.args, folder, companions)
    if beside is not None and (beside / hub_folders.CONFIG).is_file():
        theirs = hub_folders.read_json(beside / hub_folders.CONFIG)
        config |= {name: theirs[name] for name in _TOKEN_IDS if name in theirs}
    with (
        temporary_folder(target.with_name(target.name + CONVERTING)) as temporary,
        progress(sum(task.bytes for task in tasks)) as advance,
    ):
        _write_model(folder, index, tasks, temporary, advance, shard_bytes=shard_bytes)
        if beside is not None:
            hub_folders.copy_companions(beside, temporary)
        (temporary / hub_folders.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        checkpoint_folders.sync_folder(temporary)
        temporary.replace(target)
    has_tokenizer = hub_folders.has_tokenizer(target)
    dropout = index.args.get("hidden_dropout", 0.0)
    done = _converted(
        tasks, folder=target, rows=kept, has_tokenizer=has_tokenizer, source=title, notes=notes
    )
    return replace(
        done,
        unsaid=(f"--hidden-dropout {dropout}",) if dropout else (),
    )


def _import_tasks(model: hub_folders.ModelFolder, shape: ModelShape) -> list[_Task]:
    if shape.tied:
        _require_tied(model)
    tasks, wanted = [], set()
    for rule in rules(shape):
        dtypes = [model.require(part) for part in rule.parts]
        if len(set(dtypes)) > 1:
            raise UserError(
                f"{', '.join(part.name for part in rule.parts)} in {model.folder} are of different "
                "dtypes; save the model in one"
            )
        tasks.append(_Task(rule, dtypes[0]))
        wanted |= {part.name for part in rule.parts}
    for name in model.names():
        if name not in wanted and not name.endswith(_SUPERFLUOUS):
            raise UserError(
                f"{model.folder} holds the tensor {name}, which its {hub_folders.CONFIG} does not "
                "account for; take the files of one model"
            )
    return tasks


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


def _export_tasks(index: Index, shape: ModelShape, folder: Path) -> list[_Task]:
    tasks = []
    for rule in rules(shape):
        stored = index.tensors.get(rule.name)
        if stored is None or stored.shape != rule.shape:
            found = "nothing" if stored is None else f"the shape {list(stored.shape)}"
            raise UserError(
                f"the checkpoint {folder} has {found} for {rule.name}, where its arguments say "
                f"{list(rule.shape)}; only a LLaMA or Qwen2 can be converted"
            )
        tasks.append(_Task(rule, getattr(torch, stored.dtype)))
    return tasks


def _describe(
    index: Index, folder: Path, vocabulary: int, rows: int
) -> tuple[dict[str, Any], ModelShape]:
    """config.json and the shapes of a checkpoint's model."""
    try:
        dtype = index.tensors[EMBEDDING].dtype
        config = config_from_args(
            index.args, vocabulary=vocabulary, dtype=dtype, source=f"the checkpoint {folder}"
        )
        return config, ModelShape.from_args(index.args, vocabulary=vocabulary, rows=rows)
    except KeyError as error:
        raise UserError(
            f"the checkpoint {folder} does not say {error.args[0]}, which decides its model's "
            "shape; save it again with this version"
        ) from error


def _vocabulary(args: Mapping[str, Any], rows: int, asked: int | None, folder: Path) -> int:
    # The tokenizer's own count comes first: --vocab-size may leave out the end of a document.
    kept = asked or args.get("tokenizer_vocab_size") or args.get("vocab_size") or rows
    if kept > rows:
        raise UserError(f"the checkpoint {folder} has {rows} rows of vocabulary, not {kept}")
    return int(kept)


def _companions(args: Mapping[str, Any], folder: Path, given: Path | None) -> Path | None:
    if given is not None:
        if not hub_folders.has_tokenizer(given):
            raise UserError(f"--tokenizer {given} holds no tokenizer of Hugging Face's format")
        return given
    named = args.get("tokenizer_model")
    places = [folder / COMPANION_FOLDER, *([Path(named)] if named else [])]
    return next((place for place in places if place.is_dir()), None)


def _precision(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": str(dtype).removeprefix("torch."),
    }


def _piece(
    model: hub_folders.ModelFolder, task: _Task, advance: Callable[[int], object]
) -> WriteItem:
    def read() -> torch.Tensor:
        advance(task.bytes)
        return task.rule.join([model.tensor(part.name) for part in task.rule.parts])

    announced = WriteItem.whole(task.rule.name, torch.empty(task.rule.shape, device="meta"))
    return WriteItem(announced.name, announced.shape, task.dtype, announced.regions, read)


def _write_model(
    source: Path,
    index: Index,
    tasks: Sequence[_Task],
    folder: Path,
    advance: Callable[[int], object],
    *,
    shard_bytes: int,
) -> None:
    files = list(shards(tasks, shard_bytes))
    weight_map: dict[str, str] = {}
    total = 0

    def tensors(shard: Sequence[_Task]) -> Iterator[tuple[str, torch.Tensor]]:
        for task in shard:
            # A reader of its own, which unmaps the file again.
            with CheckpointReader(source, index) as reader:
                whole = reader.tensor(task.rule.name)
            for part, tensor in zip(task.rule.parts, task.rule.split(whole), strict=True):
                yield part.name, tensor
            advance(task.bytes)

    for number, shard in enumerate(files):
        name = hub_folders.shard_name(number, len(files))
        parts = [(part, task.dtype) for task in shard for part in task.rule.parts]
        hub_folders.write_shard(folder / name, parts, tensors(shard))
        weight_map |= {part.name: name for part, _ in parts}
        total += sum(part.size * dtype.itemsize for part, dtype in parts)
    if len(files) > 1:
        hub_folders.write_index(folder, weight_map, total_bytes=total)


def _converted(
    tasks: Sequence[_Task],
    *,
    folder: Path,
    rows: int,
    has_tokenizer: bool,
    source: str,
    notes: tuple[str, ...] = (),
) -> Converted:
    return Converted(
        folder=folder,
        parameters=sum(part.size for task in tasks for part in task.rule.parts),
        bytes=sum(task.bytes for task in tasks),
        rows=rows,
        has_tokenizer=has_tokenizer,
        source=source,
        notes=notes,
    )
