"""--use-checkpoint-args: the model's flags from the checkpoint, before they are checked."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero.errors import UserError
from megatron.training.checkpoint import folder as folders
from megatron.training.checkpoint.index import DamagedCheckpoint, Index, read_index
from megatron.training.checkpoint.model_flags import (
    MODEL_FLAGS,
    TAKEN,
    Difference,
    Kind,
    Spelling,
    differences,
    spellings,
    typed_destinations,
)

# Without a checkpoint these have to be typed.
_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")


def is_weights_only(args: argparse.Namespace, name: str, index: Index) -> bool:
    """Whether a run takes the weights of the checkpoint `name` and begins at iteration 0."""
    return bool(args.finetune or name == folders.RELEASE or "iteration" not in index.run)


def adopt_checkpoint_args(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Take the model's flags from the checkpoint that the run will start from.

    Its files are checked later; here its index is read. Where there is none yet, nothing is taken.
    Raises UserError: its flags and the typed ones contradict each other, or none can be read.
    """
    unreadable, problems = None, []
    for load in filter(None, (args.load, args.pretrained_checkpoint)):
        for name in _candidates(args, Path(load)):
            folder = Path(load) / name
            try:
                index = read_index(folder)
            except DamagedCheckpoint as error:
                unreadable = load
                problems.append(f"{name}: {error}")
                continue
            weights_only = load != args.load or is_weights_only(args, name, index)
            adopt_model_args(
                args, index.args, folder=folder, weights_only=weights_only, parser=parser
            )
            return
        if unreadable is not None:
            raise UserError(
                f"--use-checkpoint-args: no checkpoint in {unreadable} can be read "
                f"({'; '.join(problems[:3])}); name another"
            )
    _begin_without(args, parser)


def _candidates(args: argparse.Namespace, load: Path) -> list[str]:
    if args.ckpt_step is not None:
        return [folders.folder_name(args.ckpt_step)]
    return folders.candidates(load)


def _begin_without(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """There is nothing to take yet: as in Megatron, the other flags say what the model is."""
    named = " and ".join(filter(None, (args.load, args.pretrained_checkpoint)))
    why = f"there is no checkpoint in {named} yet" if named else "it needs --load"
    missing = [spellings(parser)[n].option for n in _SIZES if getattr(args, n) is None]
    if missing:
        raise UserError(
            f"--use-checkpoint-args: {why} to take {', '.join(missing)} from; correct --load, or "
            "type them to start anew"
        )
    args.use_checkpoint_args = False
    args.ignored_flags.append(f"--use-checkpoint-args: {why}")


def adopt_model_args(
    args: argparse.Namespace,
    stored: Mapping[str, Any],
    *,
    folder: Path,
    weights_only: bool,
    parser: argparse.ArgumentParser,
) -> None:
    """Take every flag of the model that is not typed, and say so in `args.taken_flags`.

    A typed one that says something else is kept where it may be another, and refused elsewhere:
    UserError names all of those.
    """
    spelled = spellings(parser)
    typed = typed_destinations(spelled, args.typed_flags)
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
        typed |= {"position_embedding_type"}
    taken = [name for name in _takeable(args, stored, spelled) if name not in typed]
    changed = [name for name in taken if getattr(args, name) != stored[name]]
    for name in taken:
        setattr(args, name, stored[name])
    found = differences(stored, vars(args), spelled=spelled, typed=typed)
    refused = [d for d in found if not d.is_allowed(weights_only=weights_only)]
    _require_no_contradiction(refused + _rows(args, stored, spelled), folder)
    if stored.get("padded_vocab_size") is not None and "make_vocab_size_divisible_by" in typed:
        args.ignored_flags.append(
            "--make-vocab-size-divisible-by: --use-checkpoint-args takes the checkpoint's "
            f"{stored['padded_vocab_size']} rows"
        )
    words = [spelled[name].typed(stored[name]) or f"no {spelled[name].option}" for name in changed]
    args.taken_flags = [f"taken from {folder}: {' '.join(words) or 'nothing but defaults'}"]


def _takeable(
    args: argparse.Namespace, stored: Mapping[str, Any], spelled: Mapping[str, Spelling]
) -> Iterator[str]:
    """The destinations that the checkpoint has something to say about."""
    kind = stored.get("tokenizer_type")
    has_its_tokenizer = kind is not None and args.tokenizer_type in (None, kind)
    for name, flag in MODEL_FLAGS.items():
        if flag.kind not in TAKEN or name not in stored or name not in spelled:
            continue
        if has_its_tokenizer or flag.kind is not Kind.TOKENIZER:
            yield name


def _rows(
    args: argparse.Namespace, stored: Mapping[str, Any], spelled: Mapping[str, Spelling]
) -> list[Difference]:
    """Other rows of vocabulary ask for weights that are not there, or for a part of them."""
    name = "padded_vocab_size"
    there, here = stored.get(name), getattr(args, name)
    if there is None or there == here:
        return []
    return [Difference(Kind.ROWS, spelled[name], there, here, is_typed=True)]


def _require_no_contradiction(refused: Sequence[Difference], folder: Path) -> None:
    if not refused:
        return
    tunable = [d.spelling.option for d in refused if d.kind is Kind.TUNABLE]
    raise UserError(
        "the command line contradicts the checkpoint whose model --use-checkpoint-args takes, "
        f"{folder}: {', '.join(map(str, refused))}; leave out "
        f"{' '.join(d.spelling.option for d in refused)}"
        + (f"; a run with --finetune may have another {' '.join(tunable)}" if tunable else "")
    )
