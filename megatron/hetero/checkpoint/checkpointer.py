"""The training loop's interface to checkpoints: resume once, save when due, finish."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from hetero.errors import HeteroError, UserError
from hetero.observe.record import recorder
from hetero.plan import Coordinate, Plan
from hetero.recover.node_state import JOB_VARIABLE
from megatron.hetero.checkpoint.destination import RetentionPolicy, SharedFolder
from megatron.hetero.checkpoint.find_checkpoint import FoundCheckpoint
from megatron.hetero.checkpoint.index import TrainState, is_plain
from megatron.hetero.checkpoint.rank_state import (
    PartOfShard,
    ShardedParameter,
    expected_bytes,
    optimizer_step_count,
    owned_write_items,
    parts_of_shards,
    restore_rng_state,
    rng_prefix,
    rng_write_items,
    sharded_parameters,
)
from megatron.hetero.checkpoint.reader import CheckpointReader, TensorRead
from megatron.hetero.checkpoint.regions import Shard
from megatron.hetero.checkpoint.resume import CHECKPOINT_SCHEDULE, Source, describe
from megatron.hetero.checkpoint.safetensors_writer import WriteItem
from megatron.hetero.checkpoint.save_timing import SaveTimings
from megatron.hetero.checkpoint.saver import (
    Contents,
    ControlGroup,
    SaveOutcome,
    Saver,
)
from megatron.hetero.checkpoint.snapshot import DeviceToHostCopier, Snapshot
from megatron.hetero.checkpoint.state_in_memory import StateInMemory
from megatron.hetero.checkpoint.tensor_names import (
    ADAM_MOMENTS,
    AMAX_HISTORY,
    EMBEDDING,
    MAIN_COPY,
    VOCABULARY,
    optimizer_name,
)
from megatron.hetero.console import Console
from megatron.hetero.core_private import (
    OptimizerShard,
    gather_parameters,
    loss_scaler_state,
    set_loss_scaler_state,
    set_optimizer_state,
)
from megatron.hetero.job import Job
from megatron.hetero.model import StageModel
from megatron.hetero.optimizer import TrainingOptimizer
from megatron.hetero.tokenizer.files import ARGUMENT, store_tokenizer


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
        self._placed = sharded_parameters(self._args, model)
        self.timings = SaveTimings()
        self._saver: Saver | None = None
        self._has_reserved = False
        self._last_problem: str | None = None
        if self._args.save is not None:
            in_background = self._args.async_save
            self._saver = Saver(
                SharedFolder(
                    Path(self._args.save),
                    rank=job.rank,
                    world_size=self._control.world_size,
                    kept=RetentionPolicy(self._args.keep_last, self._args.save_retain_interval),
                    lock=job.lock,
                ),
                self._control,
                snapshot=Snapshot(DeviceToHostCopier(job.device)) if in_background else None,
            )
        self._memory = self._state_in_memory()

    def _state_in_memory(self) -> StateInMemory | None:
        """Raises UserError, on all ranks, if there is not enough memory for it."""
        args, job = self._args, self._job
        if not args.hetero_memory_checkpoint_interval or args.skip_train:
            return None
        memory = StateInMemory(
            self._control,
            Snapshot(DeviceToHostCopier(job.device)),
            interval=args.hetero_memory_checkpoint_interval,
            local_rank=job.identities[job.rank].local_rank,
            say=self._console.line,
        )
        copies_for_disk = args.save is not None and args.async_save and args.save_interval
        memory.require_room(
            vendor=job.identities[job.rank].vendor,
            bytes=expected_bytes(
                self._placed,
                self._optimizer,
                moments=len(_MOMENTS[args.optimizer]),
                plan=job.plan,
                coordinate=job.coordinate,
            ),
            copies=2 if copies_for_disk else 1,
        )
        memory.begin_run(job.checkpoint.train_state.iteration)
        return memory

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
        self._add_incident(
            "checkpoint loaded",
            f"{found.folder}, of iteration {progress.iteration}",
            iteration=progress.iteration,
        )
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
        with found.reader() as reader:
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

    @property
    def memory_timings(self) -> SaveTimings:
        """Of the generations in memory; those on disk are in `timings`."""
        return SaveTimings() if self._memory is None else self._memory.timings

    def due_in_memory(self, iteration: int) -> bool:
        return self._memory is not None and self._memory.due(iteration)

    def save(self, progress: TrainState) -> None:
        """Save a checkpoint; with --async-save, only start to.

        A failure is logged. With --exit-on-save-failure, or if another run has taken over the
        folder, raises HeteroError on all ranks.
        """
        if self._saver is None:
            return
        with self.timings.blocking():
            outcome = self._saver.finish()
        self._report_outcome(outcome)
        self.timings.begin(progress.iteration)
        self._add_incident(
            "checkpoint begun",
            f"iteration {progress.iteration}, to {self._args.save}",
            iteration=progress.iteration,
        )
        outcome = None
        with self.timings.blocking():
            gather_parameters(self._model.chunks)
            self._saver.start(progress.iteration, self._contents(progress, self._args))
            if not self._args.async_save:
                outcome = self._saver.finish()
        self._report_outcome(outcome)

    def save_in_memory(self, progress: TrainState) -> None:
        """Start a generation of --hetero-memory-checkpoint-interval. A failure is logged."""
        if self._memory is None:
            return
        with self._memory.timings.blocking():
            gather_parameters(self._model.chunks)
        self._memory.save(progress.iteration, self._contents(progress, _EVERYTHING))

    def before_optimizer_step(self) -> None:
        """Call before weights change, so that the update waits for a snapshot. Not collective."""
        if self._saver is not None:
            self._saver.order_updates()
        if self._memory is not None:
            self._memory.order_updates()

    def after_optimizer_step(self) -> None:
        """Call after weights change. After the first step, allocates snapshot memory in a thread.

        The optimizer state, which is part of the snapshot, exists from then on. Not collective.
        """
        copies = self._args.async_save and self._args.save_interval
        if self._saver is not None and copies and not self._has_reserved:
            self._has_reserved = True
            self._saver.reserve(
                self._owned_write_items(with_optimizer=not self._args.no_save_optim)
            )
        if self._memory is not None:
            self._memory.reserve(lambda: self._owned_write_items(with_optimizer=True))

    def poll(self) -> None:
        """Call once per step: report a background save that has ended."""
        if self._memory is not None:
            self._memory.poll()
        if self._saver is None:
            return
        with self.timings.blocking():
            outcome = self._saver.poll()
        self._report_outcome(outcome)

    def finish(self) -> None:
        """Wait for the save in the background. Raises HeteroError if the run's last save failed."""
        if self._memory is not None:
            self._memory.finish()
        if self._saver is None:
            return
        self._report_outcome(self._saver.finish())
        if self._last_problem is not None:
            raise HeteroError(self._last_problem, known_to_all=True)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        if self._saver is not None:
            self._saver.close()

    def _add_incident(self, kind: str, text: str, **more: Any) -> None:
        """What all ranks know, from one of them."""
        if self._job.rank == 0:
            recorder().add_incident(kind, text, **more)

    def _owned_write_items(self, *, with_optimizer: bool) -> list[WriteItem]:
        return owned_write_items(
            self._placed,
            self._optimizer if with_optimizer else None,
            plan=self._job.plan,
            coordinate=self._job.coordinate,
        )

    def _contents(self, progress: TrainState, parts: argparse.Namespace) -> Contents:
        """`parts`: its `no_save_optim` and `no_save_rng` say what is left out."""
        args, job = self._args, self._job
        if args.save is not None:
            self._store_tokenizer()
        with_optimizer, with_random = not parts.no_save_optim, not parts.no_save_rng
        write_items = self._owned_write_items(with_optimizer=with_optimizer)
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
        if name := os.environ.get(JOB_VARIABLE):
            run["job"] = name
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
            self._add_incident(
                "checkpoint saved",
                f"iteration {outcome.iteration}, to {self._args.save}",
                iteration=outcome.iteration,
                seconds=round(outcome.seconds, 3),
                bytes=outcome.bytes,
                stood_still_seconds=round(slowest_us * 1e-6, 6),
            )
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
        self._add_incident(
            "checkpoint failed",
            sentence,
            iteration=outcome.iteration,
            seconds=round(outcome.seconds, 3),
        )
        if self._args.exit_on_save_failure:
            raise HeteroError(
                f"{sentence}, and the run ends as --exit-on-save-failure asks", known_to_all=True
            )
        self._console.line(f"warning: {sentence}, and training goes on")


_EVERYTHING = argparse.Namespace(no_save_optim=False, no_save_rng=False)
"""A restart continues exactly, whatever is saved to the disk."""
_PER_LAUNCH_ARGS = frozenset({"ignored_flags", "typed_flags", "taken_flags"})


def plain_args(args: argparse.Namespace) -> Mapping[str, Any]:
    """The flags that JSON can represent, without those that concern one launch only."""
    return {
        name: value
        for name, value in vars(args).items()
        if name not in _PER_LAUNCH_ARGS and is_plain(value)
    }


_MOMENTS = {"adam": ADAM_MOMENTS, "sgd": ("momentum_buffer",)}


@torch.no_grad()
def load_weights(
    reader: CheckpointReader, placed: Sequence[ShardedParameter], *, exact: bool
) -> None:
    """Load the parameters; with `exact`, from the optimizer's float32 copies where more precise.

    Raises UserError for a missing tensor or a different shape.
    """
    reads = []
    for p in placed:
        name = _source(p)
        if name.endswith(AMAX_HISTORY):
            _load_maxima(reader, p)
            continue
        copy = optimizer_name(MAIN_COPY, name)
        wider = p.parameter.dtype == torch.float32 and copy in reader.index.tensors
        source = copy if exact and wider and reader.dtype(name) != torch.float32 else name
        reads.append(_to_read(reader, source, p.shard, into=p.parameter.detach()))
    reader.read_into(reads)


def _load_maxima(reader: CheckpointReader, p: ShardedParameter) -> None:
    """The last ones of a history of any length, zeros before them.

    Without them scales start anew: a checkpoint in bf16 has none.
    """
    p.parameter.zero_()
    if p.name in reader.index.tensors:
        kept = reader.tensor(p.name)[-len(p.parameter) :]
        p.parameter[len(p.parameter) - len(kept) :] = kept


@torch.no_grad()
def load_optimizer(
    reader: CheckpointReader,
    placed: Sequence[ShardedParameter],
    optimizer: TrainingOptimizer,
    kind: str,
) -> None:
    """Load float32 copies, moments, Adam's step count and the loss scaler."""
    step = reader.run.get("optimizer_step")
    reads: list[TensorRead] = []
    for shard, parts in parts_of_shards(placed, optimizer):
        if shard.is_copy:
            reads += [_copy_to_read(reader, part, shard) for part in parts]
        moments = {}
        for moment in _MOMENTS[kind]:
            named = [optimizer_name(moment, _source(part.parameter)) for part in parts]
            if not all(name in reader.index.tensors for name in named):
                continue
            value = moments[moment] = torch.zeros_like(shard.main)
            reads += [
                _part_to_read(reader, name, part, into=value)
                for name, part in zip(named, parts, strict=True)
            ]
        if moments:
            set_optimizer_state(shard, moments, step=step)
    reader.read_into(reads)
    set_loss_scaler_state(optimizer.inner, reader.run.get("loss_scaler", {}))


def _copy_to_read(reader: CheckpointReader, part: PartOfShard, shard: OptimizerShard) -> TensorRead:
    source = _source(part.parameter)
    name = optimizer_name(MAIN_COPY, source)
    # A run in float32 has no copies: its weights are what they would hold.
    name = name if name in reader.index.tensors else source
    return _part_to_read(reader, name, part, into=shard.main.detach())


def _part_to_read(
    reader: CheckpointReader, name: str, part: PartOfShard, *, into: torch.Tensor
) -> TensorRead:
    """What `into`, of the shape of the optimizer's shard, holds of a parameter."""
    held = into.view(-1)[part.within]
    return _to_read(reader, name, part.parameter.shard, into=held, begin=part.begin, end=part.end)


def _source(p: ShardedParameter) -> str:
    return EMBEDDING if p.is_tied_copy else p.name


def _to_read(
    reader: CheckpointReader,
    name: str,
    shard: Shard,
    *,
    into: torch.Tensor,
    begin: int = 0,
    end: int | None = None,
) -> TensorRead:
    """A flat range of a shard. Rows of the vocabulary's padding that the checkpoint lacks keep the
    values of `into`."""
    if name not in reader.index.tensors:
        raise UserError(f"the checkpoint {reader.folder} holds no tensor {name}")
    stored, own = reader.shape(name), shard.whole
    is_padding = name.endswith(VOCABULARY) and stored[1:] == own[1:]
    if stored != own and not is_padding:
        raise UserError(
            f"tensor {name} of the checkpoint {reader.folder} has the shape {list(stored)} and "
            f"this model's has {list(own)}"
        )
    # What is trained is contiguous: parameters and states are views of flat buffers.
    return TensorRead(into.view(-1), name, shard.regions(begin, end))


def load_rng_state(
    reader: CheckpointReader, args: argparse.Namespace, *, plan: Plan, coordinate: Coordinate
) -> str | None:
    """Restore this rank's RNG states; returns why not, if they do not fit this layout."""
    if reader.run.get("layout") != layout_record(args, plan):
        return "it was written under another layout, whose random states fit no rank of this one"
    prefix = rng_prefix(coordinate)
    names = [name for name in reader.index.tensors if name.startswith(prefix)]
    if not names:
        return "it holds none"
    states = {name.removeprefix(prefix): reader.tensor(name) for name in names}
    if not restore_rng_state(states):
        return "it was written on another kind of device"
    return None


def layout_record(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """The properties of a layout that must be equal for RNG states to be restored."""
    meshes = [plan.meshes[plan.blocks_of_stage(stage)[0].mesh] for stage in range(plan.stages)]
    stages = [
        [mesh.tensor, mesh.context, len(plan.shares(stage))] for stage, mesh in enumerate(meshes)
    ]
    parallel = [
        args.sequence_parallel if m.sequence_parallel is None else m.sequence_parallel
        for m in meshes
    ]
    micro_batches = [m.micro_batch_size or args.micro_batch_size for m in meshes]
    record = {
        "layers": [list(chunks) for chunks in plan.layers],
        "stages": stages,
        "sequence_parallel": _of_stages(parallel),
        "micro_batch_size": _of_stages(micro_batches),
    }
    if len(set(plan.shares(0))) > 1:
        record["shares"] = list(plan.shares(0))
    return record


def _of_stages(values: list[Any]) -> Any:
    """One value where all stages have the same."""
    return values[0] if len(set(values)) == 1 else values
