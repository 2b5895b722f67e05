"""Writes metrics to --metrics-file, TensorBoard and Weights & Biases.

Each by one rank: W&B by rank 0, a file or folder by the lowest rank that names it.

An I/O error disables the output concerned with one warning; training continues.
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
from megatron.hetero.metrics import IterationRecord
from megatron.hetero.output_folders import FILES


def check_outputs(args: argparse.Namespace, written: frozenset[str], *, is_rank_0: bool) -> None:
    """Raise UserError at startup for outputs of this rank that cannot be written.

    `written`: the flags whose file or folder it writes.
    """
    logs_to_wandb = is_rank_0 and args.wandb_project
    if logs_to_wandb:
        try:
            import wandb  # noqa: F401
        except ImportError as error:
            raise UserError(
                "--wandb-project needs wandb; install it with pip install '.[wandb]'"
            ) from error
    for name in FILES:
        if name not in written:
            continue
        flag, path = f"--{name.replace('_', '-')}", Path(getattr(args, name))
        try:
            path.absolute().parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{flag} {path}: its folder cannot be made ({error.strerror}); name another file"
            ) from error
        _check_file(flag, path)
    if "tensorboard_dir" in written:
        _check_folder("--tensorboard-dir", Path(args.tensorboard_dir))
    if logs_to_wandb and args.wandb_save_dir:
        # W&B silently falls back to another folder if this one is missing.
        _check_folder("--wandb-save-dir", Path(args.wandb_save_dir))


def _check_file(flag: str, path: Path) -> None:
    """Open the file for appending; removes it again if it did not exist."""
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
    """Create the folder and a temporary file in it."""
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


def _truncate_after(path: Path, iteration: int) -> None:
    """Drop records after `iteration`, which a resumed run will write again."""
    kept = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            if json.loads(line)["iteration"] <= iteration:
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError):
            continue  # the last line of a killed run
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(b"".join(kept))
    temporary.replace(path)


class _MetricsFile:
    """--metrics-file, in JSON lines. Methods raise OSError."""

    def __init__(self, path: Path, *, resumed_at: int) -> None:
        if resumed_at:
            _truncate_after(path, resumed_at)
        # Unbuffered, so that a crash loses no record.
        self._file = path.open("ab" if resumed_at else "wb", buffering=0)
        self._size = self._file.tell()

    def add(self, record: IterationRecord, more: dict[str, Any]) -> None:
        line = json.dumps(record.as_json() | more, allow_nan=False).encode() + b"\n"
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            # Remove the partial line that a full disk leaves.
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            raise
        self._size += len(line)

    def close(self) -> None:
        self._file.close()


class _TensorBoardFile:
    """TensorBoard's event file. Its writer thread reports an OSError at a later call."""

    def __init__(self, args: argparse.Namespace, *, resumed_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._hook = threading.excepthook
        # The writer thread would print a traceback as well.
        threading.excepthook = self._ignore_os_errors
        self._writer = SummaryWriter(
            log_dir=args.tensorboard_dir,
            max_queue=args.tensorboard_queue_size,
            # Discard what a killed run logged after its last checkpoint.
            purge_step=resumed_at + 1 if resumed_at else None,
        )

    def _ignore_os_errors(self, failure: threading.ExceptHookArgs) -> None:
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


class MetricsLogger:
    """Writes metrics to the outputs that the flags name; `warn` receives warnings."""

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        written: frozenset[str],
        logs_to_wandb: bool,
        resumed_at: int = 0,
        warn: Callable[[str], None] = print,
    ) -> None:
        """`written`: the flags whose file or folder this rank writes."""
        self._interval = args.tensorboard_log_interval
        self._args = args
        self._warn = warn
        self._metrics: _MetricsFile | None = None
        self._events: _TensorBoardFile | None = None
        self._wandb: Any = None
        if "metrics_file" in written:
            with self._metrics_file_errors():
                self._metrics = _MetricsFile(Path(args.metrics_file), resumed_at=resumed_at)
        if "tensorboard_dir" in written:
            with self._tensorboard_errors():
                self._events = _TensorBoardFile(args, resumed_at=resumed_at)
        if logs_to_wandb and args.wandb_project:
            import wandb

            self._wandb = wandb.init(
                project=args.wandb_project,
                name=args.wandb_exp_name or None,
                entity=args.wandb_entity or None,
                dir=args.wandb_save_dir or None,
                config={k: v for k, v in vars(args).items() if not k.startswith("_")},
            )

    @contextlib.contextmanager
    def _metrics_file_errors(self) -> Iterator[None]:
        """Turn an OSError of the body into a warning, and disable the metrics file."""
        try:
            yield
        except OSError as error:
            failed, self._metrics = self._metrics, None
            self._warn_disabled(f"--metrics-file {self._args.metrics_file}", error, failed)

    @contextlib.contextmanager
    def _tensorboard_errors(self) -> Iterator[None]:
        """Turn an OSError of the body into a warning, and disable TensorBoard."""
        try:
            yield
        except OSError as error:
            failed, self._events = self._events, None
            self._warn_disabled(f"--tensorboard-dir {self._args.tensorboard_dir}", error, failed)

    def _warn_disabled(
        self, where: str, error: OSError, failed: _MetricsFile | _TensorBoardFile | None
    ) -> None:
        self._warn(
            f"warning: {where} can no longer be written ({error.strerror or error}); training goes "
            "on and writes nothing more there"
        )
        if failed is not None:
            # Closing may raise the same error again.
            with contextlib.suppress(OSError):
                failed.close()

    def iteration(self, record: IterationRecord, *, timing: dict[str, Any] | None = None) -> None:
        """Write the record of one iteration; `timing` is the interval's, in logged iterations."""
        if self._metrics is not None:
            with self._metrics_file_errors():
                self._metrics.add(record, {} if timing is None else {"timing": timing})
        if record.iteration % self._interval == 0:
            self._scalars(self._selected(record), step=record.iteration)

    def timers(self, seconds: dict[str, float], *, step: int) -> None:
        """Write timers, with --log-timers-to-tensorboard."""
        self._scalars(dict(seconds), step=step)

    def _selected(self, record: IterationRecord) -> dict[str, float | None]:
        """Scalars under Megatron's names: those always shown, and those that flags select."""
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
            with self._tensorboard_errors():
                self._events.add(present, step=step)
        if self._wandb is not None:
            self._wandb.log(present, step=step)

    def close(self) -> None:
        if self._metrics is not None:
            with self._metrics_file_errors():
                self._metrics.close()
        if self._events is not None:
            with self._tensorboard_errors():
                self._events.close()
        if self._wandb is not None:
            self._wandb.finish()
