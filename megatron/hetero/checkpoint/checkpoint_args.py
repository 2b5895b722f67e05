"""--use-checkpoint-args: takes the model's flags from the checkpoint, before flags are checked."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero.errors import UserError
from megatron.hetero.checkpoint import folder as folders
from megatron.hetero.checkpoint.index import DamagedCheckpoint, Index, read_index
from megatron.hetero.checkpoint.model_flags import (
    MODEL_FLAGS,
    TAKEN,
    Difference,
    Kind,
    Spelling,
    differences,
    spellings,
    typed_destinations,
)
from megatron.hetero.checkpoint.resume import Holdings, ResumeFlags, resume_sources
from megatron.hetero.tokenizer.files import own_tokenizer

# Without a checkpoint these have to be typed.
_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")


def holdings_of(name: str, index: Index) -> Holdings:
    """What the checkpoint `name` of a folder holds."""
    return Holdings.of(index.run, is_release=name == folders.RELEASE)


def load_args_from_checkpoint(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Set the model's flags from the checkpoint that the run will load; no-op if there is none yet.

    Only the index is read; files are verified later. Raises UserError if no checkpoint is readable
    or if typed flags contradict it.
    """
    unreadable, problems = None, []
    for load in filter(None, (args.load, args.pretrained_checkpoint)):
        for name in candidates(args, Path(load)):
            folder = Path(load) / name
            try:
                index = read_index(folder)
            except DamagedCheckpoint as error:
                unreadable = load
                problems.append(f"{name}: {error}")
                continue
            sources = resume_sources(ResumeFlags.of(args), holdings_of(name, index))
            weights_only = load != args.load or sources.is_new_run
            apply_checkpoint_args(
                args, index.args, folder=folder, weights_only=weights_only, parser=parser
            )
            return
        if unreadable is not None:
            raise UserError(
                f"--use-checkpoint-args: no checkpoint in {unreadable} can be read "
                f"({'; '.join(problems[:3])}); name another"
            )
    _require_typed_model(args, parser)


def candidates(args: argparse.Namespace, load: Path) -> list[str]:
    """The names of the checkpoints in a folder that may be loaded, the newest first."""
    found = folders.candidates(load)
    if args.ckpt_step is None:
        return found
    # As in Megatron-LM, --ckpt-step is of --pretrained-checkpoint while --load holds none.
    is_fallback_used = args.pretrained_checkpoint is not None and not found
    if is_fallback_used and str(load) != str(Path(args.pretrained_checkpoint)):
        return []
    return [folders.folder_name(args.ckpt_step)]


def _require_typed_model(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Without a checkpoint the typed flags define the model, as in Megatron-LM."""
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


def apply_checkpoint_args(
    args: argparse.Namespace,
    stored: Mapping[str, Any],
    *,
    folder: Path,
    weights_only: bool,
    parser: argparse.ArgumentParser,
) -> None:
    """Set every model flag that was not typed, and list them in `args.taken_flags`.

    Those of the tokenizer name the checkpoint's own copy.

    A typed flag that differs is kept if it may differ; otherwise UserError names it.
    """
    stored = {**stored, **own_tokenizer(stored, folder)}
    spelled = spellings(parser)
    typed = typed_destinations(spelled, args.typed_flags)
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
        typed |= {"position_embedding_type"}
    taken = [name for name in _takeable(args, stored, spelled) if name not in typed]
    changed = [name for name in taken if getattr(args, name) != stored[name]]
    for name in taken:
        setattr(args, name, stored[name])
    differing = differences(stored, vars(args), spelled=spelled, typed=typed)
    refused = [d for d in differing if not d.is_allowed(weights_only=weights_only)]
    _require_no_contradiction(refused + _other_rows(args, stored, spelled), folder)
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
    """The destinations to take from the checkpoint."""
    kind = stored.get("tokenizer_type")
    has_its_tokenizer = kind is not None and args.tokenizer_type in (None, kind)
    for name, flag in MODEL_FLAGS.items():
        if flag.kind not in TAKEN or name not in stored or name not in spelled:
            continue
        if has_its_tokenizer or flag.kind is not Kind.TOKENIZER:
            yield name


def _other_rows(
    args: argparse.Namespace, stored: Mapping[str, Any], spelled: Mapping[str, Spelling]
) -> list[Difference]:
    """A --padded-vocab-size that differs from the checkpoint's."""
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
