"""The file of --hetero-trace, read back: what each rank did in each traced step."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.errors import UserError
from hetero.observe.trace import FILE, GPU_TRACK, HOST_TRACK, process_of, track_of


@dataclass(frozen=True)
class Slice:
    """A phase of a rank. Times in seconds from the beginning of the file, by rank 0's clock."""

    phase: str
    begin: float
    end: float
    iteration: int
    micro_batch: int
    """From 0; -1 for none."""
    chunk: int
    is_evaluation: bool

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Arrival:
    """A message of the pipeline: when it was sent and when its receiver had it."""

    source: int
    target: int
    is_forward: bool
    sent: float
    received: float


@dataclass(frozen=True, kw_only=True)
class TracedRank:
    """One rank's part of the file."""

    rank: int
    name: str
    stage: int
    mesh: int
    vendor: str
    simulated: bool
    steps: Mapping[int, tuple[float, float]]
    """Begin and end of each step."""
    seconds: Mapping[int, float]
    """Of each step, as the training loop measured it."""
    slices: tuple[Slice, ...]
    """Of the GPU's compute stream; on a CPU of the main thread. Not overlapping."""
    is_on_gpu: bool
    clock_error: float

    def of_step(self, iteration: int) -> Iterator[tuple[Slice, float]]:
        """The slices of a step, with the seconds of each that are inside it."""
        begin, end = self.steps[iteration]
        for each in self.slices:
            inside = min(each.end, end) - max(each.begin, begin)
            if inside > 0:
                yield each, inside


@dataclass(frozen=True)
class TraceFile:
    """All of it."""

    events: list[dict[str, Any]]
    about: Mapping[str, Any]
    ranks: tuple[TracedRank, ...]
    arrivals: tuple[Arrival, ...]

    @property
    def iterations(self) -> list[int]:
        """The steps that every rank has."""
        common = set.intersection(*(set(rank.steps) for rank in self.ranks))
        return sorted(common)


def path_of(place: Path) -> Path:
    """The file that a user means by a folder, or by the file itself."""
    return place / FILE if place.is_dir() else place


def read_events(path: Path) -> dict[str, Any]:
    """A file in Chrome's trace event format, compressed or not. Raises UserError."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        found = json.loads(data)
        if not isinstance(found["traceEvents"], list):
            raise TypeError("traceEvents is no list")
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or error}); name the folder that a run had "
            "as --hetero-trace"
        ) from error
    except (ValueError, KeyError, TypeError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is no trace in Chrome's format: {error}") from error
    return dict(found)


def read_trace(place: Path) -> TraceFile:
    """Read what a run with --hetero-trace wrote. Raises UserError."""
    path = path_of(place)
    found = read_events(path)
    try:
        about = found["otherData"]["hetero"]
        events = found["traceEvents"]
        ranks = tuple(_ranks(about, events))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} was not written by --hetero-trace of this version ({error!r} is missing or "
            "wrong)"
        ) from error
    if not ranks or not set.intersection(*(set(rank.steps) for rank in ranks)):
        raise UserError(f"{path} holds no step that every rank has traced; trace some again")
    return TraceFile(events, about, ranks, tuple(_arrivals(events)))


def _ranks(about: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Iterator[TracedRank]:
    on_tracks: dict[int, list[Slice]] = defaultdict(list)
    steps: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
    for event in events:
        if event["ph"] != "X" or event["cat"] == "call":
            continue
        args = event["args"]
        begin, end = event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6
        if event["cat"] == "step":
            steps[event["pid"]][args["iteration"]] = (begin, end)
            continue
        on_tracks[event["tid"]].append(
            Slice(
                event["cat"],
                begin,
                end,
                args["iteration"],
                args.get("micro_batch", -1),
                args.get("chunk", 0),
                args["evaluation"],
            )
        )
    for rank in about["ranks"]:
        if rank["problem"]:
            continue
        process = process_of(rank["rank"])
        on_gpu = on_tracks.get(track_of(process, GPU_TRACK))
        slices = on_gpu or on_tracks[track_of(process, HOST_TRACK)]
        yield TracedRank(
            rank=rank["rank"],
            name=rank["name"],
            stage=rank["stage"],
            mesh=rank["mesh"],
            vendor=rank["vendor"],
            simulated=rank["simulated"],
            steps=steps[process],
            seconds={int(step): seconds for step, seconds in rank["step_seconds"].items()},
            slices=tuple(sorted(slices, key=lambda each: each.begin)),
            is_on_gpu=on_gpu is not None,
            clock_error=rank["clock_error_s"] + rank["stream_error_s"],
        )


def _arrivals(events: Sequence[Mapping[str, Any]]) -> Iterator[Arrival]:
    sent: dict[int, Mapping[str, Any]] = {}
    for event in events:
        what = event["name"].partition(" ")[0]
        if event["ph"] == "s" and what in ("activations", "gradients"):
            sent[event["id"]] = event
        elif event["ph"] == "f" and event["id"] in sent:
            begin = sent.pop(event["id"])
            yield Arrival(
                begin["pid"] - process_of(0),
                event["pid"] - process_of(0),
                what == "activations",
                begin["ts"] * 1e-6,
                event["ts"] * 1e-6,
            )
