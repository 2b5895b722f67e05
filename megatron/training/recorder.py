"""Where the numbers go: the metrics file, TensorBoard, Weights & Biases. Rank 0 only."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from hetero.errors import OutputError, UserError
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


class Recorder:
    """Writes every iteration to the places the flags name."""

    def __init__(self, args: argparse.Namespace, *, enabled: bool, resumed_at: int = 0) -> None:
        self._interval = args.tensorboard_log_interval
        self._args = args
        self._writer: Any = None
        self._wandb: Any = None
        self._file = None
        if not enabled:
            return
        if args.metrics_file:
            if resumed_at:
                _keep_until(Path(args.metrics_file), resumed_at)
            # Line-buffered: what has been measured is on disk, whatever happens next.
            mode = "a" if resumed_at else "w"
            self._file = open(args.metrics_file, mode, buffering=1)  # noqa: SIM115
        if args.tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(
                log_dir=args.tensorboard_dir,
                max_queue=args.tensorboard_queue_size,
                # What a run that was killed logged after its last checkpoint comes again.
                purge_step=resumed_at + 1 if resumed_at else None,
            )
        if args.wandb_project:
            import wandb

            self._wandb = wandb.init(
                project=args.wandb_project,
                name=args.wandb_exp_name,
                entity=args.wandb_entity or None,
                dir=args.wandb_save_dir or None,
                config={k: v for k, v in vars(args).items() if not k.startswith("_")},
            )

    def iteration(self, record: IterationRecord, *, timing: dict[str, Any] | None = None) -> None:
        """One iteration, with the timers of those since the last log where there are any."""
        self._write(record, {} if timing is None else {"timing": timing})
        if record.iteration % self._interval == 0:
            self._scalars(self._selected(record), step=record.iteration)

    def timers(self, seconds: dict[str, float], *, step: int) -> None:
        """What --log-timers-to-tensorboard asks for."""
        self._scalars(dict(seconds), step=step)

    def _write(self, record: IterationRecord, more: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record.as_json() | more, allow_nan=False) + "\n")
        except OSError as error:
            raise OutputError(
                f"--metrics-file {self._file.name} can no longer be written ({error.strerror}) at "
                f"iteration {record.iteration}; make room and start again"
            ) from error

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
        if self._writer is not None:
            for name, value in present.items():
                self._writer.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(present, step=step)

    def close(self) -> None:
        if self._file is not None:
            # What could not be written has been reported; closing says it once more.
            with contextlib.suppress(OSError):
                self._file.close()
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()
