"""Runs an initialized job on one rank: builds the model, trains, evaluates, writes the report."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from hetero.data.slowdown import SLOWDOWN_VARIABLE, slow_down
from hetero.startup.identity import VENDOR_VARIABLE
from megatron.hetero.arguments.flags_hetero import MEASURED
from megatron.hetero.auto_data_shares import measure_data_shares
from megatron.hetero.checkpoint.checkpointer import Checkpointer
from megatron.hetero.console import Console
from megatron.hetero.core_private import gather_parameters
from megatron.hetero.data import build_data_iterators
from megatron.hetero.freed_memory import return_freed_memory
from megatron.hetero.job import Job
from megatron.hetero.metrics_logger import MetricsLogger
from megatron.hetero.model import build_model
from megatron.hetero.optimizer import TrainingOptimizer, build_scheduler
from megatron.hetero.overview import (
    print_overview,
    print_peak_memory,
    stage_rows,
    write_report,
)
from megatron.hetero.schedule import Schedule
from megatron.hetero.stop_check import StopCheck
from megatron.hetero.stop_signals import StopSignals
from megatron.hetero.timing.clocks import clock_of
from megatron.hetero.timing.timers import Timers
from megatron.hetero.trainer import Evaluator, Trainer


def run_job(job: Job, *, began: float, signals: StopSignals) -> None:
    """Train to the end of the run, or until the exit signal.

    `began` is when the program did, by `time.monotonic`, for --exit-duration-in-mins.
    """
    with ExitStack() as stack:
        _run(job, stack, signals, began)


def _run(job: Job, stack: ExitStack, signals: StopSignals, began: float) -> None:
    args = job.args
    start = job.checkpoint.train_state.iteration
    console = Console(is_logger=job.rank == 0, total_iterations=args.train_iters, start=start)
    stack.callback(console.close)
    model = build_model(args, plan=job.plan, rank=job.rank, groups=job.groups, device=job.device)
    vendor = job.identities[job.rank].vendor
    slow_down(*model.chunks, environ={**os.environ, VENDOR_VARIABLE: vendor})
    if args.hetero_data_shares == MEASURED and not args.skip_train:
        job, measured = measure_data_shares(job, model)
        console.line(measured)
    timers = Timers(level=args.timing_log_level, clock=clock_of(job.device))
    model.config.timers = timers if timers.level else None
    optimizer = TrainingOptimizer(
        args,
        model=model,
        plan=job.plan,
        rank=job.rank,
        statistics=job.statistics,
        device=job.device,
        timers=timers,
    )
    schedule = Schedule(job, model, timers)
    metrics_logger = MetricsLogger(
        args,
        written=job.outputs.written,
        logs_to_wandb=job.rank == 0,
        resumed_at=start,
        warn=console.warning,
    )
    stack.callback(metrics_logger.close)
    rows = stage_rows(job, model)
    print_overview(job, rows, console)
    if slowed := os.environ.get(SLOWDOWN_VARIABLE):
        console.line(f"{SLOWDOWN_VARIABLE}={slowed}: layers take so many times as long (simulated)")
    if args.delay_wgrad_compute and not model.kernels.weight_gradient:
        console.line(
            "--delay-wgrad-compute: nothing is delayed on this stage, whose torch has no product "
            "that adds to gradients of another type than the weights'"
        )
    if job.device.type == "cuda":
        console.line(f"fused kernels: {model.kernels.names()}")
    if args.eval_iters and not _is_enough(job, job.datasets.sizes.valid):
        console.line(
            "no evaluation: the validation split is too small for one step over all ranks; give "
            "--split a larger second number"
        )
    scheduler = build_scheduler(
        job.checkpoint.schedule, optimizer, position=job.checkpoint.schedule_position
    )
    checkpointer = Checkpointer(
        job, model=model, optimizer=optimizer, scheduler=scheduler, console=console
    )
    stack.callback(checkpointer.close)
    stop = StopCheck(
        args,
        statistics=job.statistics,
        signals=signals if args.exit_signal_handler else None,
        began=began,
    )
    trainer = Trainer(
        job,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        schedule=schedule,
        console=console,
        metrics_logger=metrics_logger,
        report_memory=lambda iteration: print_peak_memory(job, console, iteration=iteration),
        checkpointer=checkpointer,
        progress=checkpointer.resume(),
        stop=stop,
        timers=timers,
    )
    evaluator = Evaluator(
        job,
        model=model,
        schedule=schedule,
        console=console,
        metrics_logger=metrics_logger,
        stop=stop,
    )
    validate = _validation(job, trainer, evaluator)
    if not args.skip_train:
        iterators = _iterators(
            job,
            job.datasets.train,
            micro_batch_size=args.micro_batch_size,
            consumed=trainer.consumed_samples,
        )
        return_freed_memory()  # of building, loading and describing the model
        signals.begin()
        trainer.train(iterators, validate)
    signals.begin()
    checkpointer.finish()
    if not trainer.stopped_early:
        if validate is not None:
            validate(" on validation set")
        if stop.reason is None:
            _test(job, trainer, evaluator)
    # Collective: not decided by this rank's own flag, which nodes may lack.
    if "hetero_report" in job.outputs.named:
        gather_parameters(model.chunks)
        write_report(job, trainer, rows, console)


def _iterators(
    job: Job, dataset: Any, *, micro_batch_size: int, consumed: int = 0, endless: bool = False
) -> list[Any]:
    return build_data_iterators(
        job.args,
        dataset,
        coordinate=job.coordinate,
        plan=job.plan,
        consumed=consumed,
        device=job.device,
        endless=endless,
        micro_batch_size=micro_batch_size,
    )


def _validation(job: Job, trainer: Trainer, evaluator: Evaluator) -> Callable[..., None] | None:
    """A function that evaluates on the validation samples after those of the previous evaluation.

    As in Megatron, also those of the final evaluation, and of the one after a resume.
    """
    if not job.args.eval_iters or not _is_enough(job, job.datasets.sizes.valid):
        return None
    iterators = _iterators(
        job,
        job.datasets.valid,
        micro_batch_size=job.args.eval_micro_batch_size,
        consumed=0 if job.args.skip_train else trainer.consumed_valid_samples,
        endless=True,
    )

    def validate(what: str = "") -> None:
        when = f"at iteration {trainer.iteration}{what}"
        evaluator.run(iterators, name="validation", iteration=trainer.iteration, when=when)
        trainer.consumed_valid_samples += job.args.eval_iters * job.args.eval_global_batch_size

    return validate


def _test(job: Job, trainer: Trainer, evaluator: Evaluator) -> None:
    if not job.args.eval_iters or not _is_enough(job, job.datasets.sizes.test):
        return
    iterators = _iterators(
        job, job.datasets.test, micro_batch_size=job.args.eval_micro_batch_size, endless=True
    )
    when = f"at iteration {trainer.iteration} on test set"
    evaluator.run(iterators, name="test", iteration=trainer.iteration, when=when)


def _is_enough(job: Job, samples: int) -> bool:
    """Whether a split has samples for one micro-batch row over all ranks."""
    return samples >= job.args.eval_micro_batch_size * sum(job.args.data_shares)
