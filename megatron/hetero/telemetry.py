"""Spans for OpenTelemetry (--otel-enabled): one trace for each step, over all stages.

The phases of each rank's record become spans. All ranks compute the same trace id from the run's id
and the iteration, and the ids of the step's root span and of each rank's span too, so that no rank
sends any to another. Rank 0 makes the root span. Times are those of each host's clock. On GPUs a
phase is what the host enqueues, or waits for.

A thread of the SDK exports the spans with OTLP over HTTP; training waits for it at the end only,
for a few seconds at most.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hetero.errors import UserError
from hetero.observe.record import Phase, Recorder, recorder
from megatron.hetero.arguments.span_groups import UNSPECIFIED, SpanGroup, resolve_groups
from megatron.hetero.job import Job

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.sampling import Sampler

SERVICE = "megatron-training"
"""Without --otel-service-name and OTEL_SERVICE_NAME, as in Megatron-LM."""
_EXPORT_SECONDS = 3.0
"""For one export, with its retries."""
_CLOSE_SECONDS = 5.0
"""That the end of a run waits for the last spans."""
_QUEUED_SPANS = 16384

_SPANS: dict[str, tuple[SpanGroup, str]] = {
    Phase.FORWARD: (SpanGroup.MICROBATCH, "megatron.microbatch.forward"),
    Phase.BACKWARD: (SpanGroup.MICROBATCH, "megatron.microbatch.backward"),
    Phase.DATA: (SpanGroup.DATA_LOADING, "megatron.data_loading"),
    Phase.WAIT_PREVIOUS: (SpanGroup.COMMUNICATION, "megatron.p2p.wait_prev"),
    Phase.WAIT_NEXT: (SpanGroup.COMMUNICATION, "megatron.p2p.wait_next"),
    Phase.WAIT_BOTH: (SpanGroup.COMMUNICATION, "megatron.p2p.wait_both"),
    Phase.WAIT_ALL: (SpanGroup.COMMUNICATION, "megatron.wait_all"),
    Phase.GRAD_SYNC: (SpanGroup.COMMUNICATION, "megatron.grad_sync"),
    Phase.EMBEDDING: (SpanGroup.COMMUNICATION, "megatron.embedding_sync"),
    Phase.OPTIMIZER: (SpanGroup.OPTIMIZER, "megatron.optimizer_step"),
}
"""The span of each phase inside a step."""
_OF_SCHEDULE = frozenset(
    {Phase.FORWARD_BACKWARD, Phase.FORWARD, Phase.BACKWARD, Phase.DATA}
    | {Phase.WAIT_PREVIOUS, Phase.WAIT_NEXT, Phase.WAIT_BOTH}
)
"""The phases that megatron.forward_backward spans."""
_OUTSIDE: dict[str, tuple[SpanGroup, str]] = {
    Phase.START: (SpanGroup.MODEL_INIT, "megatron.model_init"),
    Phase.LOAD: (SpanGroup.LOAD_CHECKPOINT, "megatron.load_checkpoint"),
    Phase.SAVE: (SpanGroup.CHECKPOINT, "megatron.save_checkpoint"),
}
"""The span of each phase between steps, in the trace of the job."""


@dataclass(frozen=True)
class _Piece:
    """A part of a phase, between two changes of it."""

    phase: str
    begin: float
    end: float
    micro_batch: int = 0
    data: _Piece | None = None
    """What a forward pass has read inside it."""


def _whole_forwards(pieces: Sequence[_Piece]) -> list[_Piece]:
    """The pieces, but each forward pass as one: reading its batch has interrupted it."""
    found: list[_Piece] = []
    for piece in pieces:
        before, data = found[-2:] if len(found) > 1 else (piece, piece)
        if (before.phase, data.phase, piece.phase) == (Phase.FORWARD, Phase.DATA, Phase.FORWARD):
            del found[-2:]
            piece = replace(piece, begin=before.begin, data=data)
        found.append(piece)
    return found


class Telemetry:
    """One rank's spans. All methods are for the main thread."""

    def __init__(
        self,
        processor: SpanProcessor,
        *,
        resource: Resource,
        groups: frozenset[SpanGroup],
        run_id: str,
        rank: int,
        where: str,
        sampler: Sampler | None = None,
        record: Recorder | None = None,
    ) -> None:
        """`where` describes the rank, as in 'stage 1, nvidia'; `sampler` is None to keep all."""
        self._processor, self._resource, self._groups = processor, resource, groups
        self._run_id, self._rank, self._where = run_id, rank, where
        self._sampler = sampler
        self._record = recorder() if record is None else record
        self._begun = time.monotonic()
        self._iteration: int | None = None
        self._step_begun = 0.0
        self._phases: list[_Piece] = []
        """Of the step under way."""
        self._evaluation_begun: float | None = None
        self._has_stepped = False
        self._record.add_span_listener(self._listen)

    def begin_step(self, iteration: int) -> None:
        self._iteration, self._step_begun = iteration, time.monotonic()
        self._phases.clear()

    def end_step(self, attributes: Mapping[str, Any]) -> None:
        """Make the spans of the step. `attributes` are those of the root span."""
        iteration, self._iteration = self._iteration, None
        is_first, self._has_stepped = not self._has_stepped, True
        is_wanted = SpanGroup.STEP in self._groups or (
            is_first and SpanGroup.FIRST_ITERATION in self._groups
        )
        trace = self._derived(f"{iteration}", bits=128)
        if iteration is None or not is_wanted or not self._is_sampled(trace):
            return
        end = time.monotonic()
        root, mine = (self._derived(f"{iteration}/{of}") for of in ("root", self._rank))
        whole = self._step_begun, end
        if self._rank == 0:
            described = {"megatron.iteration": iteration, **attributes}
            if is_first:
                described["megatron.first_iteration"] = True
            self._add("megatron.train_step", trace, whole, span=root, attributes=described)
        name = f"rank {self._rank} ({self._where})"
        self._add(name, trace, whole, span=mine, parent=root, attributes={"dl.rank": self._rank})
        inside = [piece for piece in self._phases if piece.phase in _OF_SCHEDULE]
        schedule = mine
        if inside and SpanGroup.FORWARD_BACKWARD in self._groups:
            times = inside[0].begin, inside[-1].end
            schedule = self._add("megatron.forward_backward", trace, times, parent=mine)
        for piece in _whole_forwards(self._phases):
            self._add_piece(piece, trace, schedule if piece.phase in _OF_SCHEDULE else mine)
        self._phases.clear()

    def _add_piece(self, piece: _Piece, trace: int, parent: int) -> None:
        group, name = _SPANS.get(piece.phase, (None, ""))
        if group is not None and group in self._groups:
            number = {"megatron.microbatch_id": piece.micro_batch} if piece.micro_batch else {}
            times = piece.begin, piece.end
            parent = self._add(name, trace, times, parent=parent, attributes=number)
        if piece.data is not None:
            self._add_piece(piece.data, trace, parent)

    def close(self) -> None:
        """End the job's span and wait a few seconds for what is left to be exported."""
        self._record.remove_span_listener(self._listen)
        if self._rank == 0 and SpanGroup.JOB in self._groups:
            self._add_to_job("megatron.pretrain", (self._begun, time.monotonic()), is_root=True)
        # The SDK's own limit is 30 s.
        closing = threading.Thread(target=self._processor.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)

    def _listen(self, phase: str, begin: float, end: float) -> None:
        """Take a phase that has ended."""
        record = self._record
        if self._iteration is not None:
            number = record.gradients if phase == Phase.BACKWARD else record.micro_batch
            is_numbered = phase in (Phase.FORWARD, Phase.BACKWARD, Phase.DATA)
            self._phases.append(_Piece(phase, begin, end, number if is_numbered else 0))
            return
        if record.is_evaluating or phase == Phase.EVALUATION:
            # It comes in pieces; the last is that after which it evaluates no more.
            if self._evaluation_begun is None:
                self._evaluation_begun = begin
            if not record.is_evaluating and SpanGroup.EVALUATE in self._groups:
                self._add_to_job("megatron.evaluate", (self._evaluation_begun, end))
            if not record.is_evaluating:
                self._evaluation_begun = None
            return
        group, name = _OUTSIDE.get(phase, (None, ""))
        if group is not None and group in self._groups:
            self._add_to_job(name, (begin, end))

    def _add_to_job(self, name: str, times: tuple[float, float], *, is_root: bool = False) -> None:
        trace, root = self._derived("job", bits=128), self._derived("job/root")
        if not self._is_sampled(trace):
            return
        about = {"dl.rank": self._rank, "megatron.iteration": self._record.iteration}
        if is_root:
            self._add(name, trace, times, span=root, attributes=about)
        else:
            self._add(name, trace, times, parent=root, attributes=about)

    def _add(
        self,
        name: str,
        trace: int,
        times: tuple[float, float],
        *,
        span: int | None = None,
        parent: int | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> int:
        """Hand a span over; returns its id. `times` are those of `time.monotonic()`."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, TraceFlags

        # Not by the SDK's generator: it takes from the random numbers that training has seeded.
        span = span or secrets.randbits(64) | 1
        sampled = TraceFlags(TraceFlags.SAMPLED)
        # The greatest of three: between its two looks at the clocks this thread may lose the CPU.
        since_epoch = max(time.time_ns() - time.monotonic_ns() for _ in range(3))
        self._processor.on_end(
            ReadableSpan(
                name,
                context=SpanContext(trace, span, is_remote=False, trace_flags=sampled),
                parent=None
                if parent is None
                else SpanContext(trace, parent, is_remote=True, trace_flags=sampled),
                resource=self._resource,
                attributes={k: v for k, v in (attributes or {}).items() if v is not None},
                start_time=int(times[0] * 1e9) + since_epoch,
                end_time=int(times[1] * 1e9) + since_epoch,
            )
        )
        return span

    def _derived(self, what: str, *, bits: int = 64) -> int:
        """An id that every rank computes alike; never 0, which is no id."""
        digest = hashlib.sha256(f"{self._run_id}/{what}".encode()).digest()
        return int.from_bytes(digest[: bits // 8]) | 1

    def _is_sampled(self, trace: int) -> bool:
        """All ranks decide alike: by the trace's id."""
        if self._sampler is None:
            return True
        decision = self._sampler.should_sample(None, trace, "megatron").decision
        return bool(decision.is_sampled())


def require_exporter() -> None:
    """Raise UserError if spans cannot be exported from here."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--otel-enabled needs OpenTelemetry ({error}); install it with pip install '.[otel]'"
        ) from error
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(name, "http/protobuf")
        if protocol != "http/protobuf":
            raise UserError(
                f"--otel-enabled exports with {name}=http/protobuf (mostly port 4318), not "
                f"{protocol}"
            )


def open_telemetry(job: Job, *, warn: Callable[[str], None]) -> Telemetry | None:
    """The spans of this rank; None without --otel-enabled. `warn` prints a line."""
    args = job.args
    if not args.otel_enabled:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    identity = job.identities[job.rank]
    where = f"stage {job.coordinate.stage}, {identity.vendor}"
    described: dict[str, str | int | bool] = {
        "service.instance.id": f"{job.run_id}-rank{job.rank}",
        "host.name": identity.host,
        "process.pid": os.getpid(),
        "dl.rank": job.rank,
        "dl.pipeline_parallel.rank": job.coordinate.stage,
        "dl.batch_size": args.global_batch_size,
        "dl.sequence_length": args.seq_length,
        "hetero.vendor": identity.vendor,
        "hetero.simulated": identity.simulated,
        "hetero.run.id": job.run_id,
    }
    if args.otel_service_name or "OTEL_SERVICE_NAME" not in os.environ:
        described["service.name"] = args.otel_service_name or SERVICE
    # It logs every failed attempt and every span that is dropped; `warn` says it once.
    for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    resource = Resource.create(described)
    exporter = OTLPSpanExporter(timeout=_EXPORT_SECONDS)
    is_first_of_node = int(os.environ.get("LOCAL_RANK", "0")) == 0
    processor = BatchSpanProcessor(
        _warning_exporter(exporter, warn if is_first_of_node else lambda _: None),
        max_queue_size=_QUEUED_SPANS,
        schedule_delay_millis=1000,
    )
    return Telemetry(
        processor,
        resource=resource,
        groups=resolve_groups(args.otel_span_groups or UNSPECIFIED),
        run_id=job.run_id,
        rank=job.rank,
        where=where + (", simulated" if identity.simulated else ""),
        # From OTEL_TRACES_SAMPLER.
        sampler=TracerProvider(resource=resource, shutdown_on_exit=False).sampler,
    )


def _warning_exporter(inner: SpanExporter, warn: Callable[[str], None]) -> SpanExporter:
    """An exporter that warns of the first failure and drops what cannot be exported."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class WarningExporter(SpanExporter):
        has_warned = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            try:
                result = inner.export(spans)
            except Exception:  # what is only shown must end no run
                result = SpanExportResult.FAILURE
            if result is not SpanExportResult.SUCCESS and not self.has_warned:
                self.has_warned = True
                warn(
                    f"warning: --otel-enabled: {_endpoint()} does not take the spans, and training "
                    "goes on without them; see OTEL_EXPORTER_OTLP_ENDPOINT (OTLP over HTTP, mostly "
                    "port 4318)"
                )
            return result

        def shutdown(self) -> None:
            inner.shutdown()

    return WarningExporter()


def _endpoint() -> str:
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    found = (os.environ[name] for name in names if os.environ.get(name))
    return next(found, "http://localhost:4318")
