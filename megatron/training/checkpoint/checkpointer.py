"""A run's checkpoints as its training loop sees them: resume once, save when due, finish."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from hetero.errors import HeteroError
from megatron.training.checkpoint.compatibility import require_same_schedule
from megatron.training.checkpoint.contents import (
    optimizer_step_count,
    owned_pieces,
    placed_parameters,
    random_pieces,
)
from megatron.training.checkpoint.control_file import Control
from megatron.training.checkpoint.costs import SaveCosts
from megatron.training.checkpoint.device_copies import DeviceCopies
from megatron.training.checkpoint.loader import (
    layout_record,
    load_optimizer,
    load_random,
    load_weights,
)
from megatron.training.checkpoint.reader import CheckpointReader
from megatron.training.checkpoint.save_progress import Progress
from megatron.training.checkpoint.saver import Contents, Kept, SaveError, SaveOutcome, Saver
from megatron.training.checkpoint.selection import Nothing, Selection
from megatron.training.checkpoint.snapshot import Snapshot
from megatron.training.checkpoint.stream import Piece
from megatron.training.console import Console
from megatron.training.core_private import gather_parameters, loss_scaler_state
from megatron.training.job import Job
from megatron.training.model import StageModel
from megatron.training.optimizer import TrainingOptimizer


def expected_progress(found: Selection | Nothing) -> Progress:
    """Where the run will stand once `found` is loaded."""
    if isinstance(found, Nothing) or found.weights_only:
        return Progress()
    return Progress.from_record(found.index.run)


class Checkpointer:
    """Reads and writes the checkpoints of one run. Every method is collective."""

    def __init__(
        self,
        job: Job,
        *,
        model: StageModel,
        optimizer: TrainingOptimizer,
        scheduler: OptimizerParamScheduler,
        console: Console,
    ) -> None:
        self._job, self._args = job, job.args
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._console = console
        self._control = Control()
        self._placed = placed_parameters(
            self._args, model, plan=job.plan, coordinate=job.coordinate
        )
        self.costs = SaveCosts()
        self._saver: Saver | None = None
        self._has_reserved = False
        self._last_problem: str | None = None
        if self._args.save is not None:
            in_background = self._args.async_save
            self._saver = Saver(
                Path(self._args.save),
                self._control,
                kept=Kept(self._args.keep_last, self._args.save_retain_interval),
                snapshot=Snapshot(DeviceCopies(job.device)) if in_background else None,
                lock=job.lock,
            )

    def resume(self) -> Progress:
        """Load what the ranks agreed to start from; where the run stands then."""
        found = self._job.checkpoint
        for note in found.notes:
            self._console.line(note)
        if not isinstance(found, Selection):
            return Progress()
        problem: Exception | None = None
        random_note = None
        try:
            random_note = self._load(found)
        except (HeteroError, OSError, RuntimeError) as error:
            problem = error
        self._control.agree(problem)
        if found.weights_only:
            self._console.line(f"weights loaded from {found.folder}; a new run begins")
            return Progress()
        progress = expected_progress(found)
        self._console.line(f"checkpoint {found.folder} loaded: iteration {progress.iteration}")
        if random_note is not None and self._uses_dropout:
            self._console.line(f"its random states are not used: {random_note}")
        return progress

    @property
    def _uses_dropout(self) -> bool:
        return bool(self._args.hidden_dropout or self._args.attention_dropout)

    def _load(self, found: Selection) -> str | None:
        """Load everything that the flags want; why the random states were left, if they were."""
        args = self._args
        takes_optimizer = not found.weights_only and not args.no_load_optim
        with CheckpointReader(found.folder, found.index) as reader:
            if takes_optimizer:
                stored = reader.run["scheduler"]
                if not (args.override_opt_param_scheduler or self._believes_checkpoint):
                    require_same_schedule(stored, self._scheduler.state_dict())
            load_weights(reader, self._placed, exact=takes_optimizer)
            if takes_optimizer:
                load_optimizer(reader, self._placed, self._optimizer, args.optimizer)
                self._scheduler.load_state_dict(stored)
                # It sets the weight decay's course after it has set the groups' values.
                self._scheduler.step(0)
            else:
                self._optimizer.inner.reload_model_params()
            if found.weights_only or args.no_load_rng:
                return None
            return load_random(reader, args, plan=self._job.plan, coordinate=self._job.coordinate)

    @property
    def _believes_checkpoint(self) -> bool:
        return bool(self._args.use_checkpoint_opt_param_scheduler)

    def due(self, iteration: int) -> bool:
        interval = self._args.save_interval
        return self._saver is not None and bool(interval) and iteration % interval == 0

    def save(self, progress: Progress) -> None:
        """Write a checkpoint, or with --async-save begin to.

        A failure is logged; with --exit-on-save-failure it raises SaveError on all ranks, and so
        does a folder that another run has taken over.
        """
        if self._saver is None:
            return
        with self.costs.standing_still():
            outcome = self._saver.finish()
        self._told(outcome)
        self.costs.begin(progress.iteration)
        outcome = None
        with self.costs.standing_still():
            gather_parameters(self._model.chunks)
            self._saver.start(progress.iteration, self._contents(progress))
            if not self._args.async_save:
                outcome = self._saver.finish()
        self._told(outcome)

    def before_optimizer_step(self) -> None:
        """Call before weights change: a copy that is being taken goes first. Not collective."""
        if self._saver is not None:
            self._saver.order_updates()

    def after_optimizer_step(self) -> None:
        """Call after weights change: the first time, a thread begins to make memory for copies.

        The optimizer's state, which is to be copied too, exists from then on. Not collective.
        """
        copies = self._args.async_save and self._args.save_interval
        if self._saver is not None and copies and not self._has_reserved:
            self._has_reserved = True
            self._saver.reserve(self._owned_pieces())

    def poll(self) -> None:
        """Once a step: hear whether a save in the background has ended."""
        if self._saver is None:
            return
        with self.costs.standing_still():
            outcome = self._saver.poll()
        self._told(outcome)

    def finish(self) -> None:
        """Wait for the save in the background. Raises SaveError if the run's last save failed."""
        if self._saver is None:
            return
        self._told(self._saver.finish())
        if self._last_problem is not None:
            raise SaveError(self._last_problem)

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()

    def _owned_pieces(self) -> list[Piece]:
        return owned_pieces(
            self._placed,
            None if self._args.no_save_optim else self._optimizer,
            plan=self._job.plan,
            coordinate=self._job.coordinate,
        )

    def _contents(self, progress: Progress) -> Contents:
        args, job = self._args, self._job
        with_optimizer, with_random = not args.no_save_optim, not args.no_save_rng
        pieces = self._owned_pieces()
        if with_random:
            pieces += random_pieces(job.coordinate)
        run = {
            **progress.to_record(),
            "holds": {"optimizer": with_optimizer, "random states": with_random},
            "scheduler": self._scheduler.state_dict(),
            "loss_scaler": loss_scaler_state(self._optimizer.inner),
            "layout": layout_record(args, job.plan),
            "plan": job.plan.to_mapping(),
            "simulated": job.simulated,
        }
        return Contents(
            pieces=pieces,
            args=plain_args(args),
            run=run,
            optimizer_step=optimizer_step_count(self._optimizer) if with_optimizer else None,
        )

    def _told(self, outcome: SaveOutcome | None) -> None:
        if outcome is None:
            return
        part = outcome.part
        cost = self.costs.end(
            memory_wait_s=outcome.memory_wait_s,
            written_s=None if part is None else part.seconds,
            bytes=None if part is None else part.bytes,
        )
        if outcome.problem is None:
            self._last_problem = None
            slowest_us = max(self._control.numbers(round(cost.stood_still_s * 1e6)))
            self._console.line(
                f"saved checkpoint of iteration {outcome.iteration} to {self._args.save} "
                f"({outcome.bytes / 2**20:,.1f} MiB in {outcome.seconds:.1f} s"
                f"{', in the background' if self._args.async_save else ''}; training stood still "
                f"for {slowest_us / 1e6:.3f} s)"
            )
            return
        kept = "the checkpoints before it are untouched"
        sentence = (
            f"the checkpoint of iteration {outcome.iteration} could not be written to "
            f"{self._args.save} ({outcome.problem}); {kept}"
        )
        self._last_problem = sentence
        if self._args.exit_on_save_failure:
            raise SaveError(f"{sentence}, and the run ends as --exit-on-save-failure asks")
        self._console.line(f"warning: {sentence}, and training goes on")


_OF_ONE_START = frozenset({"rank", "local_rank", "ignored_flags", "typed_flags", "taken_flags"})


def plain_args(args: argparse.Namespace) -> Mapping[str, Any]:
    """The flags as JSON can say them; what it cannot say is derived anew by every run."""
    return {
        name: value
        for name, value in vars(args).items()
        if name not in _OF_ONE_START and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
