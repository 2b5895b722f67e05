"""What a run takes from a checkpoint, what from its flags, and what it begins anew.

One pure function decides it for every combination of flags, with Megatron-LM's meaning of each. The
loader does what it returns, the log prints it and docs/checkpoints.md tabulates it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

FINETUNE = "--finetune"
NO_OPTIMIZER = "--no-load-optim"
NO_RANDOM = "--no-load-rng"
CHECKPOINT_ARGS = "--use-checkpoint-args"
CHECKPOINT_SCHEDULE = "--use-checkpoint-opt_param-scheduler"
OVERRIDE_SCHEDULE = "--override-opt_param-scheduler"


class Source(Enum):
    CHECKPOINT = "checkpoint"
    FLAGS = "flags"
    EQUAL = "both, compared"
    """From the flags, which must be equal to the checkpoint's."""
    ANEW = "anew"


@dataclass(frozen=True)
class ResumeFlags:
    """The flags that decide what is loaded."""

    finetune: bool = False
    no_load_optim: bool = False
    no_load_rng: bool = False
    use_checkpoint_args: bool = False
    use_checkpoint_opt_param_scheduler: bool = False
    override_opt_param_scheduler: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> ResumeFlags:
        return cls(**{field.name: bool(getattr(args, field.name)) for field in fields(cls)})

    def contradictions(self) -> Iterator[str]:
        """A sentence for each pair that has no meaning, whatever the checkpoint."""
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            yield (
                f"{OVERRIDE_SCHEDULE} and {CHECKPOINT_SCHEDULE} exclude each other; remove one of "
                "them"
            )
        if self.finetune and self.use_checkpoint_opt_param_scheduler:
            yield (
                f"{FINETUNE} begins a new run with a schedule of its own and {CHECKPOINT_SCHEDULE} "
                "continues the checkpoint's; remove one of them"
            )


@dataclass(frozen=True)
class Holdings:
    """What a checkpoint holds beside the weights and the flags of their run."""

    progress: bool = True
    """Iteration, consumed samples: False for weights alone, as conversions write them."""
    optimizer: bool = True
    random_states: bool = True
    schedule: bool = True

    @classmethod
    def of(cls, run: Mapping[str, Any], *, is_release: bool) -> Holdings:
        """Of the record `Index.run`."""
        holds = run.get("holds", {})
        return cls(
            progress=not is_release and "iteration" in run,
            optimizer=bool(holds.get("optimizer", False)),
            random_states=bool(holds.get("random states", False)),
            schedule=run.get("scheduler") is not None,
        )


@dataclass(frozen=True)
class Sources:
    """Where each part of a run's state comes from."""

    weights: Source
    model_flags: Source
    progress: Source
    """Iteration, consumed samples and with them the place in the data."""
    optimizer: Source
    """Moments, Adam's step count, float32 copies of the weights, loss scale."""
    schedule: Source
    """The parameters of learning rate and weight decay."""
    schedule_position: Source
    random_states: Source

    @property
    def is_new_run(self) -> bool:
        """Whether training begins at iteration 0."""
        return self.progress is Source.ANEW


def resume_sources(flags: ResumeFlags, holdings: Holdings | None) -> Sources:
    """Where the state comes from; `holdings` is None if there is no checkpoint."""

    def loaded(condition: bool) -> Source:
        return Source.CHECKPOINT if condition else Source.ANEW

    resumes = holdings is not None and holdings.progress and not flags.finetune
    optimizer = resumes and not flags.no_load_optim
    # As in Megatron-LM the schedule is loaded with the optimizer. Asked for by name, it is loaded
    # without it too.
    asked = resumes and flags.use_checkpoint_opt_param_scheduler
    if asked:
        schedule = Source.CHECKPOINT
    elif optimizer and not flags.override_opt_param_scheduler:
        schedule = Source.EQUAL
    else:
        schedule = Source.FLAGS
    return Sources(
        weights=loaded(holdings is not None),
        model_flags=Source.CHECKPOINT
        if holdings is not None and flags.use_checkpoint_args
        else Source.FLAGS,
        progress=loaded(resumes),
        optimizer=loaded(optimizer),
        schedule=schedule,
        schedule_position=loaded(optimizer or asked),
        random_states=loaded(resumes and not flags.no_load_rng),
    )


def missing_parts(sources: Sources, holdings: Holdings) -> Iterator[tuple[str, str]]:
    """(what the checkpoint lacks, the flag that does without it)."""
    if sources.optimizer is Source.CHECKPOINT and not holdings.optimizer:
        yield "optimizer", NO_OPTIMIZER
    if sources.random_states is Source.CHECKPOINT and not holdings.random_states:
        yield "random states", NO_RANDOM
    if sources.schedule_position is Source.CHECKPOINT and not holdings.schedule:
        yield "schedule", NO_OPTIMIZER


def describe(sources: Sources, *, schedule: str, random_states: str | None = None) -> str:
    """One line for the log.

    Args:
        schedule: the one that is used.
        random_states: why those of the checkpoint are not used, if they were to be loaded.
    """
    loaded: list[str] = []
    own: list[str] = []
    anew: list[str] = []
    states = Source.ANEW if random_states is not None else sources.random_states
    why = "" if random_states is None else f" ({random_states})"
    for source, name in (
        (sources.weights, "weights"),
        (sources.model_flags, "the model's flags"),
        (sources.progress, "iteration and place in the data"),
        (sources.optimizer, "optimizer state"),
        (sources.schedule, f"schedule ({schedule})"),
        (sources.schedule_position, "place in the schedule"),
        (states, f"random states{why}"),
    ):
        by_source = {Source.ANEW: anew, Source.FLAGS: own}
        by_source.get(source, loaded).append(name)
    groups = (("from the checkpoint", loaded), ("from this run's flags", own), ("anew", anew))
    return "; ".join(f"{where}: {', '.join(names)}" for where, names in groups if names)
