"""Dumps of the last calls of this rank, for people and for PyTorch's `torchfrtrace`.

A dump is two files: `rank_N`, a pickle in the form of PyTorch's flight recorder, and `rankN.txt`.
(`torchfrtrace` reads whatever has `rank_` in its name, so the text must not.) One thread of the
process writes all dumps: what asks for one returns at once, also in the handler of a signal or with
a link's lock. It looks once a second for calls and transfers whose timeout is a third over.

PyTorch's own recorder has the calls of NCCL and gloo; they are merged in.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import math
import os
import pickle
import re
import select
import signal
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hetero.errors import print_line
from hetero.observe.record import RECORDED_CALLS, CallEntry, GroupEntry, Phase, Recorder, recorder
from hetero.startup.process import call_in_children

FOLDER_VARIABLE = "HETERO_FLIGHT_RECORDER"
"""The folder for dumps."""
DEFAULT_FOLDER = "flight_recorder"
VERSION = "2.10"
"""Of PyTorch's format; torchfrtrace requires the same on all ranks."""
_BUFFER_VARIABLE = "TORCH_FR_BUFFER_SIZE"
_TICK_SECONDS = 1.0
_LONG_PHASE_SECONDS = 3.0
"""After which PyTorch's recorder is asked: it takes up to 20 ms, all its entries are copied."""
_RETIRING_SECONDS = 0.2
"""For PyTorch to mark a call of gloo as ended: it does so after the call's wait has returned."""
_SAME_CAUSE_SECONDS = 10.0
"""Within which further failures are consequences of the first, also those of other ranks."""
_TELL_SECONDS = 0.3
"""For the first rank of the host to write a dump too: then that one says where they are."""
_LONGEST_REASON = 160
"""Characters of a reason in the log; a dump has all of it."""
_NEAR = 1 / 3
"""The part of a timeout after which a dump is written."""
_ASKED = b"\0"
"""What this process writes into the pipe; a signal's handler writes text."""
_OPERATIONS = {
    "all_gather": "_all_gather_base",
    "all_gather_single": "_all_gather_base",
    "allgather": "_all_gather_base",
    "all_to_all_single": "all_to_all",
    "all_to_all_base": "all_to_all",
    "reduce_scatter_single": "reduce_scatter",
    "barrier": "all_reduce_barrier",
}
"""Operations by the names that torchfrtrace of every release knows."""
_KNOWN = frozenset(
    {"broadcast", "reduce", "_all_gather_base", "all_reduce", "reduce_scatter", "gather", "scatter"}
    | {"_reduce_scatter_base", "all_to_all", "all_reduce_barrier", "allreduce_coalesced"}
    | {"coalesced", "send", "recv", "_broadcast_oop", "_reduce_oop"}
    | {"all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"}
    | {"ALLGATHER_coalesced", "REDUCE_SCATTER_coalesced"}
)
_DUMP_FILE = re.compile(r"rank_(\d+)|rank(\d+)\.txt")


def set_buffer_size() -> None:
    """Have PyTorch's own recorder keep as many calls. Before its first group is made."""
    os.environ.setdefault(_BUFFER_VARIABLE, str(RECORDED_CALLS))


class FlightRecorder:
    """Writes this rank's dumps. Any thread may call any method; none raises."""

    def __init__(self, record: Recorder) -> None:
        self.folder = Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER)
        self.ask_all: Callable[[], object] | None = None
        """Asks all other ranks for a dump; None where nobody can."""
        self._asks_all = False
        self._recorder = record
        self._reasons: deque[str] = deque()
        self._pipe: tuple[int, int] | None = None
        self._idle = threading.Event()
        """Set while no dump is asked for or being written."""
        self._idle.set()
        self._starting = threading.Lock()
        self._last_failure = self._last_own = self._last_ask = -math.inf
        """When a group or link failed, when this rank dumped by itself, when any asked all."""
        self._seen_near: set[object] = set()
        self._has_told = self._has_cleaned = False
        self._signals: list[signal.Signals] = []

    def start(self) -> None:
        """Start the thread. Idempotent."""
        with self._starting:
            if self._pipe is not None:
                return
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, False)
        self._recorder.on_failure = self._on_failure
        call_in_children(self, FlightRecorder._leave_to_parent)
        threading.Thread(target=self._run, name="flight recorder", daemon=True).start()
        atexit.register(self.flush)

    def answer_signals(self, *, except_for: Collection[signal.Signals] = ()) -> None:
        """Show the stacks of all threads on SIGUSR1 and SIGQUIT, and dump on SIGUSR2.

        Only where nothing else handles or ignores them. C handlers answer, also while the main
        thread is in a library: faulthandler's, which for SIGUSR2 writes into this object's pipe.
        """
        self.start()
        assert self._pipe is not None
        for number in (signal.SIGUSR1, signal.SIGQUIT, signal.SIGUSR2):
            if number in except_for or number in self._signals:
                continue
            if signal.getsignal(number) is not signal.SIG_DFL:
                continue
            file = self._pipe[1] if number is signal.SIGUSR2 else 2
            faulthandler.register(number, file=file, all_threads=True)
            self._signals.append(number)

    def request(self, reason: str) -> None:
        """Have a dump written soon; `reason` is its first line."""
        if self._pipe is None:
            return
        self._idle.clear()
        self._reasons.append(reason)
        with contextlib.suppress(OSError):  # full: the thread will come to it
            os.write(self._pipe[1], _ASKED)

    def follow(self, rank: int) -> None:
        """Write a dump because another rank has, unless this one just has by itself."""
        self._last_ask = now = time.monotonic()
        if now - self._last_own >= _SAME_CAUSE_SECONDS:
            self.request(f"rank {rank} wrote a dump")

    def flush(self, seconds: float = 5.0) -> None:
        """Wait until the dumps that were asked for are written."""
        self._idle.wait(seconds)

    def dump_failure(self, error: str) -> None:
        """Write a dump before an error is reported, unless it was just written for its cause."""
        self._on_failure(error)
        self.flush()

    def _on_failure(self, error: str) -> None:
        now = time.monotonic()
        if self._pipe is None or now - self._last_failure < _SAME_CAUSE_SECONDS:
            return
        self._last_failure = self._last_own = now
        self._asks_all = True
        self.request(error)

    def _leave_to_parent(self) -> None:
        """In a forked child, whose signals must not have the parent dump."""
        self._pipe, self._recorder.on_failure = None, None
        self._idle.set()
        for number in self._signals:
            with contextlib.suppress(ValueError):  # not forked by the main thread
                faulthandler.unregister(number)
                signal.signal(number, signal.SIG_IGN)
        atexit.unregister(self.flush)

    def _run(self) -> None:
        assert self._pipe is not None
        source = self._pipe[0]
        poll = select.poll()
        poll.register(source, select.POLLIN)
        while self._pipe is not None:
            try:
                if poll.poll(_TICK_SECONDS * 1000):
                    written = os.read(source, 1 << 16)
                    if written.strip(_ASKED):
                        time.sleep(0.02)  # for the handler to write the rest of its text
                        with contextlib.suppress(BlockingIOError):
                            os.read(source, 1 << 16)
                        self._reasons.append("SIGUSR2")
                    self._write_dumps()
                else:
                    self._look_for_timeouts()
                    self._write_dumps()
            except Exception as error:  # what only shows things never ends a run
                self._idle.set()
                self._tell(f"the flight recorder failed: {type(error).__name__}: {error}")

    def _write_dumps(self) -> None:
        """Write one dump for all that was asked for so far."""
        reasons = []
        while self._reasons:
            reasons.append(self._reasons.popleft())
        if reasons:
            self._write("; ".join(dict.fromkeys(reasons)))
        if self._asks_all:
            self._asks_all = False
            # Of many ranks that see the same only the first asks, or each would ask each.
            now = time.monotonic()
            if self.ask_all is not None and now - self._last_ask >= _SAME_CAUSE_SECONDS:
                self._last_ask = now
                self.ask_all()
        if not self._reasons:
            self._idle.set()

    def _look_for_timeouts(self) -> None:
        near = dict(_near_timeouts(self._recorder))
        new = near.keys() - self._seen_near
        self._seen_near &= near.keys()
        self._seen_near |= new
        if new:
            self._asks_all, self._last_own = True, time.monotonic()
            self.request("; ".join(near[key] for key in new))

    def _write(self, reason: str) -> None:
        """Write both files. Each appears complete or not at all."""
        rank, now = self._recorder.rank, time.time()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._has_cleaned:
                self._has_cleaned = True
                self._remove_other_jobs()
            data = dump(self._recorder, reason)
            _replace(self.folder / f"rank_{rank}", pickle.dumps(data, protocol=2))
            text = describe(self._recorder, reason, data["entries"])
            _replace(self.folder / f"rank{rank}.txt", text.encode())
        except OSError as error:
            self._tell(
                f"no dump of the flight recorder can be written to {self.folder} ({error}); give "
                f"another folder ({FOLDER_VARIABLE}, or --hetero-flight-recorder)"
            )
            return
        if os.environ.get("LOCAL_RANK", "0") != "0" and not self._has_told:
            time.sleep(_TELL_SECONDS)
            self._has_told = self._others_are_fresh(now)
        short = textwrap.shorten(reason, _LONGEST_REASON, placeholder=" ...")
        self._tell(
            f"the last calls are in {self.folder.absolute()} ({short}): read "
            f"rank{rank}.txt, or run torchfrtrace {self.folder}"
        )

    def _tell(self, what: str) -> None:
        if not self._has_told:
            self._has_told = True
            with contextlib.suppress(Exception):
                print_line(f"rank {self._recorder.rank}: {what}")

    def _others_are_fresh(self, now: float) -> bool:
        own = f"rank_{self._recorder.rank}"
        for path in self.folder.glob("rank_*"):
            with contextlib.suppress(OSError):
                if path.name != own and now - path.stat().st_mtime < 60.0:
                    return True
        return False

    def _remove_other_jobs(self) -> None:
        """Files of ranks that this job does not have, which torchfrtrace would read too."""
        size = int(os.environ.get("WORLD_SIZE", "0"))
        if not size:
            return
        for path in self.folder.iterdir():
            found = _DUMP_FILE.fullmatch(path.name)
            if found and int(found[1] or found[2]) >= size:
                with contextlib.suppress(OSError):
                    path.unlink()


@cache
def flight_recorder() -> FlightRecorder:
    """This process's."""
    return FlightRecorder(recorder())


def watch_script() -> None:
    """Serve a script of torch.distributed: signals, timeouts, and errors that end it."""
    served = flight_recorder()
    with contextlib.suppress(ValueError, RuntimeError, OSError):
        served.answer_signals()
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if _is_of_a_group(error):
            served.dump_failure(f"{kind.__name__}: {error}")
        previous(kind, error, trace)

    sys.excepthook = report


def _is_of_a_group(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and bool(
        re.search(r"gloo|NCCL|link |group |[Cc]onnection (closed|reset|refused)", str(error))
    )


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name.removeprefix('rank')}.partial")
    partial.write_bytes(data)
    partial.replace(path)


def _near_timeouts(record: Recorder) -> Iterator[tuple[object, str]]:
    """What has used up a third of its timeout: a key for each, and a sentence."""
    now = time.monotonic()
    for entry in record.last_calls():
        age = now - entry.since
        if not entry.completed and 0 < entry.timeout * _NEAR <= age:
            yield id(entry), f"{entry} takes {age:.0f} s of its timeout of {entry.timeout:g} s"
    for link in record.links():
        state = link.state()
        if state is not None and 0 < state.timeout * _NEAR <= state.oldest_seconds:
            yield (
                (id(link), state.oldest),
                f"{state.oldest} of the link to rank {state.peer} takes "
                f"{state.oldest_seconds:.0f} s of its timeout of {state.timeout:g} s",
            )
    if now - record.phase_since < _LONG_PHASE_SECONDS:
        return
    for entry in active_library_calls():
        age = now - entry.since
        if 0 < entry.timeout * _NEAR <= age:
            key = entry.group, entry.sequence, entry.created
            yield key, f"{entry} takes {age:.0f} s of its timeout of {entry.timeout:g} s"


def active_library_calls() -> list[CallEntry]:
    """The calls inside NCCL and gloo that have not ended, the oldest first.

    Takes up to 20 ms if many calls were made before: ask while a phase is long, once a second.
    Never raises. PyTorch records no sends and receives of gloo.
    """
    found = []
    with contextlib.suppress(Exception):
        for entry in _library_dump(only_active=True, stacks=False)["entries"]:
            if not _has_ended(entry):
                found.append(_call_of(entry))
    return sorted(found, key=lambda entry: entry.created)


def _call_of(entry: Mapping[str, Any]) -> CallEntry:
    name, _, meta = entry["profiling_name"].partition(":")[2].partition(" ")
    peers = re.findall(r"\d+", meta)
    return CallEntry(
        entry["process_group"][0] or "a group without a name",
        entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
        name,
        ", ".join(entry["input_dtypes"]).lower(),
        tuple(tuple(size) for size in entry["input_sizes"]),
        int(peers[1]) if len(peers) == 2 and name in ("send", "recv") else None,
        created=entry["time_created_ns"],
        since=time.monotonic() - max(0, time.time_ns() - entry["time_created_ns"]) * 1e-9,
        started=entry["time_discovered_started_ns"] or 0,
        timeout=entry["timeout_ms"] / 1000,
    )


def _has_ended(entry: Mapping[str, Any]) -> bool:
    # gloo's entries are only retired.
    return bool(entry.get("retired")) or entry["state"] == "completed"


def _library_dump(*, only_active: bool, stacks: bool) -> dict[str, Any]:
    """PyTorch's dumps of all backends as one."""
    merged: dict[str, Any] = {"entries": [], "pg_config": {}}
    torch = sys.modules.get("torch")
    library = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    # By keyword: the names differ from one function of PyTorch to the other.
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        function = getattr(library, name, None)
        if function is None:
            continue
        with contextlib.suppress(Exception):
            part = pickle.loads(function(True, stacks, only_active))
            merged["entries"] += part.get("entries", [])
            merged["pg_config"] |= part.get("pg_config", {})
    return merged


def _library_entries(*, stacks: bool) -> list[dict[str, Any]]:
    """All entries of PyTorch's recorder, none of which is just about to be marked as ended."""
    deadline = time.monotonic() + _RETIRING_SECONDS
    while True:
        entries = _library_dump(only_active=False, stacks=stacks)["entries"]
        if all(map(_has_ended, entries)) or time.monotonic() > deadline:
            return list(entries)
        time.sleep(_RETIRING_SECONDS / 10)


def dump(record: Recorder, reason: str) -> dict[str, Any]:
    """This rank's calls in the form of PyTorch's flight recorder."""
    calls = record.last_calls()
    library = _library_entries(stacks=record.keeps_stacks)
    groups = _known_groups(record)
    converted: list[dict[str, Any]] = []
    for call in calls:
        converted += _converted_call(call, groups)
    for entry in library:
        converted += _converted_library_entry(entry, groups, record)
    starts = [calls[0]] if len(calls) == record.calls.maxlen else []
    wrapped = [(call.created, call.iteration) for call in starts]
    if library and library[0]["record_id"] > 0:
        began = library[0]["time_created_ns"]
        wrapped.append((began, record.iteration_at(began)))
    entries = _aligned(converted, wrapped)
    return {
        "version": VERSION,
        "pg_config": {
            name: {
                "name": name,
                "desc": group.description or "undefined",
                "ranks": str(list(group.ranks)),
            }
            for name, group in groups.items()
        },
        "pg_status": _statuses(entries),
        "entries": entries,
        "rank": record.rank,
        "host_name": record.host,
        "reason": reason,
    }


def _known_groups(record: Recorder) -> dict[str, GroupEntry]:
    """By name: those told to the recorder, and torch's own of this process."""
    groups = dict(record.groups)
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(c10d, "_world", None)
    with contextlib.suppress(Exception):
        for group, name in list(world.pg_names.items()):  # type: ignore[union-attr]
            ranks = world.pg_group_ranks[group]  # type: ignore[union-attr]
            ordered = tuple(sorted(ranks, key=lambda rank: ranks[rank]))
            description = str(group.group_desc)
            if name in groups:
                known = replace(groups[name], description=description)
            else:
                backend = str(world.pg_map[group][0])  # type: ignore[union-attr]
                known = GroupEntry(
                    name=name, ranks=ordered, backend=backend, description=description
                )
            groups[name] = known
    return groups


def _converted_call(call: CallEntry, groups: dict[str, GroupEntry]) -> Iterator[dict[str, Any]]:
    """Zero entries for what torchfrtrace cannot match, else one. Adds a message's group."""
    known = groups.get(call.group)
    ranks = known.ranks if known is not None else ()
    own, sizes = recorder().rank, [list(size) for size in call.sizes]
    if call.operation in ("send", "recv"):
        if call.peer is None or call.peer == own:
            return
        # torchfrtrace takes every call of a group for one of all its ranks.
        is_send = call.operation == "send"
        source, target = (own, call.peer) if is_send else (call.peer, own)
        name = f"{call.group} {source}->{target}" + (f" tag {call.tag}" if call.tag else "")
        pair = tuple(sorted((own, call.peer)))
        groups.setdefault(
            name, GroupEntry(name=name, ranks=pair, backend="link", description=call.group)
        )
        here, there = pair.index(own), pair.index(call.peer)
        profiled = f"{call.operation} {here}{'->' if is_send else '<-'}{there}"
        yield _entry(call, name, groups, profiled, sizes, sizes)
        return
    word = call.operation.split(" ")[0]
    operation = _OPERATIONS.get(word, word)
    if len(ranks) < 2 or operation not in _KNOWN:
        return
    total = sum(math.prod(size) for size in call.sizes)
    inputs, outputs = sizes, sizes
    if operation == "_all_gather_base":
        inputs, outputs = [[total // len(ranks)]], [[total]]
    elif operation == "reduce_scatter":
        inputs, outputs = [[total * len(ranks)]], [[total]]
    elif operation in ("gather", "scatter"):
        inputs = outputs = [[]]  # they differ between the root and the others
    elif operation == "all_to_all":
        inputs = outputs = [[total]]
    yield _entry(call, call.group, groups, operation, inputs, outputs)


def _entry(
    call: CallEntry,
    group: str,
    groups: Mapping[str, GroupEntry],
    operation: str,
    inputs: list[list[int]],
    outputs: list[list[int]],
) -> dict[str, Any]:
    is_message = operation.startswith(("send ", "recv "))
    has_completed = call.state == "completed"
    return {
        "frames": [
            {"name": name, "filename": file, "line": line} for file, line, name in call.stack
        ],
        "record_id": 0,
        "iteration": call.iteration,
        "pg_id": list(groups).index(group),
        "process_group": (group, groups[group].description or "undefined"),
        "collective_seq_id": call.sequence,
        "p2p_seq_id": call.sequence if is_message else 0,
        "op_id": call.sequence,
        # Older releases of torchfrtrace know no other library.
        "profiling_name": f"nccl:{operation}",
        "time_created_ns": call.created,
        "input_sizes": inputs,
        "input_dtypes": [call.dtype] * len(inputs),
        "output_sizes": outputs,
        "output_dtypes": [call.dtype] * len(outputs),
        "state": call.state,
        "time_discovered_started_ns": call.started or None,
        "time_discovered_completed_ns": call.completed if has_completed else None,
        "retired": has_completed,
        "timeout_ms": int(call.timeout * 1000),
        "is_p2p": is_message,
    }


def _converted_library_entry(
    entry: dict[str, Any], groups: Mapping[str, GroupEntry], record: Recorder
) -> Iterator[dict[str, Any]]:
    name = entry["process_group"][0]
    word, _, meta = entry["profiling_name"].partition(":")[2].partition(" ")
    operation = _OPERATIONS.get(word, word)
    if name not in groups or len(groups[name].ranks) < 2 or operation not in _KNOWN:
        return
    yield {
        **entry,
        "process_group": (name, groups[name].description or "undefined"),
        "profiling_name": f"nccl:{operation} {meta}".rstrip(),
        "state": "completed" if _has_ended(entry) else entry["state"],
        "iteration": record.iteration_at(entry["time_created_ns"]),
    }


def _aligned(
    entries: Sequence[dict[str, Any]], wrapped: Sequence[tuple[int, int]]
) -> list[dict[str, Any]]:
    """The entries in order, with record ids by which torchfrtrace cuts all ranks' at one place.

    It drops what is older than the youngest first entry of any rank. That is exact by iterations
    of training; elsewhere, by time, what was called around the cut may look as if a rank lacked it.
    A rank that has kept everything must not cut the others': its first id is 0.

    Args:
        wrapped: time and iteration of the first entries of the rings that have overflowed.
    """
    entries = sorted(entries, key=lambda entry: entry["time_created_ns"])
    by_iteration = any(entry["iteration"] for entry in entries)
    if wrapped and by_iteration:
        complete = max(iteration for _, iteration in wrapped) + 1
        whole = [entry for entry in entries if entry["iteration"] >= complete]
        entries = whole or entries
    elif wrapped:
        begin = max(created for created, _ in wrapped)
        entries = [entry for entry in entries if entry["time_created_ns"] >= begin]
    for entry in entries:
        entry["record_id"] = entry["iteration"] if by_iteration else entry["time_created_ns"]
    if entries and not wrapped:
        entries[0]["record_id"] = 0
    return entries


def _statuses(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    statuses: dict[str, dict[str, int]] = {}
    for entry in entries:
        status = statuses.setdefault(
            str(entry["pg_id"]),
            dict.fromkeys(
                (
                    "last_enqueued_collective",
                    "last_started_collective",
                    "last_completed_collective",
                ),
                -1,
            ),
        )
        number = entry["collective_seq_id"]
        status["last_enqueued_collective"] = number
        if entry["state"] != "scheduled":
            status["last_started_collective"] = number
        if entry["state"] == "completed":
            status["last_completed_collective"] = number
    return statuses


def describe(record: Recorder, reason: str, entries: Sequence[Mapping[str, Any]]) -> str:
    """What this rank does, for people. Does not take anything from the record's incidents."""
    now = time.time()
    seconds = time.monotonic() - record.phase_since
    lines = [
        f"rank {record.rank} on {record.host}, pid {os.getpid()}, "
        + time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now)),
        f"why: {reason}",
    ]
    if record.phase not in (Phase.START, Phase.SCRIPT):  # a script has no other phases
        lines.append(
            f"phase: {record.phase} for {seconds:.1f} s; iteration {record.iteration}, "
            f"micro-batch {record.micro_batch}"
        )
    waits = record.open_waits()
    lines += ["", "waits:", *(f"  {wait.what}, for {wait.seconds:.1f} s" for wait in waits)]
    unfinished = [entry for entry in record.last_calls() if not entry.completed]
    lines += ["", "calls under way:", *(f"  {_call_line(entry, now)}" for entry in unfinished)]
    lines += [f"  inside the library: {_call_line(call, now)}" for call in active_library_calls()]
    lines += ["", "links:"]
    for link in record.links():
        if (state := link.state()) is not None:
            queued = f"; {state.queued} under way, the oldest {state.oldest} for "
            queued += f"{state.oldest_seconds:.1f} s"
            lines.append(
                f"  to rank {state.peer} over {state.transport}: {state.messages_sent} messages "
                f"({state.bytes_sent} bytes) sent, {state.messages_received} "
                f"({state.bytes_received} bytes) received" + (queued if state.queued else "")
            )
    lines += ["", "groups:"]
    lines += [
        f"  {group.name} ({group.backend}): ranks {', '.join(map(str, group.ranks))}"
        for group in _known_groups(record).values()
    ]
    lines += ["", "threads:", *_stacks()]
    lines += ["", "last calls, the latest first:"]
    lines += [f"  {_entry_line(entry, now)}" for entry in reversed(entries)]
    return "\n".join(lines) + "\n"


def _call_line(call: CallEntry, now: float) -> str:
    sizes = " ".join("x".join(map(str, size)) or "scalar" for size in call.sizes[:8])
    what = f"{call}: {call.state} {now - call.created * 1e-9:.3f} s ago, {call.dtype} {sizes}"
    return what.rstrip() + (f"; failed: {call.error}" if call.error else "")


def _entry_line(entry: Mapping[str, Any], now: float) -> str:
    group, _ = entry["process_group"]
    operation = entry["profiling_name"].partition(":")[2]
    ended = entry["time_discovered_completed_ns"]
    took = "" if not ended else f", took {(ended - entry['time_created_ns']) * 1e-6:.3f} ms"
    return (
        f"{now - entry['time_created_ns'] * 1e-9:10.3f} s ago: {operation} number "
        f"{entry['collective_seq_id']} of {group}, {entry['input_sizes']} "
        f"{' '.join(dict.fromkeys(entry['input_dtypes']))}, {entry['state']}{took}"
    )


def _stacks() -> Iterator[str]:
    """The Python stacks of all threads, without source lines: their files may be out of reach."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        yield f"  {names.get(ident, ident)}"
        at: Any = frame
        while at is not None:
            code = at.f_code
            yield f"    {code.co_filename}:{at.f_lineno} in {code.co_name}"
            at = at.f_back
