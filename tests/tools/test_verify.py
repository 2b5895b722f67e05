"""`hetero verify`: what it refuses, what it keeps, and how steps end; then all of it, for real."""

from __future__ import annotations

import getpass
import json
import re
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero.errors import ExchangeError, HeteroError
from hetero.tools import verify
from hetero.tools.runs import DeadlinePassed
from hetero.tools.verification.job import Job, Nodes
from hetero.tools.verification.steps import NAMES, Step, perform
from hetero.tools.verification.verdict import Outcome, Verdict, judged
from tests.commands import ROOT, ended
from tests.distributed.harness import free_port
from tests.tools.verification.jobs import job

TOOL = ROOT / "tools" / "verify.py"


def judge(job: Job, said: Any, name: str = "links") -> Verdict:
    return judged(name, (), passed="well", results={"what": "kept"})


class Steps:
    """Steps that count how often they are checked; some fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, failing: str = "") -> None:
        self.checked: list[str] = []
        self.failing = failing
        made = tuple(self._step(name) for name in NAMES)
        monkeypatch.setattr(verify, "STEPS", made)
        monkeypatch.setenv("HETERO_VENDOR", "amd,nvidia")

    def _step(self, name: str) -> Step:
        def check(job: Job) -> dict[str, Any]:
            self.checked.append(name)
            if name == self.failing:
                raise HeteroError("rank 1 on far has ended")
            return {"report": {"calls": []}}

        return Step(name, f"what {name} is", 5.0, check, partial(judge, name=name))


def run(out: Path, *words: str) -> int:
    return verify.main(["--nproc-per-node", "2", "--out", str(out), *words])


def test_what_has_passed_is_not_run_again_and_what_failed_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = Steps(monkeypatch, failing="speed")
    assert run(tmp_path) == 1
    assert steps.checked == list(NAMES)
    steps.failing = ""
    assert run(tmp_path) == 0
    assert steps.checked[len(NAMES) :] == ["speed"]
    assert run(tmp_path, "--redo", "links") == 0
    assert steps.checked[len(NAMES) + 1 :] == ["links"]


def test_other_code_or_another_node_has_every_step_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = Steps(monkeypatch)
    assert run(tmp_path) == 0
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert run(tmp_path) == 0
    assert steps.checked == [*NAMES, *NAMES]


def test_a_failure_says_what_was_expected_what_was_seen_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Steps(monkeypatch, failing="speed")
    assert run(tmp_path) == 1
    said = capsys.readouterr().out
    assert "expected: what speed is, within 5 s" in said
    assert "seen:     node 0 (node0): rank 1 on far has ended" in said
    assert "to do:    do what it says" in said
    record = json.loads((tmp_path / "verify.json").read_text())
    outcomes = {step["step"]: step["outcome"] for step in record["steps"]}
    assert outcomes == dict.fromkeys(NAMES, "passed") | {"speed": "failed"}
    assert "rank 1 on far has ended" in (tmp_path / "verify.html").read_text()


def test_steps_that_are_not_asked_for_keep_it_from_passing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = Steps(monkeypatch)
    assert run(tmp_path, "--only", "links") == 1
    assert steps.checked == ["links"]


def late(job: Job) -> dict[str, Any]:
    while True:
        job.watch()
        time.sleep(0.01)


def test_a_step_that_hangs_ends_at_its_deadline(tmp_path: Path) -> None:
    verdict, _ = perform(Step("links", "links", 0.1, late, judge), job(tmp_path))
    assert verdict.outcome is Outcome.TIMED_OUT
    assert "it had not ended at its deadline" in verdict.summary


def test_a_program_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    hanging = job(tmp_path)
    hanging.begin("links", seconds=0.5)
    with pytest.raises(DeadlinePassed):
        hanging.run("sleeps", ["-c", "import time; time.sleep(600)"])
    assert not [p for p in psutil.Process().children(recursive=True) if "sleep(600)" in _line(p)]


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_links_between_nodes_of_one_vendor_are_not_run_and_no_pass(tmp_path: Path) -> None:
    alone = job(tmp_path, job(tmp_path).facts[0])
    verdict, _ = perform(Step("links", "links", 5.0, late, judge), alone)
    assert verdict.outcome is Outcome.NOT_RUN
    assert "nodes of two vendors, and these are of amd" in verdict.summary


def test_nodes_hear_each_other_and_name_who_is_silent() -> None:
    port = free_port()
    made: dict[int, Nodes] = {}

    def join(number: int) -> None:
        made[number] = Nodes(number=number, count=2, master="127.0.0.1", port=port)

    threads = [threading.Thread(target=join, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    heard: list[Any] = []
    other = threading.Thread(target=lambda: heard.append(made[1].exchange({"n": 1}, seconds=60)))
    other.start()
    assert made[0].exchange({"n": 0}, seconds=60) == [{"n": 0}, {"n": 1}]
    other.join(60)
    assert heard == [[{"n": 0}, {"n": 1}]]
    made[1].send_file("large", bytes(range(256)) * 10_000)
    assert made[0].fetch_file("large") == bytes(range(256)) * 10_000
    with pytest.raises(ExchangeError, match="node 1 did not come within 1 s"):
        made[0].exchange({}, seconds=1)
    assert not made[0].is_told("a word")
    made[1].tell("a word")
    assert made[0].is_told("a word")
    made[0].begin_step()
    made[1].begin_step()
    made[1].fail_step()
    with pytest.raises(ExchangeError, match="another node has given this step up"):
        made[0].exchange({}, seconds=60)
    made[1].leave()
    with pytest.raises(ExchangeError, match="node 1 has left before the end"):
        made[0].exchange({}, seconds=60, ends_step=True)


# All of it.


def own_names() -> list[str]:
    """What a report must not hold of this machine."""
    addresses = [a.address for each in psutil.net_if_addrs().values() for a in each]
    public = {"127.0.0.1", "::1", "00:00:00:00:00:00", "lo", "root"}
    names = [socket.gethostname(), getpass.getuser(), str(ROOT), str(Path.home())]
    names += [name for name in psutil.net_if_addrs() if name != "lo"]
    return [name for name in [*names, *addresses] if name not in public]


def assert_names_nothing(out: Path, names: list[str]) -> None:
    for file in ("verify.json", "verify.html"):
        text = (out / file).read_text()
        found = [name for name in names if re.search(rf"(?<![\w]){re.escape(name)}(?!\w)", text)]
        assert found == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_processes_of_one_node_pass_every_step_and_name_nothing(tmp_path: Path) -> None:
    out = tmp_path / "verify"
    words = ["--nproc-per-node", 2, "--out", out, "--deadline-factor", 4]
    done = ended(TOOL, *words, seconds=1700, HETERO_VENDOR="amd,nvidia")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    record = json.loads((out / "verify.json").read_text())
    assert record["simulated"]
    assert "simulated" in done.stdout.splitlines()[-1]
    assert "simulated" in (out / "verify.html").read_text()
    kept = [
        d for d in record["differs_from_simulated"] if not re.fullmatch(r"[\d.e+-]+", d["seen"])
    ]
    assert kept == []
    assert_names_nothing(out, own_names())
    again = ended(TOOL, *words, seconds=300, HETERO_VENDOR="amd,nvidia")
    assert again.returncode == 0
    assert again.stdout.count("(before, ") == len(NAMES)
