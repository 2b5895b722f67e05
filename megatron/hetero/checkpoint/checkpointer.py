"""The training loop's interface to checkpoints: resume once, save when due, finish."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from hetero.errors import HeteroError, UserError
from megatron.hetero.checkpoint.control_group import ControlGroup
from megatron.hetero.checkpoint.device_to_host import DeviceToHostCopier
from megatron.hetero.checkpoint.find_checkpoint import FoundCheckpoint
from megatron.hetero.checkpoint.index import is_plain
from megatron.hetero.checkpoint.loader import (
    layout_record,
    load_optimizer,
    load_rng_state,
    load_weights,
)
from megatron.hetero.checkpoint.rank_state import (
    optimizer_step_count,
    owned_write_items,
    rng_write_items,
    sharded_parameters,
)
from megatron.hetero.checkpoint.reader import CheckpointReader
from megatron.hetero.checkpoint.resume import CHECKPOINT_SCHEDULE, Source, describe
from megatron.hetero.checkpoint.safetensors_writer import WriteItem
from megatron.hetero.checkpoint.save_timings import SaveTimings
from megatron.hetero.checkpoint.saver import (
    Contents,
    RetentionPolicy,
    SaveError,
    SaveOutcome,
    Saver,
)
from megatron.hetero.checkpoint.snapshot import Snapshot
from megatron.hetero.checkpoint.train_state import TrainState
from megatron.hetero.console import Console
from megatron.hetero.core_private import gather_parameters, loss_scaler_state
from megatron.hetero.job import Job
from megatron.hetero.model import StageModel
from megatron.hetero.optimizer import TrainingOptimizer
from megatron.hetero.tokenizer.stored import ARGUMENT, store_tokenizer


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
        self._control = ControlGroup()
        self._placed = sharded_parameters(
            self._args, model, plan=job.plan, coordinate=job.coordinate
        )
        self.timings = SaveTimings()
        self._saver: Saver | None = None
        self._has_reserved = False
        self._last_problem: str | None = None
        if self._args.save is not None:
            in_background = self._args.async_save
            self._saver = Saver(
                Path(self._args.save),
                self._control,
                kept=RetentionPolicy(self._args.keep_last, self._args.save_retain_interval),
                snapshot=Snapshot(DeviceToHostCopier(job.device)) if in_background else None,
                lock=job.lock,
            )

    def resume(self) -> TrainState:
        """Load the checkpoint that the ranks agreed on; returns the resulting training state."""
        found = self._job.checkpoint
        for note in found.notes:
            self._console.line(note)
        if not isinstance(found, FoundCheckpoint):
            return found.train_state
        problem: Exception | None = None
        random_note = None
        try:
            random_note = self._load(found)
        except (HeteroError, OSError, RuntimeError) as error:
            problem = error
        self._control.raise_together(problem)
        progress = found.train_state
        if found.sources.is_new_run:
            self._console.line(f"weights loaded from {found.folder}; a new run begins")
        else:
            self._console.line(f"checkpoint {found.folder} loaded: iteration {progress.iteration}")
        self._console.line(
            describe(
                found.sources,
                schedule=f"{found.schedule}",
                random_states=random_note,
            )
        )
        if progress.iteration and not found.schedule_position and not self._args.skip_train:
            self._console.line(
                f"the schedule begins anew and training at iteration {progress.iteration} of "
                f"{self._args.train_iters}, so the last learning rate is not that of its end; "
                f"{CHECKPOINT_SCHEDULE} continues the checkpoint's"
            )
        return progress

    def _load(self, found: FoundCheckpoint) -> str | None:
        """Load what the flags ask for; returns why the RNG states were not restored, or None."""
        sources = found.sources
        loads_optimizer = sources.optimizer is Source.CHECKPOINT
        with CheckpointReader(found.folder, found.index) as reader:
            load_weights(reader, self._placed, exact=loads_optimizer)
            if loads_optimizer:
                load_optimizer(reader, self._placed, self._optimizer, self._args.optimizer)
            else:
                self._optimizer.inner.reload_model_params()
            if sources.random_states is not Source.CHECKPOINT:
                return None
            return load_rng_state(
                reader, self._args, plan=self._job.plan, coordinate=self._job.coordinate
            )

    def due(self, iteration: int) -> bool:
        interval = self._args.save_interval
        return self._saver is not None and bool(interval) and iteration % interval == 0

    def save(self, progress: TrainState) -> None:
        """Save a checkpoint; with --async-save, only start to.

        A failure is logged. With --exit-on-save-failure, or if another run has taken over the
        folder, raises SaveError on all ranks.
        """
        if self._saver is None:
            return
        with self.timings.blocking():
            outcome = self._saver.finish()
        self._report_outcome(outcome)
        self.timings.begin(progress.iteration)
        outcome = None
        with self.timings.blocking():
            gather_parameters(self._model.chunks)
            self._saver.start(progress.iteration, self._contents(progress))
            if not self._args.async_save:
                outcome = self._saver.finish()
        self._report_outcome(outcome)

    def before_optimizer_step(self) -> None:
        """Call before weights change, so that the update waits for a snapshot. Not collective."""
        if self._saver is not None:
            self._saver.order_updates()

    def after_optimizer_step(self) -> None:
        """Call after weights change. After the first step, allocates snapshot memory in a thread.

        The optimizer state, which is part of the snapshot, exists from then on. Not collective.
        """
        copies = self._args.async_save and self._args.save_interval
        if self._saver is not None and copies and not self._has_reserved:
            self._has_reserved = True
            self._saver.reserve(self._owned_write_items())

    def poll(self) -> None:
        """Call once per step: report a background save that has ended."""
        if self._saver is None:
            return
        with self.timings.blocking():
            outcome = self._saver.poll()
        self._report_outcome(outcome)

    def finish(self) -> None:
        """Wait for the save in the background. Raises SaveError if the run's last save failed."""
        if self._saver is None:
            return
        self._report_outcome(self._saver.finish())
        if self._last_problem is not None:
            raise SaveError(self._last_problem)

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()

    def _owned_write_items(self) -> list[WriteItem]:
        return owned_write_items(
            self._placed,
            None if self._args.no_save_optim else self._optimizer,
            plan=self._job.plan,
            coordinate=self._job.coordinate,
        )

    def _contents(self, progress: TrainState) -> Contents:
        args, job = self._args, self._job
        self._store_tokenizer()
        with_optimizer, with_random = not args.no_save_optim, not args.no_save_rng
        write_items = self._owned_write_items()
        if with_random:
            write_items += rng_write_items(job.coordinate)
        run = {
            **progress.to_record(),
            "holds": {"optimizer": with_optimizer, "random states": with_random},
            "scheduler": {
                **asdict(job.checkpoint.schedule),
                **self._scheduler.state_dict(),
            },
            "loss_scaler": loss_scaler_state(self._optimizer.inner),
            "layout": layout_record(args, job.plan),
            "plan": job.plan.to_mapping(),
            "simulated": job.simulated,
        }
        return Contents(
            write_items=write_items,
            args=plain_args(args),
            run=run,
            optimizer_step=optimizer_step_count(self._optimizer) if with_optimizer else None,
        )

    def _store_tokenizer(self) -> None:
        """Copy the tokenizer's files beside the checkpoints, on rank 0, if they are not there."""
        save, known = Path(self._args.save), getattr(self._args, ARGUMENT, None)
        if self._job.rank != 0 or (known is not None and (save / known).is_dir()):
            return
        try:
            folder = store_tokenizer(vars(self._args), save)
        except (OSError, UserError) as error:
            folder = None
            print(
                f"warning: the tokenizer could not be copied to {save} ({error}); the checkpoint "
                "names it by its path alone",
                flush=True,
            )
        setattr(self._args, ARGUMENT, folder)

    def _report_outcome(self, outcome: SaveOutcome | None) -> None:
        if outcome is None:
            return
        part = outcome.part
        cost = self.timings.end(
            memory_wait_s=outcome.memory_wait_s,
            written_s=None if part is None else part.seconds,
            bytes=None if part is None else part.bytes,
        )
        if outcome.problem is None:
            self._last_problem = None
            slowest_us = max(self._control.all_gather_ints(round(cost.stood_still_s * 1e6)))
            self._console.line(
                f"saved checkpoint of iteration {outcome.iteration} to {self._args.save} "
                f"({outcome.bytes / 2**20:,.1f} MiB in {outcome.seconds:.1f} s"
                f"{', in the background' if self._args.async_save else ''}; training stood still "
                f"for {slowest_us / 1e6:.3f} s)"
            )
            if outcome.not_removed:
                self._console.line(
                    f"warning: {self._args.save} holds older checkpoints that could not be "
                    f"removed: {outcome.not_removed}; remove them by hand if room runs short"
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


_PER_LAUNCH_ARGS = frozenset({"ignored_flags", "typed_flags", "taken_flags"})


def plain_args(args: argparse.Namespace) -> Mapping[str, Any]:
    """The flags that JSON can represent, without those that concern one launch only."""
    return {
        name: value
        for name, value in vars(args).items()
        if name not in _PER_LAUNCH_ARGS and is_plain(value)
    }
