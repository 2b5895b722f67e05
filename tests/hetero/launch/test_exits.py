"""Which process is the cause of an end, and what is said of it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hetero.errors import write_error_file, write_name_file
from hetero.launch.exits import (
    ProcessExit,
    exit_of,
    find_cause,
    is_printed,
    kills_for_memory,
)

KILLED = ProcessExit(rank=1, host="b", code=-9, time=101)
CONSEQUENCE = ProcessExit(
    rank=0, host="a", code=1, time=100, text="closed", printed=True, consequence=True
)
OWN = ProcessExit(rank=2, host="a", code=1, time=101, text="ValueError: x", printed=True)
SHARED = ProcessExit(
    rank=3, host="a", code=2, time=100, text="bad", printed=True, known_to_all=True
)
TERMINATED = ProcessExit(rank=4, host="a", code=-15, time=100)
STOPPED_WHILE_EXITING = ProcessExit(rank=6, host="a", code=-15, time=101, text="ValueError: x")
ASKED_TO_END = ProcessExit(rank=7, host="a", code=143, time=100, text="ended by SIGTERM")
ABORTED_AFTER = ProcessExit(rank=8, host="a", code=-6, time=101)
SILENT = ProcessExit(rank=5, host="a", code=3, time=100)


@pytest.mark.parametrize(
    ("exits", "cause"),
    [
        ([CONSEQUENCE, KILLED, TERMINATED], KILLED),
        ([CONSEQUENCE, OWN], OWN),
        ([OWN, KILLED], KILLED),
        ([TERMINATED, SILENT], SILENT),
        ([ASKED_TO_END, SILENT], SILENT),
        ([ASKED_TO_END, CONSEQUENCE], ASKED_TO_END),
        ([ASKED_TO_END, ABORTED_AFTER], ASKED_TO_END),
        ([TERMINATED, CONSEQUENCE], CONSEQUENCE),
        ([SHARED, TERMINATED], SHARED),
        ([CONSEQUENCE, STOPPED_WHILE_EXITING], STOPPED_WHILE_EXITING),
    ],
)
def test_the_cause_is_who_ended_of_itself(exits: list[ProcessExit], cause: ProcessExit) -> None:
    assert find_cause(exits) is cause
    assert find_cause(exits[::-1]) is cause


def test_of_those_who_were_signalled_in_one_second_the_cause_is_who_is_told_of_first() -> None:
    """As Ctrl-C or a scheduler may reach one process alone, for which the others are terminated."""
    interrupted = ProcessExit(rank=5, host="a", code=-signal.SIGINT, time=100)
    assert find_cause([interrupted, TERMINATED]) is interrupted


def test_who_is_killed_long_after_an_end_is_not_its_cause() -> None:
    """As a launcher kills what does not end when it is asked to."""
    late = ProcessExit(rank=1, host="a", code=-9, time=130)
    assert find_cause([SHARED, late]) is SHARED


@pytest.mark.parametrize(
    ("exited", "words", "code"),
    [
        (KILLED, "rank 1 on b was killed by SIGKILL; did memory run out?", 137),
        (OWN, "rank 2 on a: ValueError: x", 1),
        (SHARED, "bad", 2),
        (SILENT, "rank 5 on a ended with exit code 3; see what it printed", 3),
        (
            ProcessExit(3, "a", -signal.SIGBUS),
            "rank 3 on a was ended by SIGBUS; was a file that it reads, its data for instance, cut "
            "short or replaced, or is /dev/shm full?",
            135,
        ),
        (STOPPED_WHILE_EXITING, "rank 6 on a: ValueError: x", 1),
        (TERMINATED, "rank 4 on a was ended by SIGTERM; see what it printed", 143),
    ],
)
def test_the_sentence_names_rank_and_host(exited: ProcessExit, words: str, code: int) -> None:
    assert exited.sentence() == words
    assert exited.exit_code == code


def test_a_want_of_memory_is_said_where_the_kernel_says_it(tmp_path: Path) -> None:
    assert "the host ran out of memory" in KILLED.sentence(out_of_memory=True)
    file = tmp_path / "vmstat"
    file.write_text("pgfault 5\noom_kill 3\n")
    assert kills_for_memory((file, tmp_path / "missing")) == 3


def test_what_stands_last_on_the_screen_is_not_said_again() -> None:
    assert is_printed(SHARED, [SHARED, TERMINATED])
    assert is_printed(OWN, [OWN, TERMINATED])
    assert not is_printed(OWN, [OWN, CONSEQUENCE])
    assert not is_printed(KILLED, [KILLED])
    assert not is_printed(OWN, [OWN, SILENT])


def test_a_process_leaves_word_in_the_error_file_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    write_error_file("nobody asked", printed=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    write_error_file("out of luck", printed=True, consequence=True)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    exited = exit_of(7, "a", failure)
    assert (exited.text, exited.printed, exited.consequence) == ("out of luck", True, True)
    assert not exited.known_to_all
    silent = ProcessFailure(local_rank=0, pid=1, exitcode=3, error_file=str(tmp_path / "none"))
    assert exit_of(0, "a", silent).text == ""
    assert exited.time == int(json.loads(file.read_text())["message"]["extraInfo"]["timestamp"])


def test_a_process_that_is_killed_has_the_name_that_it_left(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HETERO_NAMES_FOLDER", str(tmp_path))
    write_name_file(1, "rank 1 on b (stage 0, amd)")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=-9, error_file=str(tmp_path / "none"))
    said = exit_of(1, "b", failure).sentence()
    assert said == "rank 1 on b (stage 0, amd) was killed by SIGKILL; did memory run out?"
