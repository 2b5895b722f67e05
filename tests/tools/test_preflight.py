"""What `tools/preflight.py` promises, run for real: alone, and as several processes on loopback."""

from __future__ import annotations

import json
import os
import re
import subprocess
from unittest.mock import Mock

import pytest
import yaml

from hetero.tools import preflight
from tests.commands import ROOT, ended
from tests.distributed.harness import free_port, launch

pytestmark = pytest.mark.usefixtures("preloaded_ranks")
TOOL = ROOT / "tools" / "preflight.py"


def together(processes: int, *flags: str) -> subprocess.CompletedProcess[str]:
    """Through the launcher, on loopback."""
    launcher = f"--nnodes 1 --nproc-per-node {processes} --master-addr 127.0.0.1 --master-port"
    return ended("-m", "hetero.run", *launcher.split(), free_port(), TOOL, *flags)


def test_a_node_alone_is_described_and_measured(tmp_path):
    done = ended(TOOL, "--json", tmp_path / "found.json")
    record = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == (0 if record["ready"] else 1), done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == record["verdict"]
    assert max(map(len, lines)) <= 100
    for label in ("software", "host", "limits", "GPU", "network", "RDMA", "rails", "bandwidth"):
        assert any(line.startswith(label) for line in lines), label
    (node,) = record["nodes"]
    paths = {entry["path"]: entry for entry in node["facts"]["bandwidth"]}
    assert paths["tcp"]["error"] == ""
    assert paths["tcp"]["there_gb_s"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_without_bandwidth_nothing_is_measured(tmp_path):
    done = ended(TOOL, "--no-bandwidth", "--brief", "--json", tmp_path / "found.json")
    record = json.loads((tmp_path / "found.json").read_text())
    assert record["nodes"][0]["facts"]["bandwidth"] == []
    assert not any(line.startswith("software") for line in done.stdout.splitlines())
    assert done.stdout.splitlines()[-1] == record["verdict"]


def test_a_problem_makes_the_exit_code_1(tmp_path):
    """A package that is too old stands first on the path."""
    (tmp_path / "einops-0.1.dist-info").mkdir()
    (tmp_path / "einops-0.1.dist-info/METADATA").write_text("Name: einops\nVersion: 0.1\n")
    done = ended(TOOL, "--no-bandwidth", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 1, done.stderr
    assert "problem  software" in done.stdout
    assert "einops>=0.7 is wanted and 0.1 installed" in done.stdout
    assert "NOT READY" in done.stdout.splitlines()[-1]


def test_two_processes_of_one_node_speak_once_and_measure_between_them(tmp_path):
    done = together(2, "--json", str(tmp_path / "found.json"))
    record = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == (0 if record["ready"] else 1), done.stderr
    assert done.stdout.count("node 0 (") == 1
    assert len(record["nodes"]) == 1
    assert record["nodes"][0]["facts"]["bandwidth"][0]["path"].startswith("auto: ")


def test_emulated_nodes_call_and_measure_each_other_and_say_that_they_are(tmp_path):
    files = [*("--json", str(tmp_path / "found.json")), *("--write-cluster", str(tmp_path / "c"))]
    done = together(3, "--emulate-nodes", "--hetero-nics", "lo", *files)
    record = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == (0 if record["ready"] else 1), done.stderr
    assert "emulated" in done.stdout.splitlines()[-1]
    assert [node["card"]["number"] for node in record["nodes"]] == [0, 1, 2]
    assert len(record["calls"]) == 6
    assert [call["error"] for call in record["calls"]] == [""] * 6
    measured = {(p["source"], p["target"]) for p in record["paths"] if not p["error"]}
    assert measured == {(0, 1), (0, 2), (1, 2)}
    (kind,) = yaml.safe_load((tmp_path / "c").read_text())["nodes"]
    assert kind["nodes"] == 3
    assert kind["rail_gbits"] >= kind["rail_both_ways_gbits"] > 0


def test_the_node_itself_is_described_whatever_training_would_simulate(tmp_path):
    """A cluster file of a simulated vendor would have the planner trust figures of another."""
    written = {}
    for played in ("", "amd"):
        file = tmp_path / f"cluster{played}.yaml"
        done = ended(TOOL, "--no-bandwidth", "--write-cluster", file, HETERO_VENDOR=played)
        written[played] = file.read_text()
        assert ("HETERO_VENDOR=amd has training simulate" in done.stdout) is bool(played)
    assert yaml.safe_load(written["amd"]) == yaml.safe_load(written[""])
    remark = "# HETERO_VENDOR=amd has training simulate a vendor; these are the nodes themselves."
    assert remark in written["amd"].splitlines()
    assert "simulate" not in written[""]


def test_a_launchers_variables_that_are_no_numbers_are_refused(refused, monkeypatch):
    monkeypatch.setenv("RANK", "two")
    assert "RANK='two', which must be" in refused(preflight.main, "--no-bandwidth")


def test_wrong_nics_on_all_nodes_are_said_once():
    done = together(2, "--no-bandwidth", "--hetero-nics", "nope0", "nope1")
    assert done.returncode != 0
    for name in ("nope0", "nope1"):
        assert done.stderr.count(f"--hetero-nics {name} is no NIC") == 1


KILLED = """
import os, signal, sys
from hetero.startup import liveness
from hetero.tools import preflight
from hetero.tools.preflight_checks import job, network
network._TIMEOUT = 1000.0
liveness._HEARTBEAT_SECONDS = liveness._GRACE_SECONDS = 0.5
if os.environ["RANK"] == "{}":
    job.measure_paths = lambda end: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(preflight.main(["--emulate-nodes", "--hetero-nics", "lo"]))
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_they_measure_is_named_by_all_that_wait(victim: int, tmp_path) -> None:
    (tmp_path / "killed.py").write_text(KILLED.format(victim))
    outcomes = launch([], 3, scripts=dict.fromkeys(range(3), tmp_path / "killed.py"))
    for outcome in (outcomes[rank] for rank in range(3) if rank != victim):
        assert outcome.code == 1
        # If rank 0 is killed, the loss of its store may be noticed before that of its connection.
        said = rf"^error: .*rank {victim} .*(exited without reporting an error|has ended)"
        assert re.search(said, outcome.stderr, re.MULTILINE)
        assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupted_check_tells_the_others_and_waits_for_none(
    interrupt: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Mock()
    rank.check.side_effect = interrupt
    for name in ("open_store", "open_liveness", "JobExchanges", "ClusterCheck"):
        monkeypatch.setattr(preflight, name, Mock(return_value=rank))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(type(interrupt)):
        preflight._check(preflight._parse([]), rank=1, world_size=2)
    rank.fail.assert_called_once_with("it was interrupted")
    rank.leave.assert_not_called()
