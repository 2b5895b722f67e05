"""Where the numbers go: the metrics file, TensorBoard, Weights & Biases. Rank 0 only.

A disk that is full, or has gone, costs the numbers that were to be written to it, and not the run:
one warning, and training goes on without them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hetero.errors import UserError
from megatron.training.metrics import IterationRecord


def check_outputs(args: argparse.Namespace) -> None:
    """Refuse outputs that cannot be written, before hours of training depend on them."""
    for flag, path in (
        ("--metrics-file", args.metrics_file),
        ("--hetero-report", args.hetero_report),
    ):
        if path is None:
            continue
        parent = Path(path).absolute().parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{flag} {path}: its folder cannot be made ({error.strerror}); name another file"
            ) from error
        _check_file(flag, Path(path))
    folders = {"--tensorboard-dir": args.tensorboard_dir}
    if args.wandb_project:
        # W&B would take another folder where this one is missing.
        folders["--wandb-save-dir"] = args.wandb_save_dir
    for flag, folder in folders.items():
        if folder:
            _check_folder(flag, Path(folder))
    if args.wandb_project:
        try:
            import wandb  # noqa: F401
        except ImportError as error:
            raise UserError(
                "--wandb-project needs wandb; install it with pip install '.[wandb]'"
            ) from error


def _check_file(flag: str, path: Path) -> None:
    """Open it for writing as training will, and leave no trace."""
    existed = path.exists()
    if existed and not path.is_file():
        raise UserError(f"{flag} {path} cannot be written: it is no regular file; name another")
    try:
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise UserError(
            f"{flag} {path} cannot be written ({error.strerror}); name another file"
        ) from error


def _check_folder(flag: str, folder: Path) -> None:
    """Make it, and write to it as training will, leaving no trace."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{flag} {folder} cannot be made ({error.strerror}); name another folder"
        ) from error
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"{flag} {folder} cannot be written to ({error.strerror}); name another folder"
        ) from error


def _keep_until(path: Path, iteration: int) -> None:
    """Drop the records that a resumed run will write again."""
    kept = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            if json.loads(line)["iteration"] <= iteration:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # the last line of a killed run
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text("".join(kept))
    temporary.replace(path)


class _MetricsFile:
    """The JSON lines of --metrics-file. Its methods raise OSError."""

    def __init__(self, path: Path, *, resumed_at: int) -> None:
        if resumed_at:
            _keep_until(path, resumed_at)
        # Unbuffered: what has been measured is on disk, whatever happens next.
        self._file = path.open("ab" if resumed_at else "wb", buffering=0)
        self._size = self._file.tell()

    def add(self, record: IterationRecord, more: dict[str, Any]) -> None:
        line = json.dumps(record.as_json() | more, allow_nan=False).encode() + b"\n"
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            # A full disk takes a part of a line, which no reader could use.
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            raise
        self._size += len(line)

    def close(self) -> None:
        self._file.close()


class _EventFile:
    """What TensorBoard reads, written by its own thread: an OSError comes with a later call."""

    def __init__(self, args: argparse.Namespace, *, resumed_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._hook = threading.excepthook
        # The thread prints a traceback besides handing its error on.
        threading.excepthook = self._pass_over_its_errors
        self._writer = SummaryWriter(
            log_dir=args.tensorboard_dir,
            max_queue=args.tensorboard_queue_size,
            # What a run that was killed logged after its last checkpoint comes again.
            purge_step=resumed_at + 1 if resumed_at else None,
        )

    def _pass_over_its_errors(self, failure: threading.ExceptHookArgs) -> None:
        if type(failure.thread).__module__.startswith("tensorboard.") and isinstance(
            failure.exc_value, OSError
        ):
            return
        self._hook(failure)

    def add(self, values: dict[str, float], *, step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        try:
            self._writer.close()
        finally:
            threading.excepthook = self._hook


class Recorder:
    """Writes every iteration to the places the flags name; `tell` is given its warnings."""

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        enabled: bool,
        resumed_at: int = 0,
        tell: Callable[[str], None] = print,
    ) -> None:
        self._interval = args.tensorboard_log_interval
        self._args = args
        self._tell = tell
        self._metrics: _MetricsFile | None = None
        self._events: _EventFile | None = None
        self._wandb: Any = None
        if not enabled:
            return
        if args.metrics_file:
            with self._costing_metrics():
                self._metrics = _MetricsFile(Path(args.metrics_file), resumed_at=resumed_at)
        if args.tensorboard_dir:
            with self._costing_events():
                self._events = _EventFile(args, resumed_at=resumed_at)
        if args.wandb_project:
            import wandb

            self._wandb = wandb.init(
                project=args.wandb_project,
                name=args.wandb_exp_name,
                entity=args.wandb_entity or None,
                dir=args.wandb_save_dir or None,
                config={k: v for k, v in vars(args).items() if not k.startswith("_")},
            )

    @contextlib.contextmanager
    def _costing_metrics(self) -> Iterator[None]:
        """An error in here ends the metrics file, and nothing else."""
        try:
            yield
        except OSError as error:
            lost, self._metrics = self._metrics, None
            self._lost(f"--metrics-file {self._args.metrics_file}", error, lost)

    @contextlib.contextmanager
    def _costing_events(self) -> Iterator[None]:
        """The same for TensorBoard."""
        try:
            yield
        except OSError as error:
            lost, self._events = self._events, None
            self._lost(f"--tensorboard-dir {self._args.tensorboard_dir}", error, lost)

    def _lost(self, where: str, error: OSError, lost: _MetricsFile | _EventFile | None) -> None:
        self._tell(
            f"warning: {where} can no longer be written ({error.strerror or error}); training goes "
            "on and writes nothing more there"
        )
        if lost is not None:
            # What could not be written has been reported; closing says it once more.
            with contextlib.suppress(OSError):
                lost.close()

    def iteration(self, record: IterationRecord, *, timing: dict[str, Any] | None = None) -> None:
        """One iteration, with the timers of those since the last log where there are any."""
        if self._metrics is not None:
            with self._costing_metrics():
                self._metrics.add(record, {} if timing is None else {"timing": timing})
        if record.iteration % self._interval == 0:
            self._scalars(self._selected(record), step=record.iteration)

    def timers(self, seconds: dict[str, float], *, step: int) -> None:
        """What --log-timers-to-tensorboard asks for."""
        self._scalars(dict(seconds), step=step)

    def _selected(self, record: IterationRecord) -> dict[str, float | None]:
        """Megatron's names for what its flags select, and what is always shown."""
        values = {
            "lm loss": record.loss,
            "learning-rate": record.learning_rate,
            "grad-norm": record.grad_norm,
            "num-zeros": record.num_zeros,
            "params-norm": record.params_norm,
            "batch-size": record.batch_size,
            "iteration-time": record.elapsed_ms / 1000,
            "throughput": record.tflops_per_gpu,
            "tokens-per-second": record.tokens_per_s,
            "link-bytes": record.link_bytes,
        }
        if self._args.log_loss_scale_to_tensorboard:
            values["loss-scale"] = record.loss_scale
        if self._args.log_world_size_to_tensorboard:
            values["world-size"] = self._args.world_size
        if self._args.log_memory_to_tensorboard:
            values["mem-max-allocated-bytes"] = record.peak_memory_bytes
        return values

    def evaluation(self, name: str, *, loss: float, perplexity: float, iteration: int) -> None:
        values: dict[str, float | None] = {f"lm loss {name}": loss}
        if self._args.log_validation_ppl_to_tensorboard:
            values[f"lm loss {name} ppl"] = perplexity
        self._scalars(values, step=iteration)

    def _scalars(self, values: dict[str, float | None], *, step: int) -> None:
        present = {name: value for name, value in values.items() if value is not None}
        if self._events is not None:
            with self._costing_events():
                self._events.add(present, step=step)
        if self._wandb is not None:
            self._wandb.log(present, step=step)

    def close(self) -> None:
        if self._metrics is not None:
            with self._costing_metrics():
                self._metrics.close()
        if self._events is not None:
            with self._costing_events():
                self._events.close()
        if self._wandb is not None:
            self._wandb.finish()
