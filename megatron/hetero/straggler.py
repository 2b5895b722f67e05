"""--log-straggler: which ranks are the slowest and the fastest, every --log-interval.

megatron-core's StragglerDetector does nothing without CUDA. This has its lines on all devices: the
time of the forward passes and of getting a batch, and of a GPU temperature, power, utilization and
clock where PyTorch can read them. A rank's throughput is estimated from the FLOPs of its own
layers, as stages may have unequal numbers of them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from hetero.observe.record import recorder
from hetero.startup.process import close_in_children
from megatron.hetero.console import Console
from megatron.hetero.job import Job
from megatron.hetero.metrics import model_flops_per_token
from megatron.hetero.timers import Clock, clock_of

_UNREAD = math.nan
_SENSORS = (
    ("Pwr", "W", "power_draw"),
    ("Tmp", "C", "temperature"),
    ("Utl", "%", "utilization"),
    ("Clk", "MHz", "clock_rate"),
)
"""Name in the line, unit, and the function of torch.cuda."""


class Stopwatch:
    """A context manager that marks the begin and the end of what it times."""

    def __init__(self, clock: Clock) -> None:
        self.is_on = False
        self._clock = clock
        self._record = recorder()
        self._begin: Any = None
        self._marks: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        if self.is_on and not self._record.is_evaluating:
            self._begin = self._clock.mark()

    def __exit__(self, *_: object) -> None:
        if self._begin is not None:
            self._marks.append((self._begin, self._clock.mark()))
            self._begin = None

    def take(self) -> list[float]:
        """The times since the last call, in milliseconds. Waits for the last one to complete."""
        marks, self._marks = self._marks, []
        if marks:
            self._clock.wait(marks[-1][1])
        times = [self._clock.milliseconds(*pair) for pair in marks]
        self._clock.release(mark for pair in marks for mark in pair)
        return times


class StragglerLog:
    """One rank's side. `forward` and `batch` go around what they are named for."""

    def __init__(self, job: Job, console: Console) -> None:
        args = job.args
        self._job, self._console = job, console
        self._is_logged = bool(args.log_straggler)
        self._is_on = self._is_logged and not args.disable_straggler_on_startup
        clock = clock_of(job.device)
        self.forward, self.batch = Stopwatch(clock), Stopwatch(clock)
        self._tokens = 0
        self._iterations = 0
        self._server: ControlServer | None = None
        self._set(self._is_on)
        if self._is_logged and job.rank == 0:
            self._open(args.straggler_ctrlr_port)

    def _open(self, port: int) -> None:
        try:
            self._server = ControlServer(port, is_on=lambda: self._is_on)
        except OSError as error:
            self._console.line(
                f"warning: --log-straggler cannot be switched: port {port} cannot be opened "
                f"({error.strerror}); choose another --straggler-ctrlr-port"
            )
            return
        state = "ON" if self._is_on else "OFF"
        self._console.line(
            f"Controller ready to recv commands on port {self._server.port}. Current state {state}"
        )

    def _set(self, is_on: bool) -> None:
        self._is_on = self.forward.is_on = self.batch.is_on = is_on

    def after(self, *, tokens: int, logged: bool) -> None:
        """Call after each iteration. Collective if it is `logged`."""
        if not self._is_logged:
            return
        self._tokens += tokens
        self._iterations += 1
        if logged:
            self._report()

    def _report(self) -> None:
        job = self._job
        forward, batch = self.forward.take(), self.batch.take()
        elapsed = sum(forward) / self._iterations
        flops = self._own_flops() / self._iterations
        throughput = flops / (elapsed * 1e9) if elapsed else 0.0
        toggles = self._server is not None and self._server.take_toggle()
        sensors = read_sensors(job.device) if self._is_on else [_UNREAD] * len(_SENSORS)
        mine = [float(toggles), elapsed, *sensors, max(batch, default=0.0), throughput]
        rows = job.statistics.gather(mine)
        if self._is_on:
            for line in straggler_lines([row[1:] for row in rows], job.args.straggler_minmax_count):
                self._console.line(line)
        self._tokens = self._iterations = 0
        if rows[0][0]:
            self._set(not self._is_on)
            self._console.line(f"Toggling StragglerDetector State {'ON' if self._is_on else 'OFF'}")

    def _own_flops(self) -> float:
        """Of this rank's forward passes since the last report, by its number of layers."""
        job, place = self._job, self._job.coordinate
        mesh = job.plan.meshes[place.mesh]
        layers = sum(job.plan.layers[place.stage]) / job.args.num_layers
        part = layers * mesh.share / job.plan.row(place.stage) / mesh.tensor
        return self._tokens * model_flops_per_token(job.args) / 3.0 * part

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def straggler_lines(rows: Sequence[Sequence[float]], count: int) -> list[str]:
    """Megatron's lines: of each value the ranks that have the least and the most of it.

    A row has a rank's time of forward passes, its sensors, its longest time for a batch, both in
    milliseconds, and its throughput in TFLOP/s. A value that no rank can read is left out.
    `count`: how many ranks with the lowest and the highest throughput to list, if more than one.
    """
    columns = list(zip(*rows, strict=True))
    names = [("Rtt", "ms"), *(sensor[:2] for sensor in _SENSORS), ("DRtt", "ms"), ("Etpt", "TF")]
    parts = []
    for (name, unit), values in zip(names, columns, strict=True):
        ranked = sorted((v, rank) for rank, v in enumerate(values) if not math.isnan(v))
        if ranked:
            for which, (value, rank) in (("Mn", ranked[0]), ("Mx", ranked[-1])):
                parts.append(f"{which}{name}/Rnk: {_text(value)}{unit}/{rank}")
    lines = [" | ".join(parts)]
    if 1 < count < len(rows):
        ranked = sorted((value, rank) for rank, value in enumerate(columns[-1]))
        for which, some in (
            ("Bottom {} Ranks with lowest  Etpt(TF)", ranked[:count]),
            ("Top    {} Ranks with highest Etpt(TF)", ranked[-count:]),
        ):
            listed = ", ".join(f"{_text(value)}/{rank}" for value, rank in some)
            lines.append(f"^^^^ {which.format(count)}: {listed}")
    return lines


def _text(value: float) -> str:
    """As Megatron has it, and small values, as a CPU's throughput, with three digits too."""
    return f"{value:.2f}" if value >= 1.0 or value == 0.0 else f"{value:.3g}"


def read_sensors(device: torch.device) -> list[float]:
    """The values of _SENSORS; NaN where there is no GPU, or no library that reads it."""
    values = []
    for _, _, function in _SENSORS:
        value = _UNREAD
        if device.type == "cuda":
            # NVIDIA's need the package nvidia-ml-py, AMD's amdsmi: each says so in its own way.
            with suppress(Exception):
                value = float(getattr(torch.cuda, function)(device))
                # Watts, as the other vendor has them; NVIDIA's are milliwatts.
                value /= 1000.0 if function == "power_draw" and not torch.version.hip else 1.0
        values.append(value)
    return values


class ControlServer:
    """Switches the log on and off at the next report, at each GET, as Megatron-LM's port does."""

    def __init__(self, port: int, *, is_on: Callable[[], bool]) -> None:
        """Raises OSError if the port cannot be opened; 0 takes a free one."""
        self._toggle = threading.Event()
        toggle = self._toggle

        class Handler(BaseHTTPRequestHandler):
            timeout = 10.0

            def do_GET(self) -> None:
                # A page that some browser here shows must not switch anything.
                if "Origin" in self.headers or self.path != "/":
                    self.send_error(404)
                    return
                toggle.set()
                state = "OFF" if is_on() else "ON"
                message = f"Will turn StragglerDetector {state} at next logging interval\n".encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(message)))
                self.end_headers()
                self.wfile.write(message)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("", port), Handler)
        self._server.daemon_threads = True
        close_in_children(self._server.socket)
        self.port = int(self._server.server_address[1])
        serve = self._server.serve_forever
        threading.Thread(target=serve, name="straggler", daemon=True).start()

    def take_toggle(self) -> bool:
        """Whether there was a request since the last call."""
        is_set = self._toggle.is_set()
        self._toggle.clear()
        return is_set

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
