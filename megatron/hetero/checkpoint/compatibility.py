"""Checks that a checkpoint is of this run's model. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero.errors import UserError
from megatron.hetero.arguments.parser import build_parser
from megatron.hetero.checkpoint.model_flags import (
    Difference,
    Kind,
    Spelling,
    completed,
    differences,
    spellings,
    typed_destinations,
)
from megatron.hetero.checkpoint.resume import CHECKPOINT_SCHEDULE, OVERRIDE_SCHEDULE
from megatron.hetero.lr_schedule import LrSchedule


def require_same_model(
    stored: Mapping[str, Any],
    args: argparse.Namespace,
    *,
    folder: Path,
    weights_only: bool,
    loads_optimizer: bool,
) -> tuple[str, ...]:
    """Raise UserError for a checkpoint of another model, naming every flag that differs.

    Returns lines for the log about permitted differences.
    """
    spelled = spellings(build_parser())
    typed = typed_destinations(spelled, getattr(args, "typed_flags", ()))
    # A training run stores all flags that it has; a conversion may lack some.
    stored_flags = stored if weights_only else completed(stored, spelled)
    differing = differences(stored_flags, vars(args), spelled=spelled, typed=typed)
    refused = [d for d in differing if not d.is_allowed(weights_only=weights_only)]
    problems = [_another_model(refused, folder, weights_only=weights_only)] if refused else []
    problems += _tokenizer_problems(stored, args, folder=folder, weights_only=weights_only)
    if loads_optimizer:
        problems += _optimizer_problems(stored, args, folder=folder)
    if problems:
        raise UserError("; and ".join(problems))
    return (
        *_typed_values(differing),
        *(_assumed(stored, args, spelled, folder) if weights_only else ()),
        *_other_vocabulary(stored, args, folder=folder),
    )


def _another_model(refused: Sequence[Difference], folder: Path, *, weights_only: bool) -> str:
    """The error about flags that must be equal, with what to type."""
    there = [d.spelling.typed(d.there) for d in refused]
    without = [d.spelling.option for d, words in zip(refused, there, strict=True) if words is None]
    remedy = " and ".join(
        [
            *([f"start with {' '.join(filter(None, there))}"] if any(there) else []),
            *([f"leave out {' '.join(without)}"] if without else []),
        ]
    )
    sentence = (
        f"the checkpoint {folder} is of another model: {', '.join(map(str, refused))}; {remedy}, "
        "or add --use-checkpoint-args, which takes from it what is not typed, or name another "
        "--load"
    )
    free = [
        d.spelling.option
        for d in refused
        if d.kind is Kind.TRAINING or (d.kind is Kind.TUNABLE and weights_only)
    ]
    return sentence + (f"; to train with another {' '.join(free)}, type it" if free else "")


def _typed_values(differing: Sequence[Difference]) -> tuple[str, ...]:
    """One line about typed values that differ from the checkpoint's, if there are any."""
    values = [
        f"{d.spelling.option} is {d.spelling.word(d.here)}, in the checkpoint "
        f"{d.spelling.word(d.there)}"
        for d in differing
        if d.is_typed
    ]
    return (f"as typed, not as in the checkpoint: {'; '.join(values)}",) if values else ()


def _assumed(
    stored: Mapping[str, Any],
    args: argparse.Namespace,
    spelled: Mapping[str, Spelling],
    folder: Path,
) -> tuple[str, ...]:
    """One line about flags that are not at their defaults and that the checkpoint does not have."""
    own = vars(args)
    flags = [
        spelled[name].typed(own[name]) or spelled[name].option
        for name, default in completed({}, spelled).items()
        if name not in stored and own.get(name, default) != default
    ]
    if not flags:
        return ()
    return (f"the checkpoint {folder} does not say; as in this run: {' '.join(flags)}",)


def _other_vocabulary(
    stored: Mapping[str, Any], args: argparse.Namespace, *, folder: Path
) -> tuple[str, ...]:
    """Lines about another padding of the vocabulary, and about another tokenizer."""
    lines = []
    there, here = stored.get("padded_vocab_size"), getattr(args, "padded_vocab_size", None)
    if there is not None and here is not None and there != here:
        lines.append(
            f"the checkpoint {folder} has {there} rows of vocabulary and this run {here}; rows of "
            "padding take part in the softmax, so its losses are a little different"
        )
    if _is_other_digest(stored, args):
        lines.append(
            f"the checkpoint {folder} was trained with another tokenizer of the same size; its "
            "weights are taken for this run's"
        )
    return tuple(lines)


def _is_other_digest(stored: Mapping[str, Any], args: argparse.Namespace) -> bool:
    there, here = stored.get("tokenizer_digest"), getattr(args, "tokenizer_digest", None)
    return there is not None and here is not None and there != here


def _tokenizer_problems(
    stored: Mapping[str, Any], args: argparse.Namespace, *, folder: Path, weights_only: bool
) -> list[str]:
    there, here = stored.get("tokenizer_vocab_size"), args.tokenizer_vocab_size
    if there is not None and there != here:
        return [
            f"the checkpoint {folder} was trained with a tokenizer of {there} tokens and this "
            f"run's has {here}; name the same one with --tokenizer-type and --tokenizer-model"
        ]
    if _is_other_digest(stored, args) and not weights_only:
        return [
            f"the checkpoint {folder} was trained with another tokenizer of the same size; name "
            "the same one with --tokenizer-type and --tokenizer-model, or start anew from its "
            "weights with --finetune"
        ]
    return []


def _optimizer_problems(
    stored: Mapping[str, Any], args: argparse.Namespace, *, folder: Path
) -> list[str]:
    there = stored.get("optimizer")
    if there is None or there == args.optimizer:
        return []
    return [
        f"the checkpoint {folder} has the state of --optimizer {there} and this run uses "
        f"{args.optimizer}; use the same, or --no-load-optim to start without it"
    ]


def require_same_schedule(own: LrSchedule, stored: LrSchedule, *, folder: Path) -> None:
    """Raise UserError if the run's schedule is not the checkpoint's; a flag must choose one."""
    if differences := list(own.differences(stored)):
        raise UserError(
            f"the checkpoint {folder} has another schedule: {', '.join(differences)}; keep that of "
            f"the checkpoint, or say which holds: {OVERRIDE_SCHEDULE} for these flags, "
            f"{CHECKPOINT_SCHEDULE} for the checkpoint"
        )
