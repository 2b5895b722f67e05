"""Trains the model of an initialized job on one rank: builds it, trains, evaluates, reports."""

from __future__ import annotations

import argparse
import gc
import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from hetero.data.slowdown import SLOWDOWN_VARIABLE, slow_down
from hetero.errors import HeteroError
from hetero.observe.record import Phase, recorder
from hetero.plan import VENDOR_VARIABLE
from megatron.hetero.arguments.batch import batch_size_at
from megatron.hetero.arguments.flags_hetero import MEASURED
from megatron.hetero.auto_data_shares import measure_data_shares
from megatron.hetero.checkpoint.checkpointer import Checkpointer
from megatron.hetero.checkpoint.index import TrainState
from megatron.hetero.checkpoint.tensor_names import is_split
from megatron.hetero.console import Console
from megatron.hetero.core_private import gather_parameters
from megatron.hetero.data import MicroBatches, build_data_iterators
from megatron.hetero.experts import loss_factor, sequence_loss_factor, weigh_losses
from megatron.hetero.goodput import GoodputMeter
from megatron.hetero.job import Job
from megatron.hetero.metrics import (
    DataWaitTimes,
    IterationRecord,
    MetricsLogger,
    StepProfiler,
    measured_peak_bytes,
    tflops_per_gpu,
)
from megatron.hetero.model import build_model, return_freed_memory
from megatron.hetero.not_finite import NotFinite, find_not_finite
from megatron.hetero.operator_watch import OperatorWatch
from megatron.hetero.optimizer import StepResult, TrainingOptimizer, build_scheduler
from megatron.hetero.overview import (
    RunResult,
    print_overview,
    print_peak_memory,
    stage_rows,
    write_report,
)
from megatron.hetero.replicas import compare_replicas
from megatron.hetero.run_description import rank_names
from megatron.hetero.schedule import Schedule
from megatron.hetero.step_trace import StepTrace
from megatron.hetero.stop_signals import StopCheck, StopSignals
from megatron.hetero.straggler import StragglerLog
from megatron.hetero.telemetry import open_telemetry
from megatron.hetero.timers import Timers, clock_of
from megatron.hetero.timing_log import TimingLog
from megatron.hetero.weights import holds_first_copy


class Trainer:
    """One rank's run.

    Constructor and public methods are collective over all ranks of the job, except `close`.
    """

    def __init__(self, job: Job, *, start_time: float, signals: StopSignals) -> None:
        """Build the model and everything that trains it, and load the checkpoint, if there is one.

        Args:
            job: what the ranks have set up together.
            start_time: program start, from `time.monotonic()`, for --exit-duration-in-mins.
            signals: those that end the run.
        """
        self.args: argparse.Namespace = job.args
        self._signals = signals
        with ExitStack() as on_close:
            start = job.checkpoint.train_state.iteration
            self.console = Console(
                is_logger=job.rank == 0, total_iterations=self.args.train_iters, start=start
            )
            on_close.callback(self.console.close)
            measures = self.args.hetero_data_shares == MEASURED and not self.args.skip_train
            self.model = build_model(
                self.args,
                plan=job.plan,
                rank=job.rank,
                groups=job.groups,
                device=job.device,
                initializes=lambda name: (
                    measures or not job.checkpoint.covers(name, rows=self.args.padded_vocab_size)
                ),
            )
            vendor = job.identities[job.rank].vendor
            slow_down(*self.model.chunks, environ={**os.environ, VENDOR_VARIABLE: vendor})
            if measures:
                job, measured = measure_data_shares(job, self.model)
                self.console.line(measured)
            self.job = job
            # The measurement has a schedule of its own, and they must be weighed once.
            weigh_losses(
                self.model.chunks,
                loss_factor(job.args, job.plan, job.coordinate),
                sequence_factor=sequence_loss_factor(job.args, job.plan, job.coordinate),
            )
            self._telemetry = open_telemetry(job, warn=self.console.warning)
            if self._telemetry is not None:
                on_close.callback(self._telemetry.close)
            self._timers = Timers(level=self.args.timing_log_level, clock=clock_of(job.device))
            self.model.config.timers = self._timers
            self._recorder = recorder()
            self._recorder.memory = partial(measured_peak_bytes, job.device)
            self.optimizer = TrainingOptimizer(
                self.args,
                model=self.model,
                plan=job.plan,
                rank=job.rank,
                statistics=job.statistics,
                device=job.device,
                timers=self._timers,
            )
            self._stragglers = StragglerLog(job, self.console)
            on_close.callback(self._stragglers.close)
            self.schedule = Schedule(
                job,
                self.model,
                self._timers,
                around_batch=self._stragglers.batch,
                around_model=self._stragglers.forward,
            )
            self._trace = StepTrace(job, self.schedule, self.console)
            self._operators = OperatorWatch(job, self.model, self.console)
            self.metrics_logger = MetricsLogger(
                self.args,
                written=job.outputs.written,
                logs_to_wandb=job.rank == 0,
                resumed_at=start,
                warn=self.console.warning,
            )
            on_close.callback(self.metrics_logger.close)
            self._stage_rows = stage_rows(job, self.model)
            self._print_overview()
            self.scheduler = build_scheduler(
                job.checkpoint.schedule, self.optimizer, position=job.checkpoint.schedule_position
            )
            self.checkpointer = Checkpointer(
                job,
                model=self.model,
                optimizer=self.optimizer,
                scheduler=self.scheduler,
                console=self.console,
            )
            on_close.callback(self.checkpointer.close)
            load_began = time.monotonic()
            with self._recorder.during(Phase.LOAD):
                progress = self.checkpointer.resume()
                self.model.fp8.restart()
            self._goodput = GoodputMeter(
                self._recorder,
                checkpoint=job.checkpoint,
                start_time=start_time,
                load_seconds=time.monotonic() - load_began,
                say=self.console.line,
            )
            on_close.callback(self._goodput.close)
            self.iteration = progress.iteration
            self.consumed_samples = progress.consumed_train_samples
            self.consumed_valid_samples = progress.consumed_valid_samples
            self.skipped = progress.skipped_iterations
            self._last_loss_scale: float | None = None
            self._last_was_skipped = False
            self.steps = 0
            """Iterations of this launch."""
            self.last_record: IterationRecord | None = None
            self.data_wait_times = DataWaitTimes()
            self._unlogged: list[IterationRecord] = []
            self._stop = StopCheck(
                job.statistics.gather,
                signals=signals if self.args.exit_signal_handler else None,
                minutes=self.args.exit_duration_in_mins,
                start_time=start_time,
            )
            self._timing = TimingLog(
                self.args,
                timers=self._timers,
                plan=job.plan,
                identities=job.identities,
                statistics=job.statistics,
                console=self.console,
                metrics_logger=self.metrics_logger,
            )
            self._profiler = StepProfiler(self.args, rank=job.rank, device=job.device)
            self._valid_batches = self._validation_batches()
            self._on_close = on_close.pop_all()

    def close(self) -> None:
        """Close checkpoints, metrics and console; also after a failure. Not collective."""
        self._on_close.close()

    def run(self) -> None:
        """Train to the end of the run, or until it is stopped, then evaluate and report."""
        batches = None if self.args.skip_train else self._training_batches()
        self._signals.begin()
        stopped = batches is not None and self.train(batches)
        self.checkpointer.finish()
        if not stopped:
            self.validate(" on validation set")
            if self._stop.reason is None:
                self._test()
        self._goodput.finish()
        # Collective: not decided by this rank's own flag, which nodes may lack.
        if "hetero_report" in self.job.outputs.named:
            gather_parameters(self.model.chunks)
            result = RunResult(
                model=self.model,
                iteration=self.iteration,
                consumed_samples=self.consumed_samples,
                skipped=self.skipped,
                last_loss=self.last_record.loss if self.last_record else None,
                data_wait_times=self.data_wait_times,
                save_timings=self.checkpointer.timings,
                goodput=self._goodput.goodput(),
            )
            write_report(self.job, result, self._stage_rows, self.console)

    def train(self, batches: list[Iterator[Any]]) -> bool:
        """Run to --train-iters (or --train-samples), evaluating and saving on the way.

        Returns whether the run was asked to stop; final evaluations are then skipped. A signal or
        --exit-duration-in-mins counts in the last iteration too, --exit-interval only before it.
        """
        if self.args.manual_gc:
            gc.disable()
        self.model.train()
        while not self._is_finished():
            self._profiler.before_step(self.iteration)
            self._trace.before_step(self.iteration + 1)
            self.train_step(batches)
            self._profiler.after_step(self.iteration)
            if self.steps == 1:
                self._require_fp8()
                _freeze_gc()
            if self.steps == 1 or self._is_multiple(self.args.log_memory_interval):
                print_peak_memory(self.job, self.console, iteration=self.iteration)
            self._collect_garbage()
            if self._is_multiple(self.args.eval_interval) and self._stop.reason is None:
                self.validate()
            stops = self._should_stop(agree=bool(self.args.exit_duration_in_mins))
            saved = self._save_if_due(last=stops or self._is_finished())
            self._trace.after_step(self.iteration)
            # Ask again after a save: another step and another save may take too long.
            if stops or (saved and self._should_stop(agree=True)):
                break
        if not self.steps and self.args.save != self.args.load:
            # No iterations left: save the loaded checkpoint in this run's layout.
            self._save_if_due(last=True)
        self._profiler.close()
        self._trace.close()
        if self._unlogged:
            self._log_pending()
            if (timing := self._timing.rest(self.iteration)) is not None:
                self._timing.show(timing)
        return self._stop.reason is not None or not self._is_finished()

    def train_step(self, batches: list[Iterator[Any]]) -> None:
        """One iteration: forward, backward, update, record."""
        began = time.perf_counter()
        self._goodput.begin_step()
        self._recorder.begin_iteration(self.iteration + 1)
        self._trace.begin_step()
        if self._telemetry is not None:
            self._telemetry.begin_step(self.iteration + 1)
        self._timers.begin()
        batch_size = batch_size_at(self.args, self.consumed_samples)
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self._operators.during(self.iteration + 1):
            loss_sum, tokens = self.schedule.run(
                batches, batch_size=batch_size, micro_batch_size=self.args.micro_batch_size
            )
        self._operators.compare()
        # The GPU is busy with this iteration, so the host has time for the previous ones.
        self._timers.count_completed()
        data_wait = sum((b.pop_wait_seconds() for b in batches if isinstance(b, MicroBatches)), 0.0)
        self.data_wait_times.add(data_wait)
        self._recorder.data_wait_seconds += data_wait
        self.checkpointer.before_optimizer_step()
        self.model.fp8.end_step()
        with self._timers("optimizer"):
            outcome = self.optimizer.step(
                loss_sum=loss_sum,
                tokens=tokens,
                link_bytes=self._boundary_bytes(),
                summed=self.schedule.take_sums(),
                check_links=self.job.check_links,
                stop_signal=self._stop.own_signal,
            )
        self.model.fp8.weights_changed()
        self._stop.accept_signal(outcome.stop_signal)
        self.iteration += 1
        self.consumed_samples += batch_size
        if not outcome.updated:
            cause = self._find_not_finite(outcome)
            self._tell_skipped(outcome, cause)
            self._require_finite(outcome, batch_size, cause)
        self._last_was_skipped = not outcome.updated
        if outcome.updated:
            self.scheduler.step(increment=batch_size)
            self.checkpointer.after_optimizer_step()
        else:
            self.skipped += 1
        # As in Megatron's log: the learning rate of the next iteration.
        learning_rate = get_canonical_lr_for_logging(self.optimizer.inner.param_groups)
        self._timers.end()
        # Synchronises with the device, so that the update counts towards this iteration's time.
        loss_scale = self.optimizer.loss_scale
        self._tell_loss_scale(loss_scale)
        # Before the clock is read: what the trace has of a step lies inside the measured time.
        self._recorder.set_phase(Phase.OTHER)
        seconds = time.perf_counter() - began
        self._trace.end_step(iteration=self.iteration, seconds=seconds)
        self._release_cache()
        if self._is_multiple(self.args.check_weight_hash_across_dp_replicas_interval):
            self._compare_replicas()
        self._record(outcome, batch_size, learning_rate, loss_scale, seconds, data_wait)

    def validate(self, what: str = "") -> None:
        """Evaluate on the validation samples after those of the previous evaluation.

        As in Megatron, also those of the final evaluation, and of the one after a resume. Nothing
        is done without --eval-iters, or if the validation split is too small.
        """
        if self._valid_batches is None:
            return
        self._evaluate(
            self._valid_batches, name="validation", when=f"at iteration {self.iteration}{what}"
        )
        self.consumed_valid_samples += self.args.eval_iters * self.args.eval_global_batch_size
        self.model.train()

    def _test(self) -> None:
        if not self._can_evaluate(self.job.datasets.sizes.test):
            return
        batches = self._batches(
            self.job.datasets.test, micro_batch_size=self.args.eval_micro_batch_size, endless=True
        )
        self._evaluate(batches, name="test", when=f"at iteration {self.iteration} on test set")

    def _evaluate(self, batches: list[Iterator[Any]], *, name: str, when: str) -> None:
        """Log the mean token loss over --eval-iters global batches.

        A signal, or the end of the run's time, ends it without a result.
        """
        with self._recorder.during(Phase.EVALUATION):
            self._recorder.is_evaluating = True
            try:
                self._run_evaluation(batches, name=name, when=when)
            finally:
                self._recorder.is_evaluating = False

    def _run_evaluation(self, batches: list[Iterator[Any]], *, name: str, when: str) -> None:
        args = self.args
        self.model.train(False)
        total = torch.zeros(2, dtype=torch.float64, device=self.job.device)
        with torch.no_grad():
            for batch in range(args.eval_iters):
                if self._stop.agree():
                    self.console.line(
                        f"evaluation {when} ended after {batch} of {args.eval_iters} batches, as "
                        f"{self._stop.reason} asks"
                    )
                    return
                total += self.schedule.run(
                    batches,
                    batch_size=args.eval_global_batch_size,
                    micro_batch_size=args.eval_micro_batch_size,
                    forward_only=True,
                )
        rows = self.job.statistics.gather(total, check=self.job.check_links)
        loss_sum, tokens = math.fsum(r[0] for r in rows), math.fsum(r[1] for r in rows)
        loss = loss_sum / tokens if tokens else math.nan
        perplexity = math.exp(min(20.0, loss))
        # Megatron's words, which call the test set's loss one of validation too.
        self.console.line(
            f" validation loss {when} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} |"
        )
        self._add_incident(
            "evaluation",
            f"{name} loss {loss:.6f}, {when}",
            split=name,
            loss=_or_none(loss),
            perplexity=_or_none(perplexity),
        )
        self.metrics_logger.evaluation(
            name, loss=loss, perplexity=perplexity, iteration=self.iteration
        )

    def _batches(
        self, dataset: Any, *, micro_batch_size: int, consumed: int = 0, endless: bool = False
    ) -> list[Any]:
        """An iterator of micro-batches for each model chunk."""
        return build_data_iterators(
            self.args,
            dataset,
            coordinate=self.job.coordinate,
            plan=self.job.plan,
            consumed=consumed,
            device=self.job.device,
            endless=endless,
            micro_batch_size=micro_batch_size,
        )

    def _training_batches(self) -> list[Any]:
        batches = self._batches(
            self.job.datasets.train,
            micro_batch_size=self.args.micro_batch_size,
            consumed=self.consumed_samples,
        )
        return_freed_memory()  # of building, loading and describing the model
        return batches

    def _validation_batches(self) -> list[Any] | None:
        if not self._can_evaluate(self.job.datasets.sizes.valid):
            return None
        return self._batches(
            self.job.datasets.valid,
            micro_batch_size=self.args.eval_micro_batch_size,
            consumed=0 if self.args.skip_train else self.consumed_valid_samples,
            endless=True,
        )

    def _can_evaluate(self, samples: int) -> bool:
        """Returns whether a split of so many samples has one row of micro-batches."""
        row = self.args.eval_micro_batch_size * sum(self.args.data_shares)
        return bool(self.args.eval_iters) and samples >= row

    def _print_overview(self) -> None:
        job, args, line = self.job, self.args, self.console.line
        print_overview(job, self._stage_rows, self.console)
        if slowed := os.environ.get(SLOWDOWN_VARIABLE):
            line(f"{SLOWDOWN_VARIABLE}={slowed}: layers take so many times as long (simulated)")
        if args.delay_wgrad_compute and not self.model.kernels.weight_gradient:
            line(
                "--delay-wgrad-compute has no effect on this stage: its PyTorch cannot accumulate "
                "a GEMM into gradients of a different dtype"
            )
        if job.device.type == "cuda":
            line(f"fused kernels: {self.model.kernels.names()}")
        if args.eval_iters and not self._can_evaluate(job.datasets.sizes.valid):
            line(
                "no evaluation: the validation split is too small for one step over all ranks; "
                "give --split a larger second number"
            )

    def _require_fp8(self) -> None:
        names = rank_names(self.job.plan, self.job.identities)
        self.model.fp8.require_products(rank=names[self.job.rank])

    def _release_cache(self) -> None:
        if self.args.empty_unused_memory_level and self.job.device.type == "cuda":
            torch.cuda.empty_cache()

    def _is_multiple(self, interval: int | None) -> bool:
        if not interval:
            return False
        return self.iteration % interval == 0

    def _collect_garbage(self) -> None:
        """With --manual-gc, collect on all ranks in the same iterations."""
        if self.args.manual_gc and self._is_multiple(self.args.manual_gc_interval):
            gc.collect()

    def _is_finished(self) -> bool:
        last: int = self.args.train_iters
        return self.iteration >= last

    def _save_if_due(self, *, last: bool) -> bool:
        """Save what is due, all if this is the `last` chance. Returns whether disk was due."""
        self.checkpointer.poll()
        due = last or self.checkpointer.due(self.iteration)
        # What ends now is not resumed from memory.
        in_memory = not last and self.checkpointer.due_in_memory(self.iteration)
        if in_memory or (due and self.args.save is not None):
            state = TrainState(
                iteration=self.iteration,
                consumed_train_samples=self.consumed_samples,
                consumed_valid_samples=self.consumed_valid_samples,
                skipped_iterations=self.skipped,
                step_seconds=self._goodput.kept_seconds,
            )
            interval = self.args.check_weight_hash_across_dp_replicas_interval
            if interval and not self._is_multiple(interval):
                # What is resumed from is to be of before any corruption that is found later.
                self._compare_replicas()
            with self._recorder.during(Phase.SAVE):
                if due:
                    self.checkpointer.save(state)
                if in_memory:
                    self.checkpointer.save_in_memory(state)
        return due

    def _should_stop(self, *, agree: bool) -> bool:
        """Returns whether to end the run after this iteration, and prints why.

        With `agree`, asks all ranks first, which is collective. A signal that a rank had received
        when the weights were updated is known without it.
        """
        if agree:
            self._stop.agree()
        reason = self._stop.reason
        if reason is None and self._is_multiple(self.args.exit_interval):
            reason = "--exit-interval"
        if reason is not None:
            self.console.line(f"stopping at iteration {self.iteration}, as {reason} asks")
        return reason is not None

    def _boundary_bytes(self) -> int:
        links = self.job.groups.data_links()
        if self.job.links is not None:
            links = links + self.job.links.boundary()
        return sum(link.counters.bytes_sent for link in links)

    def _add_incident(self, kind: str, text: str, **more: Any) -> None:
        """What all ranks know, from one of them."""
        if self.job.rank == 0:
            self._recorder.add_incident(kind, text, **more)

    def _find_not_finite(self, outcome: StepResult) -> NotFinite | None:
        """Collective. Of the first of several in a row; none of an overflow of fp16."""
        if outcome.grad_norm is None or self._last_was_skipped:
            return None
        return find_not_finite(
            self.model.named_parameters(),
            plan=self.job.plan,
            statistics=self.job.statistics,
            names=rank_names(self.job.plan, self.job.identities),
        )

    def _tell_skipped(self, outcome: StepResult, cause: NotFinite | None) -> None:
        """An incident; and a line for the first of several in a row that is no overflow of fp16."""
        norm = "inf" if outcome.grad_norm is None else f"{outcome.grad_norm:g}"
        if not math.isfinite(outcome.loss):
            kind, what = "nan", f"the loss of iteration {self.iteration} is {outcome.loss}"
        elif outcome.grad_norm is not None and math.isnan(outcome.grad_norm):
            kind, what = "nan", f"the gradient norm of iteration {self.iteration} is nan"
        else:
            kind, what = "skipped", f"the gradient norm of iteration {self.iteration} is {norm}"
        text = f"{what}; its weights were not updated"
        more: dict[str, Any] = {}
        if cause is not None:
            text, more = f"{text}; {cause.text}", {"ranks": list(cause.ranks)}
        self._add_incident(
            kind, text, loss=_or_none(outcome.loss), loss_scale=self._last_loss_scale, **more
        )
        goes_on = not self.args.check_for_nan_in_loss_and_grad
        if kind == "nan" and goes_on and not self._last_was_skipped:
            self.console.line(f"warning: {text}, and training goes on")

    def _tell_loss_scale(self, scale: float) -> None:
        before, self._last_loss_scale = self._last_loss_scale, scale
        if before is not None and before != scale:
            self._add_incident("loss scale", f"from {before:g} to {scale:g}", loss_scale=scale)

    def _require_finite(
        self, outcome: StepResult, batch_size: int, cause: NotFinite | None
    ) -> None:
        """Raise HeteroError for a skipped update. A dynamic loss scale turns this check off."""
        if not self.args.check_for_nan_in_loss_and_grad:
            return
        loss_is_finite = math.isfinite(outcome.loss)
        what = "gradient norm" if loss_is_finite else "loss"
        value = outcome.grad_norm if loss_is_finite else outcome.loss
        scale = "" if self.args.loss_scale is None else " or --loss-scale"
        raise HeteroError(
            f"the {what} of iteration {self.iteration} is {'inf' if value is None else value}; its "
            f"weights were not updated{'' if cause is None else f'; {cause.text}'}: lower "
            f"--lr{scale}, look at the data of these samples "
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
        goodput = self._goodput.end_step(self.iteration, seconds=seconds)
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
            goodput=goodput,
            simulated=self.job.simulated,
            more=self.schedule.read_sums(outcome.summed),
        )
        self.steps += 1
        self.last_record = record
        scalars = record.scalars()
        self._recorder.end_iteration(seconds=seconds, tokens=record.consumed_tokens, values=scalars)
        if self._telemetry is not None:
            self._telemetry.end_step({f"megatron.{name}": value for name, value in scalars.items()})
        logged = self._is_multiple(self.args.log_interval)
        timing = self._timing.after(self.iteration, logged=logged)
        self.metrics_logger.iteration(
            record, timing=None if timing is None else self._timing.as_json(timing)
        )
        self.console.advance(record)
        self._unlogged.append(record)
        if logged:
            self._log_pending()
        self._stragglers.after(tokens=tokens, logged=logged)
        self._operators.tell(self.iteration)
        if timing is not None:
            self._timing.show(timing)

    def _compare_replicas(self) -> None:
        gather_parameters(self.model.chunks)
        compare_replicas(
            self.model.named_weights(),
            tensor_rank=self.model.tensor_rank,
            tied_copy=self.model.tied_copy,
            statistics=self.job.statistics,
            names=rank_names(self.job.plan, self.job.identities),
            iteration=self.iteration,
        )

    def _params_norm(self) -> float | None:
        """L2 norm of all weights, with --log-params-norm."""
        if not self.args.log_params_norm:
            return None
        gather_parameters(self.model.chunks)
        square = torch.zeros(1, dtype=torch.float64, device=self.job.device)
        coordinate = self.job.coordinate
        for name, parameter in self.model.named_parameters():
            is_copy = name == self.model.tied_copy
            rank, size = self.model.tensor_rank.of(name)
            is_counted = is_split(parameter, size) or rank == 0
            if holds_first_copy(coordinate, name) and is_counted and not is_copy:
                square += parameter.detach().double().square().sum()
        return math.sqrt(math.fsum(row[0] for row in self.job.statistics.gather(square)))

    def _log_pending(self) -> None:
        self.console.iteration(self._unlogged)
        self._unlogged = []


def _or_none(value: float) -> float | None:
    """None for a value that JSON lacks."""
    return value if math.isfinite(value) else None


def _freeze_gc() -> None:
    """Exclude all current objects from later garbage collections.

    After the first iteration nearly all of them live until the end of the run (libraries, model),
    and a full collection would visit each one while holding the GIL.
    """
    gc.collect()
    gc.freeze()
