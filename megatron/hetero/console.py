"""Console output: tables, one line per logged iteration, and a progress bar on terminals.

Only rank 0 prints; on other ranks every method but `warning` is a no-op. Lines begin with the time,
tables do not. All are flushed to stdout unconditionally, so that a log file is complete. The bar
goes to stderr if that is a terminal.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from hetero.errors import stamped

if TYPE_CHECKING:
    from megatron.hetero.metrics import IterationRecord


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns; the first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(line.rstrip() for line in lines)


class Console:
    """Prints on the logging rank: lines to stdout, a progress bar to stderr if it is a terminal."""

    def __init__(self, *, is_logger: bool, total_iterations: int, start: int = 0) -> None:
        self._is_logger = is_logger
        self._total = total_iterations
        self._bar = progress_bar(
            total=total_iterations, shown=is_logger, initial=start, unit="it", desc="training"
        )

    def line(self, text: str) -> None:
        self.table(stamped(text))

    def table(self, text: str) -> None:
        """Print as it is: columns, and lines that Megatron's readers know by their beginning."""
        if not self._is_logger:
            return
        try:
            # Clears the bar and redraws it below the line.
            with tqdm.external_write_mode(file=sys.stdout):
                print(text, flush=True)
        except BrokenPipeError:
            # The reader of the pipe has exited. Keep training without console output.
            self._is_logger = False

    def warning(self, text: str) -> None:
        """Print on any rank: only the rank that writes an output knows that it cannot."""
        if self._is_logger:
            self.line(text)
        else:
            with contextlib.suppress(BrokenPipeError):
                print(stamped(text), flush=True)

    def advance(self, record: IterationRecord) -> None:
        self._bar.set_postfix_str(
            f"loss {record.loss:.4f}, {record.tokens_per_s:,.0f} tokens/s", refresh=False
        )
        self._bar.update(1)

    def iteration(self, records: Sequence[IterationRecord]) -> None:
        """Megatron's log line for `records`: mean time, work per time, mean loss of updates."""
        last, count = records[-1], len(records)
        elapsed = sum(r.elapsed_ms for r in records)
        tokens_per_s = sum(r.tokens_per_s * r.elapsed_ms for r in records) / elapsed
        tflops = sum(r.tflops_per_gpu * r.elapsed_ms for r in records) / elapsed
        losses = [r.loss for r in records if not r.skipped]
        nan = sum(r.skipped and not math.isfinite(r.loss) for r in records)
        parts = [
            f"iteration {last.iteration:8d}/{self._total:8d}",
            f"consumed samples: {last.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {elapsed / count:.1f}",
            f"tokens/s: {tokens_per_s:.1f}",
            f"throughput per GPU (TFLOP/s/GPU): {tflops:.4g}",
            f"learning rate: {last.learning_rate:.6E}",
            f"global batch size: {last.batch_size:5d}",
        ]
        if losses:
            parts.append(f"lm loss: {sum(losses) / len(losses):.6E}")
        parts += [f"{name}: {value:.6E}" for name, value in last.more.items()]
        parts.append(f"loss scale: {last.loss_scale:.1f}")
        if last.grad_norm is not None:
            parts.append(f"grad norm: {last.grad_norm:.3f}")
        if last.num_zeros is not None:
            parts.append(f"num zeros: {last.num_zeros:.0f}")
        if last.params_norm is not None:
            parts.append(f"params norm: {last.params_norm:.3f}")
        parts.append(f"number of skipped iterations: {count - len(losses):3d}")
        parts.append(f"number of nan iterations: {nan:3d}")
        stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
        self.table(f" [{stamp}] " + " | ".join(parts) + " |")

    def close(self) -> None:
        self._bar.close()


def progress_bar(*, total: float, shown: bool = True, **tqdm_options: Any) -> tqdm[Any]:
    """A tqdm bar on stderr, disabled if that is not a terminal.

    The terminals of `docker -t` and `ssh -t` may report a size of 0, with which tqdm draws nothing;
    a default size is used then.
    """
    shown = shown and sys.stderr.isatty()
    size: dict[str, Any] = {}
    if shown and not _has_size():
        columns, lines = shutil.get_terminal_size()
        size = {"ncols": columns, "nrows": lines}
    return tqdm(total=total, file=sys.stderr, disable=not shown, **size, **tqdm_options)


def _has_size() -> bool:
    try:
        columns, lines = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):  # stderr was replaced by an object without a descriptor
        return False
    return columns > 0 and lines > 0
