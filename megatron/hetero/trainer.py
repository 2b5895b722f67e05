"""The training loop and evaluation of one rank."""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    get_canonical_lr_for_logging,
)

from hetero.errors import HeteroError
from megatron.hetero.arguments.batch_sizes import batch_size_at
from megatron.hetero.checkpoint.checkpointer import Checkpointer
from megatron.hetero.checkpoint.save_timings import SaveTimings
from megatron.hetero.checkpoint.train_state import TrainState
from megatron.hetero.console import Console
from megatron.hetero.core_private import gather_parameters
from megatron.hetero.data import MicroBatches
from megatron.hetero.job import Job
from megatron.hetero.metrics import (
    DataWaitTimes,
    IterationRecord,
    measured_peak_bytes,
    tflops_per_gpu,
)
from megatron.hetero.metrics_logger import MetricsLogger
from megatron.hetero.model import StageModel
from megatron.hetero.optimizer import StepResult, TrainingOptimizer
from megatron.hetero.param_hashes import check_param_hashes_across_dp_replicas
from megatron.hetero.profiling import StepProfiler
from megatron.hetero.schedule import Schedule
from megatron.hetero.stop_check import StopCheck
from megatron.hetero.timing.report import Interval, TimingLog
from megatron.hetero.timing.timers import Timers


def _freeze_gc() -> None:
    """Exclude all current objects from later garbage collections.

    After the first iteration nearly all of them live until the end of the run (libraries, model),
    and a full collection would visit each one while holding the GIL.
    """
    gc.collect()
    gc.freeze()


class Trainer:
    """The training loop of one rank."""

    def __init__(
        self,
        job: Job,
        *,
        model: StageModel,
        optimizer: TrainingOptimizer,
        scheduler: OptimizerParamScheduler,
        schedule: Schedule,
        console: Console,
        metrics_logger: MetricsLogger,
        report_memory: Callable[[int], None],
        checkpointer: Checkpointer,
        progress: TrainState,
        stop: StopCheck,
        timers: Timers,
    ) -> None:
        self._report_memory = report_memory
        self.job = job
        self.args: argparse.Namespace = job.args
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.schedule = schedule
        self.console = console
        self.metrics_logger = metrics_logger
        self.iteration = progress.iteration
        self.consumed_samples = progress.consumed_train_samples
        self.consumed_valid_samples = progress.consumed_valid_samples
        self.skipped = progress.skipped_iterations
        self.stopped_early = False
        """Whether training ended before its last iteration; final evaluations are then skipped."""
        self._checkpointer, self._stop = checkpointer, stop
        self.steps = 0
        """Iterations of this launch."""
        self.last_record: IterationRecord | None = None
        self._unlogged: list[IterationRecord] = []
        self.data_wait_times = DataWaitTimes()
        self._timers = timers
        self._timing = TimingLog(
            job.args,
            timers=timers,
            plan=job.plan,
            identities=job.identities,
            statistics=job.statistics,
            console=console,
            metrics_logger=metrics_logger,
        )
        self._profiler = StepProfiler(self.args, rank=job.rank, device=job.device)

    def train(self, iterators: list[Iterator[Any]], evaluate: Callable[[], None] | None) -> None:
        """Run to --train-iters (or --train-samples), evaluating on the way."""
        if self.args.manual_gc:
            gc.disable()
        self.model.train()
        while not self._is_finished():
            self._profiler.before_step(self.iteration)
            self._train_step(iterators)
            self._profiler.after_step(self.iteration)
            if self.steps == 1:
                _freeze_gc()
            if self.steps == 1 or self._is_multiple(self.args.log_memory_interval):
                self._report_memory(self.iteration)
            self._collect_garbage()
            interval = self.args.eval_interval
            is_due = bool(interval) and self.iteration % interval == 0
            if evaluate is not None and is_due and self._stop.reason is None:
                evaluate()
                self.model.train()
            stops = self._should_stop()
            saved = self._save_if_due(last=stops or self._is_finished())
            if not stops and saved and self._stop.agree():
                # During the save, after which another step and save may take too long.
                self._print_stop()
                stops = True
            if stops:
                self.stopped_early = self._stop.reason is not None or not self._is_finished()
                break
        if not self.steps and self.args.save != self.args.load:
            # No iterations left: save the loaded checkpoint in this run's layout.
            self._save_if_due(last=True)
        self._profiler.close()
        if self._unlogged:
            self._log_pending()
            self._show(self._timing.rest(self.iteration))

    def _release_cache(self) -> None:
        if self.args.empty_unused_memory_level and self.job.device.type == "cuda":
            torch.cuda.empty_cache()

    def _is_multiple(self, interval: int | None) -> bool:
        return bool(interval) and self.iteration % (interval or 1) == 0

    def _collect_garbage(self) -> None:
        """With --manual-gc, collect on all ranks in the same iterations."""
        interval = self.args.manual_gc_interval
        if self.args.manual_gc and interval and self.iteration % interval == 0:
            gc.collect()

    def _is_finished(self) -> bool:
        return bool(self.iteration >= self.args.train_iters)

    @property
    def save_timings(self) -> SaveTimings:
        return self._checkpointer.timings

    def _save_if_due(self, *, last: bool) -> bool:
        """Whether a save was due."""
        self._checkpointer.poll()
        due = last or self._checkpointer.due(self.iteration)
        if due:
            self._checkpointer.save(
                TrainState(
                    iteration=self.iteration,
                    consumed_train_samples=self.consumed_samples,
                    consumed_valid_samples=self.consumed_valid_samples,
                    skipped_iterations=self.skipped,
                )
            )
        return due

    def _should_stop(self) -> bool:
        if self.args.exit_duration_in_mins:
            self._stop.agree()
        if self._stop.reason is not None:
            self._print_stop()
            return True
        if self.args.exit_interval and self.iteration % self.args.exit_interval == 0:
            self.console.line(f"stopping at iteration {self.iteration}, as --exit-interval asks")
            return True
        return False

    def _print_stop(self) -> None:
        self.console.line(f"stopping at iteration {self.iteration}, as {self._stop.reason} asks")

    def _train_step(self, iterators: list[Iterator[Any]]) -> None:
        began = time.perf_counter()
        self._timers.begin()
        batch_size = batch_size_at(self.args, self.consumed_samples)
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        micro_batch_size = self.args.micro_batch_size
        loss_sum, tokens = self.schedule.run(
            iterators,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
        )
        # The GPU is busy with this iteration, so the host has time for the previous ones.
        self._timers.count_completed()
        data_wait = sum(
            (i.pop_wait_seconds() for i in iterators if isinstance(i, MicroBatches)), 0.0
        )
        self.data_wait_times.add(data_wait)
        self._checkpointer.before_optimizer_step()
        with self._timers("optimizer"):
            outcome = self.optimizer.step(
                loss_sum=loss_sum,
                tokens=tokens,
                link_bytes=self._boundary_bytes(),
                check_links=self.job.check_links,
                stop_signal=self._stop.own_signal,
            )
        self._stop.accept_signal(outcome.stop_signal)
        self.iteration += 1
        self.consumed_samples += batch_size
        self._require_finite(outcome, batch_size)
        if outcome.updated:
            self.scheduler.step(increment=batch_size)
            self._checkpointer.after_optimizer_step()
        else:
            self.skipped += 1
        # As in Megatron's log: the learning rate of the next iteration.
        learning_rate = get_canonical_lr_for_logging(self.optimizer.inner.param_groups)
        self._timers.end()
        # Synchronises with the device, so that the update counts towards this iteration's time.
        loss_scale = self.optimizer.loss_scale
        seconds = time.perf_counter() - began
        self._release_cache()
        if self._is_multiple(self.args.check_weight_hash_across_dp_replicas_interval):
            check_param_hashes_across_dp_replicas(self.job, self.model, iteration=self.iteration)
        self._record(outcome, batch_size, learning_rate, loss_scale, seconds, data_wait)

    def _boundary_bytes(self) -> int:
        links = self.job.groups.data_links()
        if self.job.links is not None:
            links = links + self.job.links.boundary()
        return sum(link.counters.bytes_sent for link in links)

    def _require_finite(self, outcome: StepResult, batch_size: int) -> None:
        """Raise HeteroError for a skipped update. A dynamic loss scale turns this check off."""
        if outcome.updated or not self.args.check_for_nan_in_loss_and_grad:
            return
        loss_is_finite = math.isfinite(outcome.loss)
        what = "gradient norm" if loss_is_finite else "loss"
        value = outcome.grad_norm if loss_is_finite else outcome.loss
        scale = "" if self.args.loss_scale is None else " or --loss-scale"
        raise HeteroError(
            f"the {what} of iteration {self.iteration} is {'inf' if value is None else value}; its "
            f"weights were not updated: lower --lr{scale}, look at the data of these samples "
            f"({self.consumed_samples - batch_size} to {self.consumed_samples - 1}), or pass "
            "--no-check-for-nan-in-loss-and-grad to skip such iterations",
            known_to_all=True,
        )

    def _record(
        self,
        outcome: StepResult,
        batch_size: int,
        learning_rate: float | None,
        loss_scale: float,
        seconds: float,
        data_wait: float,
    ) -> None:
        tokens = batch_size * self.args.seq_length
        record = IterationRecord(
            iteration=self.iteration,
            consumed_samples=self.consumed_samples,
            consumed_tokens=self.consumed_samples * self.args.seq_length,
            elapsed_ms=seconds * 1000,
            tokens_per_s=tokens / seconds,
            tflops_per_gpu=tflops_per_gpu(self.args, tokens=tokens, seconds=seconds),
            tflops_per_gpu_full_square=tflops_per_gpu(
                self.args, tokens=tokens, seconds=seconds, full_square=True
            ),
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            learning_rate=float(learning_rate or 0.0),
            weight_decay=float(self.scheduler.get_wd()),
            batch_size=batch_size,
            loss_scale=loss_scale,
            skipped=not outcome.updated,
            num_zeros=outcome.num_zeros,
            params_norm=self._params_norm(),
            peak_memory_bytes=measured_peak_bytes(self.job.device),
            data_wait_ms=data_wait * 1000,
            link_bytes=outcome.link_bytes,
            simulated=self.job.simulated,
        )
        self.steps += 1
        self.last_record = record
        logged = self.iteration % self.args.log_interval == 0
        timing = self._timing.after(self.iteration, logged=logged)
        self.metrics_logger.iteration(
            record, timing=None if timing is None else self._timing.as_json(timing)
        )
        self.console.advance(record)
        self._unlogged.append(record)
        if logged:
            self._log_pending()
        self._show(timing)

    def _params_norm(self) -> float | None:
        """L2 norm of all weights, with --log-params-norm. Collective."""
        if not self.args.log_params_norm:
            return None
        gather_parameters(self.model.chunks)
        square = torch.zeros(1, dtype=torch.float64, device=self.job.device)
        coordinate = self.job.coordinate
        for name, parameter in self.model.named_parameters():
            is_copy = name == "output_layer.weight" and self.model.has_tied_copy
            is_split = getattr(parameter, "tensor_model_parallel", False)
            if coordinate.data == 0 and not is_copy and (is_split or coordinate.tensor == 0):
                square += parameter.detach().double().square().sum()
        return math.sqrt(math.fsum(row[0] for row in self.job.statistics.gather(square)))

    def _show(self, timing: Interval | None) -> None:
        if timing is not None:
            self._timing.show(timing)

    def _log_pending(self) -> None:
        if self._unlogged:
            self.console.iteration(self._unlogged)
        self._unlogged = []


class Evaluator:
    """Computes the loss over --eval-iters batches of a dataset."""

    def __init__(
        self,
        job: Job,
        *,
        model: StageModel,
        schedule: Schedule,
        console: Console,
        metrics_logger: MetricsLogger,
        stop: StopCheck,
    ) -> None:
        self._job, self._model, self._schedule = job, model, schedule
        self._console, self._metrics_logger, self._stop = console, metrics_logger, stop

    def run(self, iterators: list[Iterator[Any]], *, name: str, iteration: int, when: str) -> None:
        """Log the mean token loss over --eval-iters global batches. Collective.

        A signal, or the end of the run's time, ends it without a result.
        """
        args = self._job.args
        self._model.train(False)
        total = torch.zeros(2, dtype=torch.float64, device=self._job.device)
        with torch.no_grad():
            for batch in range(args.eval_iters):
                if self._stop.agree():
                    self._console.line(
                        f"evaluation {when} ended after {batch} of {args.eval_iters} batches, as "
                        f"{self._stop.reason} asks"
                    )
                    return
                total += self._schedule.run(
                    iterators,
                    batch_size=args.eval_global_batch_size,
                    micro_batch_size=args.eval_micro_batch_size,
                    forward_only=True,
                )
        rows = self._job.statistics.gather(total, check=self._job.check_links)
        loss_sum, tokens = math.fsum(r[0] for r in rows), math.fsum(r[1] for r in rows)
        loss = loss_sum / tokens if tokens else math.nan
        perplexity = math.exp(min(20.0, loss))
        # Megatron's words, which call the test set's loss one of validation too.
        self._console.line(
            f" validation loss {when} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} |"
        )
        self._metrics_logger.evaluation(name, loss=loss, perplexity=perplexity, iteration=iteration)
