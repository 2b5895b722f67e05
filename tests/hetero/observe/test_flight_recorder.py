"""The flight recorder: what PyTorch's analyser and people read of a script's last calls."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO, Self

import pytest
import torch
import torch.distributed as dist

from hetero.observe.flight_recorder import (
    FlightRecorder,
    active_library_calls,
    dump,
    flight_recorder,
)
from hetero.observe.record import CallEntry, GroupEntry, Recorder, recorder
from tests import preloaded
from tests.commands import ROOT
from tests.hetero.collectives.ranks import Side, run_ranks

SCRIPT = """
import datetime, os, sys, time
import torch, torch.distributed as dist

go, *dumps = sys.argv[1:]
dist.init_process_group("hetero", timeout=datetime.timedelta(seconds=60))
rank = dist.get_rank()
for _ in range(3):
    dist.all_reduce(torch.ones(4, 2))
plain = dist.new_group([0, 1], backend="gloo", group_desc="of one vendor")
if rank < 2:
    dist.all_reduce(torch.ones(3), group=plain)
if rank == 0:
    dist.send(torch.ones(2, 2), 2, tag=5)
if rank == 2:
    dist.recv(torch.ones(2, 2), 0, tag=5)
print("ready", flush=True)
while not os.path.exists(go):
    time.sleep(0.05)
dist.group.WORLD.set_timeout(datetime.timedelta(seconds=15))
# Rank 2 comes once both are there, long before the timeout: nothing fails.
while rank == 2 and not all(map(os.path.exists, dumps)):
    time.sleep(0.05)
time.sleep(2 * (rank == 2))  # what comes to a third a second later is dumped again
dist.all_reduce(torch.ones(1))
print(rank, "ended", flush=True)
"""


def mismatch(side: Side) -> str:
    """A scenario: ranks 0 and 1 call the same, rank 2 another operation or size."""
    served = record_into(side.options["folder"], side.rank)
    for _ in range(3):
        dist.all_reduce(torch.ones(4, 2))
    differs = side.rank == 2
    try:
        if differs and side.options["how"] == "operation":
            dist.broadcast(torch.ones(5), 0)
        else:
            dist.all_reduce(torch.ones(6 if differs else 5))
    except RuntimeError as error:
        served.flush(60)
        return str(error)
    return ""


def inside_library(side: Side) -> list[str]:
    """A scenario: what rank 0 knows of a call of gloo that rank 1 makes later, and after it."""
    plain = dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=60))
    said = []
    if side.rank == 0:
        work = dist.all_reduce(torch.ones(7), group=plain, async_op=True)
        (call,) = active_library_calls()
        said.append(f"{call}, {call.sizes}, of {call.timeout:g} s, {call.state}")
        side.say("called")
        work.wait()
        # PyTorch marks a call of gloo as ended after its wait has returned.
        deadline = time.monotonic() + 30
        while active_library_calls():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    if side.rank == 1:
        side.hear("called")
        dist.all_reduce(torch.ones(7), group=plain)
    return said


def record_into(folder: str, rank: int) -> FlightRecorder:
    recorder().rank = rank
    served = flight_recorder()
    served.folder = Path(folder)
    served.start()
    return served


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start three ranks of two simulated vendors, which dump into `tmp_path / "dumps"`."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HETERO_VENDOR": "amd*2,nvidia"}
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "hetero.run", "--nproc-per-node", "3", str(script), *words],
                env=os.environ | own | {"HETERO_FLIGHT_RECORDER": str(tmp_path / "dumps")},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


def analysed(folder: Path) -> str:
    """What PyTorch's `torchfrtrace` says of the dumps in a folder."""
    words = ["torch.distributed.flight_recorder.fr_trace", str(folder)]
    environ = os.environ | {"PYTHONPATH": preloaded.python_path()}
    done = preloaded.start(Path("-m"), words, environ=environ)
    _, said = done.communicate(timeout=120)
    assert done.returncode == 0, said
    return said


def wait_for_files(folder: Path, names: set[str], *, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not (folder.exists() and names <= {path.name for path in folder.iterdir()}):
        assert time.monotonic() < deadline, sorted(folder.glob("*"))
        time.sleep(0.05)


FILES = {f"rank_{rank}" for rank in range(3)} | {f"rank{rank}.txt" for rank in range(3)}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("operation", ["COLLECTIVE_TYPE_MISMATCH", "'broadcast'", "'all_reduce'"]),
        ("size", ["SIZE_OR_SYNTAX_MISMATCH", "[[5]]", "[[6]]"]),
    ],
)
def test_torchfrtrace_names_a_mismatch(tmp_path: Path, how: str, said: list[str]) -> None:
    outcomes = run_ranks(mismatch, ("amd", "amd", "nvidia"), how=how, folder=str(tmp_path))
    assert ["different collectives" in str(outcome.value) for outcome in outcomes] == [True] * 3
    found = analysed(tmp_path)
    assert "Collective sequence number: 4 has errors" in found
    assert [word for word in said if word not in found] == []
    assert found.count("sequence number") == 1


def test_a_script_goes_on_after_signals_and_a_late_call_have_written_its_record(
    launch: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    dumps = [tmp_path / "dumps" / f"rank_{rank}" for rank in (0, 1)]
    process = launch(str(tmp_path / "go"), *map(str, dumps))
    assert process.stdout is not None
    said = ""
    while said.count("ready") < 3:  # what ranks print at a time may be one line
        line = process.stdout.readline()
        assert line
        said += line
    process.send_signal(signal.SIGUSR2)
    wait_for_files(tmp_path / "dumps", FILES)
    # All ranks have made the same calls, and torchfrtrace finds nothing to say of them.
    assert "sequence number" not in analysed(tmp_path / "dumps")
    text = (tmp_path / "dumps" / "rank0.txt").read_text()
    assert "why: SIGUSR2" in text
    assert "all_reduce number 3 of 0, [[4, 2]] float32, completed" in text
    assert "send 0->1 number 1 of 0 0->2 tag 5, [[2, 2]] float32, completed" in text
    assert "1 (gloo): ranks 0, 1" in text
    assert f"{tmp_path}/script.py:" in text
    with Lines(process.stderr) as errors:
        for number in (signal.SIGUSR1, signal.SIGQUIT):
            show_stacks(process, number, errors, script=f'{tmp_path}/script.py", line')
        for old in dumps:
            old.unlink()
        (tmp_path / "go").touch()
        out = process.stdout.read()
        assert process.wait(60) == 0
    # Their lines may mix.
    assert out.count("ended") == 3
    assert sorted(re.findall(r"\d", out)) == ["0", "1", "2"]
    assert f"the last calls are in {tmp_path}/dumps (SIGUSR2)" in errors.since(0)
    text = (tmp_path / "dumps" / "rank0.txt").read_text()
    assert "why: all_reduce as number 4 of 0 takes " in text
    assert " s of its timeout of 15 s" in text
    calls = pickle.loads(dumps[0].read_bytes())["entries"]
    last = [call for call in calls if call["process_group"][0] == "0"][-1]
    assert (last["collective_seq_id"], last["state"]) == (4, "started")


class Lines:
    """What a stream says while it is read by a thread of its own, which ends with the stream."""

    def __init__(self, stream: IO[str] | None) -> None:
        assert stream is not None
        self._stream, self._lines = stream, list[str]()
        self._reader = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        for line in self._stream:
            self._lines.append(line)

    @property
    def count(self) -> int:
        return len(self._lines)

    def since(self, count: int) -> str:
        """The lines after the first `count`."""
        return "".join(self._lines[count:])

    def __enter__(self) -> Self:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.join(60)


def show_stacks(
    process: subprocess.Popen[str], number: signal.Signals, errors: Lines, *, script: str
) -> None:
    """Ask again where no stack is whole: three ranks write at once, and their lines mix."""
    before, deadline = errors.count, time.monotonic() + 60
    while not all(words in errors.since(before) for words in ("Current thread 0x", script)):
        assert time.monotonic() < deadline, errors.since(0)
        process.send_signal(number)
        time.sleep(1)


def test_a_call_inside_the_vendors_library_is_known_while_it_lasts() -> None:
    outcomes = run_ranks(inside_library, ("amd", "amd"), backend="gloo")
    (said,) = outcomes[0].value
    # The name of a group is a number, or a hash of its ranks.
    assert re.fullmatch(r"all_reduce as number 1 of \w+, \(\(7,\),\), of 60 s, scheduled", said)


def test_a_library_call_that_is_just_being_marked_as_ended_has_ended_in_a_dump(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = {
        "process_group": ("all", ""),
        "profiling_name": "gloo:all_reduce",
        "state": "scheduled",
        "time_created_ns": time.time_ns(),
        "record_id": 0,
        "pg_id": 0,
        "collective_seq_id": 1,
    }
    dumps = iter([pickle.dumps({"entries": [entry | {"retired": done}]}) for done in (False, True)])
    library = torch._C._distributed_c10d
    monkeypatch.setattr(library, "_dump_fr_trace", lambda *_: next(dumps), raising=False)
    monkeypatch.delattr(library, "_dump_nccl_trace", raising=False)
    record = Recorder()
    record.add_group(GroupEntry(name="all", ranks=(0, 1), backend="gloo"))
    assert [call["state"] for call in dump(record, "")["entries"]] == ["completed"]


def recorded(iterations: int, *, each: int, rank: int = 0, beside: int = 0) -> Recorder:
    """A record of a training with `each` calls of all ranks an iteration, and others `beside`."""
    record = Recorder()
    record.rank = rank
    record.add_group(GroupEntry(name="all", ranks=(0, 1), backend="hetero"))
    number = 0
    for iteration in range(1, iterations + 1):
        record.begin_iteration(iteration)
        for _ in range(each):
            number += 1
            call = CallEntry("all", number, "all_reduce", "float32", ((4,),))
            call.started, call.completed = call.created, call.created + 1
            record.add_call(call)
        for _ in range(beside):
            record.add_call(CallEntry("own", number, "all_reduce", "float32", ((4,),)))
    return record


def test_a_ring_that_has_overflowed_begins_at_a_whole_iteration() -> None:
    record = recorded(700, each=3)
    entries = dump(record, "")["entries"]
    # The last 2,000 calls begin amid iteration 34.
    assert entries[0]["record_id"] == 35
    assert entries[0]["collective_seq_id"] == 34 * 3 + 1
    assert entries[-1]["record_id"] == 700


def test_rings_of_different_lengths_are_compared_where_both_have_calls(tmp_path: Path) -> None:
    """A rank that makes more calls beside the common ones has forgotten more of these."""
    for rank in (0, 1):
        record = recorded(700, each=3, rank=rank, beside=5 * rank)
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(dump(record, "")))
    assert "sequence number" not in analysed(tmp_path)


def test_a_folder_that_cannot_be_made_is_told_once_and_raises_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    served = FlightRecorder(Recorder())
    served.folder = tmp_path / "file" / "dumps"
    served.start()
    for _ in range(2):
        served.request("to see")
        served.flush(seconds=20)
    errors = capfd.readouterr().err
    assert errors.count("no dump of the flight recorder can be written") == 1


def test_a_long_reason_is_cut_between_words_in_the_log_and_whole_in_the_dump(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    served = FlightRecorder(Recorder())
    served.folder = tmp_path
    served.start()
    reason = "see the log of rank 17; " * 10 + "the end"
    served.request(reason)
    served.flush(seconds=20)
    told = capfd.readouterr().err.partition("(")[2].partition(")")[0]
    kept = told.removesuffix(" ...")
    assert kept != told
    assert reason.startswith(f"{kept} ")
    assert reason in (tmp_path / "rank0.txt").read_text()


def test_files_of_ranks_that_this_job_lacks_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    kept = ["rank_1", "rank1.txt", "rank_notes", "notes.txt"]
    for name in [*kept, "rank_2", "rank2.txt"]:
        (tmp_path / name).write_text("")
    served = FlightRecorder(Recorder())
    served.folder = tmp_path
    served.start()
    served.request("to see")
    served.flush(seconds=20)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*kept, "rank_0", "rank0.txt"}


def test_a_forked_child_leaves_signals_to_its_parent(tmp_path: Path) -> None:
    code = f"""
import os, signal, time
from pathlib import Path
from hetero.observe.flight_recorder import flight_recorder
recorder = flight_recorder()
recorder.folder = Path({str(tmp_path / "dumps")!r})
recorder.answer_signals()
child = os.fork()
if not child:
    time.sleep(60)
time.sleep(0.2)
os.kill(child, signal.SIGUSR2)
time.sleep(1.5)
print(recorder.folder.exists(), os.waitpid(child, os.WNOHANG) == (0, 0))
os.kill(child, signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "False True\n"
