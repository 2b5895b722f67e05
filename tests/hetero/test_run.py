"""The launcher: its exit codes, and the line that stands last."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from hetero import run
from hetero.run import main
from tests import preloaded
from tests.distributed.harness import ENTRY, TINY_LLAMA, free_port
from tests.live_views import awaited, state_of

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import os, signal, sys, time
how, rank = sys.argv[1], int(os.environ["RANK"])
if how == "well":
    words = [str(rank), os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"], *sys.argv[2:]]
    # As a whole: Python's output is unbuffered here, and another rank writes to the same pipe.
    sys.stdout.write(" ".join(words) + "\\n")
    sys.exit(0)
while how == "until" and not os.path.exists(sys.argv[2]):
    time.sleep(0.05)
if how == "until":
    sys.exit(0)
if how == "late" and rank == int(os.environ["WORLD_SIZE"]) - 1:
    time.sleep(3)
    os.kill(os.getpid(), signal.SIGKILL)
if how in ("late", "first") and rank == 0:
    print("ends", flush=True)
    sys.exit(0)
if how == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    sys.exit(0)
if rank == int(os.environ["WORLD_SIZE"]) - 1:
    print("about to end", file=sys.stderr, flush=True)
    if how == "exit3":
        sys.exit(3)
    if how == "raise":
        raise ValueError("out of luck")
    if how in ("kill", "once"):
        os.kill(os.getpid(), signal.SIGKILL)
if how == "wait" and rank == 0 or how == "told" and rank == 1:
    print("ready", flush=True)
while how == "told" and rank == 0:
    time.sleep(0.05)
    if os.path.exists(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
time.sleep(120)
"""

HOLDS = """
import importlib.abc, importlib.util, pathlib, sys, time

class Hold(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self) if name == "torch" else None

    def exec_module(self, module):
        print("here", flush=True)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if pathlib.Path(__file__).with_name("go on").exists():
                sys.exit("held")
            time.sleep(0.05)

sys.meta_path.insert(0, Hold())
"""
"""Has the import of torch, but not the look whether there is one, wait for a file, and end the
process then."""

SOON = """
import sys
from hetero.startup import store
from hetero.launch import node_failures
from hetero.run import main
if __name__ == "__main__":
    store.FIRST_SECONDS = store.AGAIN_SECONDS = 0.2
    node_failures.GRACE = 0.5
    sys.exit(main())
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture
def soon(tmp_path: Path) -> tuple[str]:
    """The launcher, which says after a moment whom it waits for."""
    path = tmp_path / "soon.py"
    path.write_text(SOON)
    return (str(path),)


def environment() -> dict[str, str]:
    kept = {n: v for n, v in os.environ.items() if n not in ("OMP_NUM_THREADS", "LOGLEVEL")}
    return kept | {"PYTHONPATH": str(ROOT)}


def start(
    *words: str,
    launcher: tuple[str, ...] = ("-m", "hetero.run"),
    python: str | None = None,
    environ: Mapping[str, str] = {"OMP_NUM_THREADS": "1"},
) -> subprocess.Popen[str]:
    """`python`: instead of one that has imported torch."""
    return subprocess.Popen(
        [python or sys.executable, *launcher, *words],
        env=environment() | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has them, and so this, ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str], list[str]]:
    """Its exit code, and what it printed after its first line, without the times."""
    out, err = process.communicate(timeout=120)
    lines = [STAMP.sub("", line) for line in err.splitlines() if not STARTING.fullmatch(line)]
    return process.returncode, out.splitlines(), lines


STAMP = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] ")
STARTING = re.compile(
    rf"{STAMP.pattern}hetero\.run: starting (\d+ ranks?|the ranks) on "
    rf"{re.escape(socket.gethostname())}, importing PyTorch \.\.\."
)


def test_the_first_line_comes_before_torch_is_imported(script: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOLDS)
    process = start(
        *("--nproc-per-node=2", script, "well"),
        python=preloaded.INTERPRETER,
        environ={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    assert process.stderr is not None
    first = STARTING.fullmatch(process.stderr.readline().rstrip("\n"))
    assert first
    assert first[1] == "2 ranks"
    (tmp_path / "go on").touch()
    assert process.communicate()[1].endswith("held\n")


def test_a_program_that_ends_well_is_all_that_is_heard(script: str) -> None:
    """Started as users start it, without a variable that it sets, which is said."""
    words = ["--nproc-per-node", "2", script, "well", "--its", "flags"]
    code, out, err = ended(start(*words, python=preloaded.INTERPRETER, environ={}))
    assert code == 0
    (threads,) = err
    assert "hetero.run: OMP_NUM_THREADS is not set; every rank has 1 thread" in threads
    assert all(line.split()[2] == "1" for line in out)


def test_a_variable_that_is_misspelt_is_told_with_the_nearest(script: str) -> None:
    environ = {"OMP_NUM_THREADS": "1", "HETERO_INSTED_OF": "gloo", "HETERO_INSTEAD_OF": "glo,nccl"}
    code, _, err = ended(start("--nproc-per-node", "1", script, "first", environ=environ))
    assert code == 0
    assert [line.split("warning: ")[1] for line in err] == [
        "HETERO_INSTED_OF is no variable of this project; did you mean HETERO_INSTEAD_OF?",
        "HETERO_INSTEAD_OF names glo, which is no backend of torch.distributed; did you mean gloo?",
    ]


def test_a_program_s_words_reach_every_rank(script: str) -> None:
    code, out, err = ended(start("--nproc-per-node", "2", script, "well", "--its", "flags"))
    assert (code, err) == (0, [])
    assert sorted(line.split()[:2] for line in out) == [["0", "2"], ["1", "2"]]
    assert all(line.endswith("--its flags") for line in out)


def test_it_says_where_groups_of_a_script_would_not_cross_vendors(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    code, _, err = ended(start("--nproc-per-node", "2", script, "well"))
    assert code == 0
    (line,) = err
    assert "will not cross vendors" in line
    assert "unset it" in line


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("exit3", 3, "ended with exit code 3; see what it printed"),
        ("raise", 1, "ended with exit code 1; see what it printed"),
        ("kill", 137, "was killed by SIGKILL"),
    ],
)
def test_a_rank_that_fails_is_named_last_with_its_exit_code(
    script: str, how: str, code: int, last: str
) -> None:
    returned, _, err = ended(start("--standalone", "--nproc-per-node", "2", script, how))
    assert returned == code
    assert err[-1].startswith(f"error: rank 1 on {os.uname().nodename} ")
    assert last in err[-1]
    assert sum("error: " in line for line in err) == 1
    assert sum("Traceback" in line for line in err) == (how == "raise")


def test_it_says_when_processes_start_again(script: str) -> None:
    """A process that was killed says nothing itself."""
    words = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", script, "once")
    code, _, (*err, seconds) = ended(start(*words))
    assert code == 0
    assert err == [
        "about to end",
        f"hetero.run: the processes of {os.uname().nodename} start again (1 of 1): rank 1 on "
        f"{os.uname().nodename} was killed by SIGKILL; did memory run out?",
    ]
    assert seconds.startswith("hetero.run: since the loss: detection ")


def test_an_exception_of_a_script_that_uses_pytorch_is_the_last_word(tmp_path: Path) -> None:
    """Of a fresh process: the hook is set when PyTorch is imported."""
    path = tmp_path / "script.py"
    path.write_text("import torch\nraise ValueError('out of luck')")
    words = ["-m", "hetero.run", "--standalone", "--nproc-per-node", "1", str(path)]
    process = subprocess.Popen(
        [preloaded.INTERPRETER, *words], env=environment(), stderr=subprocess.PIPE, text=True
    )
    _, err = process.communicate(timeout=120)
    last = f"error: rank 0 on {os.uname().nodename}: ValueError: out of luck"
    assert err.splitlines()[-1] == last
    assert process.returncode == 1


def test_other_programs_and_modules_are_started_as_torchrun_does(script: str) -> None:
    shell = ("--no-python", "--nproc-per-node", "2", "sh", "-c", "exit $((3 * $RANK))")
    assert ended(start(*shell))[0] == 3
    code, out, _ = ended(start("--nproc-per-node", "1", "-m", "json.tool", "--help"))
    assert code == 0
    assert "usage" in out[0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything_with_one_line(script: str, number: int, code: int) -> None:
    process = start("--nproc-per-node", "2", script, "wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    returned, _, err = ended(process)
    assert returned == code
    assert err[-1].startswith("error: ")


def test_an_interrupt_while_pytorch_is_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOLDS)
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    process = start(python=preloaded.INTERPRETER, environ=path)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    assert ended(process) == (130, [], ["error: interrupted; nothing was started"])


def test_what_asks_for_stacks_or_a_dump_does_not_end_a_launcher_that_starts(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOLDS)
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    process = start(python=preloaded.INTERPRETER, environ=path)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGINT)
    assert ended(process) == (130, [], ["error: interrupted; nothing was started"])


def test_signal_that_torchelastic_turns_into_another_error_is_reported(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its timers read what they have not set yet, where the signal comes before they have."""

    def timed(*_: object, **__: object) -> None:
        try:
            raise SignalException("got signal", sigval=signal.SIGTERM)
        finally:
            raise UnboundLocalError("start")

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(run, "run_agent", timed)
    monkeypatch.setattr(run, "_end_children", lambda: None)
    assert main([script]) == 143
    assert capsys.readouterr().err.startswith("error: ended by SIGTERM; so are the processes of ")


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        ("--foo SCRIPT", ["unrecognized arguments: --foo"]),
        ("", ["the following arguments are required: training_script"]),
        ("-m --no-python sh", ["Don't use both the '--no-python' flag and the '--module' flag"]),
        (
            "--nproc-per-node many --nnodes some --rdzv-conf timeout=x -m no_such_module_at_all",
            [
                "--nnodes some: ",
                "--nproc-per-node many: ",
                "--rdzv-conf timeout=x: ",
                "there is no module no_such_module_at_all",
            ],
        ),
        (
            "--nproc-per-node 0 --standalone --nnodes 2 --max-restarts -1 nothing.py",
            [
                "--nproc-per-node is 0; give 1 or more",
                "--standalone is for one node and --nnodes is 2;",
                "there is no file nothing.py",
                "max_restarts must be >= 0",
            ],
        ),
        (
            "--node-rank 2 --nnodes 2 --master-addr= --master-port 1 --no-python no-such-program",
            [
                "--node-rank is 2 and the job has 2 nodes; give 0 to 1",
                "the rendezvous endpoint ':1' has no host",
                "there is no program no-such-program",
            ],
        ),
        (
            "--nnodes 2 --node-rank 1 SCRIPT",
            ["--nnodes is 2 and --master-addr is missing; give the address of node 0 on every"],
        ),
        (
            "--nnodes 2 SCRIPT",
            ["--nnodes is 2 and --master-addr is missing; give the address of node 0 on every"],
        ),
        (
            "--hetero-evict --hetero-restarts 1 --nnodes 1 SCRIPT",
            ["--hetero-evict needs --hetero-restarts of 1 or more and --nnodes of more than one"],
        ),
        (
            "--nnodes 1:2 --rdzv-backend c10d SCRIPT",
            ["--nnodes is 1:2 and --rdzv-endpoint is missing; give the address of one node"],
        ),
        (
            "--nnodes 2 --master-addr fe80::1%eth0 SCRIPT",
            ["fe80::1%eth0 is a link-local address, by which gloo and links cannot meet"],
        ),
        ("FOLDER", ["FOLDER is a folder without __main__.py; name the script"]),
        (
            "--metrics-port http --nproc-per-node 0 SCRIPT",
            [
                "--nproc-per-node is 0",
                "--metrics-port (HETERO_METRICS_PORT) is 'http'; give a port",
            ],
        ),
        (
            "--metrics-address 0.0.0.0 SCRIPT",
            ["--metrics-address (HETERO_METRICS_ADDRESS) needs --metrics-port"],
        ),
        (
            "--rdzv-backend c10d --rdzv-endpoint host: --log-dir /proc/none SCRIPT",
            ["the rendezvous endpoint 'host:' has no port", "[Errno 2] No such file or directory"],
        ),
    ],
)
def test_all_bad_flags_are_told_at_once(
    script: str,
    words: str,
    reasons: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (
        ("OMP_NUM_THREADS", "1"),
        ("HETERO_METRICS_PORT", ""),
        ("HETERO_METRICS_ADDRESS", ""),
    ):
        monkeypatch.setenv(name, value)
    folder = str(Path(script).parent)
    assert main(words.replace("SCRIPT", script).replace("FOLDER", folder).split()) == 2
    first, *more = capsys.readouterr().err.replace(folder, "FOLDER").splitlines()
    told = more or [first.removeprefix("error: ")]
    assert all(t.strip().startswith(r) for t, r in zip(told, reasons, strict=True)), told


@pytest.mark.parametrize(
    ("words", "vendor", "reasons"),
    [
        (
            "--hetero-fallback auto SCRIPT",
            "nvidia",
            [
                "--hetero-fallback needs --hetero-restarts of 1 or more",
                "--hetero-fallback auto plans for pretrain_gpt.py, and the script is SCRIPT",
            ],
        ),
        (
            "--hetero-restarts 1 --hetero-fallback auto TRAINING --mock-data --tokenizer-type "
            "NullTokenizer --vocab-size 500",
            "plan",
            [
                "--hetero-fallback needs nodes of one vendor each, and HETERO_VENDOR is 'plan'",
                "--hetero-fallback auto is for the loss of one vendor of several, and the job has",
            ],
        ),
        (
            "--hetero-restarts 1 --hetero-fallback PLAN TRAINING --mock-data --tokenizer-type "
            "NullTokenizer --vocab-size 500",
            "nvidia",
            ["--hetero-fallback PLAN: the stages hold [5] layers, 5 in all, but --num-layers is 4"],
        ),
    ],
)
def test_fallbacks_that_could_not_run_are_told_at_the_start(
    script: str,
    tmp_path: Path,
    words: str,
    vendor: str,
    reasons: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HETERO_VENDOR", vendor)
    plan = tmp_path / "plan.yaml"
    plan.write_text("meshes:\n- {vendor: nvidia, layers: [5]}\n")
    names = {"SCRIPT": script, "PLAN": str(plan), "TRAINING": f"{ENTRY} {' '.join(TINY_LLAMA)}"}
    for name, value in names.items():
        words = words.replace(name, value)
    assert main(words.split()) == 2
    said = capsys.readouterr().err.replace(script, "SCRIPT").replace(str(plan), "PLAN")
    first, *more = said.splitlines()
    told = more or [first.removeprefix("error: ")]
    assert all(t.strip().startswith(r) for t, r in zip(told, reasons, strict=True)), told


def test_a_host_name_that_cannot_be_looked_up_is_refused(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux allows it; PyTorch's launcher would end with a traceback."""
    monkeypatch.setattr(socket, "gethostname", lambda: 64 * "a")
    assert main([script]) == 2
    assert f"the host is called '{64 * 'a'}', which is no host name" in capsys.readouterr().err


# Several nodes, all on this host.


def start_nodes(
    script: str,
    how: str,
    *words: str,
    launcher: tuple[str, ...],
    sizes: Sequence[str] = ("2", "2"),
    processes: int = 1,
    python: str | None = None,
) -> list[subprocess.Popen[str]]:
    """A launcher a node; `sizes` is how many nodes each is told that there are."""
    place = ["--nproc-per-node", str(processes)]
    place += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    place += [script, how, *words]
    return [
        start("--nnodes", size, "--node-rank", str(node), *place, launcher=launcher, python=python)
        for node, size in enumerate(sizes)
    ]


def test_a_cause_on_one_node_is_the_last_word_and_the_exit_code_on_all(
    script: str, soon: tuple[str]
) -> None:
    """The other node's processes know nothing of it, and would go on."""
    for process in start_nodes(script, "kill", launcher=soon, processes=2):
        code, _, err = ended(process)
        assert code == 137
        (line,) = [line for line in err if line.startswith("error: ")]
        assert line.startswith("error: rank 3 on ")
        assert "was killed by SIGKILL" in line


def test_nodes_that_are_started_with_different_sizes_of_the_job_are_told_so(
    script: str, soon: tuple[str]
) -> None:
    sizes = "2", "3"
    for process in start_nodes(script, "well", launcher=soon, sizes=sizes):
        code, _, err = ended(process)
        assert code == 2
        assert err[-1].startswith("error: node ")
        for node, size in enumerate(sizes):
            assert f"node {node} on {socket.gethostname()} " in err[-1]
            assert f" with --nnodes {size}" in err[-1] or f" with {size};" in err[-1]


@pytest.mark.parametrize("backend", ["static", "c10d"])
@pytest.mark.parametrize(
    ("flag", "values"),
    [("--max-restarts", ("0", "3")), ("--rdzv-id", ("one", "two")), ("--nnodes", ("2", "3"))],
)
def test_nodes_that_are_started_with_different_flags_are_told_so(
    script: str, soon: tuple[str], backend: str, flag: str, values: tuple[str, str]
) -> None:
    endpoint = ["--rdzv-backend", backend, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    common = ["--nproc-per-node", "1", *endpoint, "--nnodes", "2", "--max-restarts", "0"]
    nodes = [
        start(*common, flag, value, "--node-rank", str(node), script, "well", launcher=soon)
        for node, value in enumerate(values)
    ]
    for process in nodes:
        code, _, err = ended(process)
        assert code == 2
        for value in values:
            assert f" with {flag} {value}" in err[-1]


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_nodes_that_start_different_numbers_of_ranks_say_so_and_go_on(
    script: str, soon: tuple[str], backend: str
) -> None:
    endpoint = ["--rdzv-backend", backend, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    nodes = [
        start(
            *("--nnodes", "2", *endpoint, "--node-rank", str(node)),
            *("--nproc-per-node", str(node + 1), script, "well"),
            launcher=soon,
        )
        for node in (0, 1)
    ]
    for process in nodes:
        code, out, err = ended(process)
        assert code == 0
        assert all(line.split()[1] == "3" for line in out)
        words = "the nodes start different numbers of ranks (--nproc-per-node): node 0 on"
        (line,) = (line for line in err if words in line)
        assert line.endswith("; 3 in all")


def test_a_second_launcher_of_a_number_is_refused_and_the_first_is_told(
    script: str, soon: tuple[str]
) -> None:
    place = ["--nnodes", "3", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    first = start(*place, "--node-rank", "0", script, "well", launcher=soon)
    both = [start(*place, "--node-rank", "1", script, "well", launcher=soon) for _ in range(2)]
    while all(process.poll() is None for process in both):
        time.sleep(0.05)
    refused, other = sorted(both, key=lambda process: process.poll() is None)
    code, _, err = ended(refused)
    assert code == 2
    assert err[-1].startswith("error: another launcher is node 1 at 127.0.0.1:")
    assert other.stderr is not None
    told = next(line for line in other.stderr if "was refused because" in line)
    assert "it says that it is node 1 too; give each node its own --node-rank" in told
    last = start(*place, "--node-rank", "2", script, "well", launcher=soon)
    assert [ended(process)[0] for process in (first, other, last)] == [0, 0, 0]


def test_a_second_node_without_a_number_is_told_what_it_lacks(
    script: str, soon: tuple[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = ["--master-addr", "127.0.0.1", "--master-port", str(other.getsockname()[1])]
        code, _, err = ended(start("--nnodes", "2", *place, script, "well", launcher=soon))
    assert code == 2
    assert "already; if that is node 0, give this node its own --node-rank" in err[-1]


def test_a_node_without_a_number_on_another_host_is_refused(script: str, soon: tuple[str]) -> None:
    words = ["--nnodes", "2", "--master-addr", "192.0.2.1", script, "well"]
    code, _, err = ended(start(*words, launcher=soon))
    assert code == 2
    assert "is no address of" in err[-1]
    assert "--node-rank is missing; give every node its own" in err[-1]


def test_a_node_whose_processes_have_ended_well_ends_when_another_fails(
    script: str, soon: tuple[str]
) -> None:
    for process in start_nodes(script, "late", launcher=soon):
        code, _, err = ended(process)
        assert code == 137
        assert err[-1].startswith("error: rank 1 on ")


@pytest.mark.slow  # fails where the signal comes between the last line and the wait
def test_a_signal_while_a_launcher_waits_for_another_leaves_it_its_exit_code(
    script: str, soon: tuple[str], tmp_path: Path
) -> None:
    # As processes of their own, of which one can be stopped.
    until, python = tmp_path / "until", preloaded.INTERPRETER
    first, other = start_nodes(script, "told", str(until), launcher=soon, python=python)
    assert other.stdout is not None
    assert first.stderr is not None
    try:
        assert other.stdout.readline() == "ready\n"
        other.send_signal(signal.SIGSTOP)
        until.touch()
        assert any(line.startswith("error: rank 0 on ") for line in first.stderr)
        first.send_signal(signal.SIGTERM)
        assert ended(first) == (137, [], [])
    finally:
        for process in (first, other):
            process.kill()
            process.communicate()


def test_finished_node_can_be_interrupted_while_another_runs(script: str, soon: tuple[str]) -> None:
    # As processes of their own, whose children are seen.
    python = preloaded.INTERPRETER
    first, other = start_nodes(script, "first", launcher=soon, python=python)
    assert first.stdout is not None
    assert first.stdout.readline() == "ends\n"
    while psutil.Process(first.pid).children():
        time.sleep(0.05)
    for process in (first, other):
        process.send_signal(signal.SIGINT)
    for process in (first, other):
        code, _, err = ended(process)
        assert code == 130
        assert err[-1].startswith("error: interrupted")


def test_node_0_names_the_nodes_that_are_missing_until_its_deadline(
    script: str, soon: tuple[str]
) -> None:
    port = free_port()
    words = ["--nnodes", "3", "--node-rank", "0", "--nproc-per-node", "4"]
    words += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    words += ["--rdzv-conf", "timeout=1", script, "well"]
    code, _, err = ended(start(*words, launcher=soon))
    assert code == 2
    who = "nodes 1-2 of 3 (from rank 4 on)"
    assert err[0].startswith(f"waiting for {who} at 127.0.0.1:{port}, ")
    assert err[-1].startswith(f"error: {who} did not come within 1 s while ")
    assert f" at 127.0.0.1:{port}; see that every node was started" in err[-1]


@pytest.mark.parametrize(
    ("backend", "host"),
    [("static", "no-such-host.invalid"), ("c10d", "127.0.0.1")],
)
def test_a_node_that_cannot_reach_the_rendezvous_says_so_itself(
    script: str, soon: tuple[str], backend: str, host: str
) -> None:
    words = ["--nnodes", "2", "--node-rank", "1", "--rdzv-backend", backend]
    words += ["--rdzv-endpoint", f"{host}:{free_port()}"]
    words += ["--rdzv-conf", "timeout=1,is_host=0", script, "well"]
    code, _, err = ended(start(*words, launcher=soon))
    assert code == 2
    assert err[0].startswith("waiting for ")
    assert host in err[0]
    is_here = f"; that is an address of {os.uname().nodename} itself)"
    assert (is_here in err[0]) == (host == "127.0.0.1")
    assert " could not reach " in err[-1]
    assert sum(line.startswith("error: ") for line in err) == 1


def test_a_job_that_is_started_twice_leaves_the_first_alone(
    script: str, soon: tuple[str], tmp_path: Path
) -> None:
    place = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    place += ["--nproc-per-node", "2", "--node-rank"]
    # The job is there until the one that comes too late has come.
    until = [script, "until", str(tmp_path / "end")]
    first = start(*place, "0", *until, launcher=soon)
    joining = [start(*place, "1", *until, launcher=soon) for _ in range(2)]
    while all(process.poll() is None for process in joining):
        time.sleep(0.05)
    refused, other = sorted(joining, key=lambda process: process.poll() is None)
    (tmp_path / "end").touch()
    code, _, err = ended(refused)
    assert code == 2
    for process in (other, first):
        outcome = ended(process)
        assert outcome[0] == 0, outcome
    assert err[-1].startswith("error: another launcher is node 1 at 127.0.0.1:")


def test_a_port_where_something_else_listens_is_waited_for_aloud_and_not_for_ever(
    script: str, soon: tuple[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"127.0.0.1:{other.getsockname()[1]}"
        words = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", endpoint]
        words += ["--rdzv-conf", "timeout=1", script, "well"]
        code, _, err = ended(start(*words, launcher=soon))
    assert code == 2
    assert err[0].startswith(f"waiting for node 0 at {endpoint}, where something else may listen")
    assert f" could not reach node 0 at {endpoint} within 1 s" in err[-1]


def test_node_0_says_that_its_address_is_not_its_own(script: str, soon: tuple[str]) -> None:
    words = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "192.0.2.9"]
    words += ["--master-port", str(free_port()), "--rdzv-conf", "timeout=1", script, "well"]
    code, _, err = ended(start(*words, launcher=soon))
    assert code == 2
    assert f"(192.0.2.9 is no address of {os.uname().nodename})" in err[0]
    assert sum(line.startswith("error: ") for line in err) == 1


SHOWN = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("hetero")
dist.all_reduce(torch.ones(3))
while not Path(sys.argv[1]).exists():
    time.sleep(0.05)
dist.destroy_process_group()
"""


def test_metrics_port_shows_a_script_s_ranks_and_their_calls(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SHOWN)
    port = free_port()
    process = start(
        *("--nproc-per-node=2", "--metrics-port", str(port)),
        *("--metrics-address", "127.0.0.1", str(tmp_path / "script.py"), str(tmp_path / "end")),
        environ={"OMP_NUM_THREADS": "1", "HETERO_VENDOR": "nvidia,amd"},
    )

    def shown() -> list[tuple[str, list[str]]]:
        assert process.poll() is None, process.communicate()
        with contextlib.suppress(OSError):
            ranks = state_of(port)["ranks"]
            if len(ranks) == 2 and all(rank["calls"] for rank in ranks):
                return [(r["vendor"], [call["operation"] for call in r["calls"]]) for r in ranks]
        return []

    try:
        assert awaited(shown) == [("nvidia", ["all_reduce"]), ("amd", ["all_reduce"])]
    finally:
        (tmp_path / "end").touch()
    code, _, lines = ended(process)
    assert code == 0
    assert lines.count(f"hetero: live view: http://127.0.0.1:{port}/") == 1
