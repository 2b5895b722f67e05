"""Ctrl-C ends every tool in one line with exit code 130, and leaves no process behind.

As in a terminal, the signal goes to every process of the foreground group at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests import preloaded

ROOT = Path(__file__).resolve().parents[2]
SHARED = {"__init__", "tool_command_line", "runs", "text_input"}
"""What tools have in common, which nobody starts."""
TOOLS = {
    path.stem: path
    for path in (*sorted(ROOT.glob("tools/*.py")), ROOT / "examples" / "quickstart" / "demo.py")
    if path.stem not in SHARED
}

STOPS = """
import importlib.abc, os, pathlib, signal, sys, time

class Stop(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            pathlib.Path(os.environ["REACHED"]).touch()
            time.sleep(60)
        elif name.split(".")[0] not in {*sys.stdlib_module_names, "hetero", "tools", "org"}:
            sys.exit(f"{name} is imported before ctrl-C is answered")

sys.meta_path.insert(0, Stop())
"""
"""Has the first import after ctrl-C is answered take a minute, and allows no long one before.

`org` is what pickle looks for, to know Jython by."""


LEADS_A_GROUP = """
import os, runpy, sys
os.setsid()
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Has a preloaded process be the foreground group's first, as one that a terminal starts."""


def started(*words: object, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environ,
        start_new_session=True,
        # A shell that runs the tests in the background has them, and so this, ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def preloaded_tool(folder: Path, *words: object) -> preloaded.Started:
    """As `started`, but with torch imported."""
    leader = folder / "leader.py"
    leader.write_text(LEADS_A_GROUP)
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    return preloaded.start(leader, [*map(str, words)], environ=environ)


def interrupted(process: preloaded.Started, is_reached: Callable[[], object]) -> str:
    """Interrupt it once it is where it shall be; what it says then, all its family ended."""
    deadline = time.monotonic() + 120
    try:
        while not is_reached():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, said
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    return said


@pytest.mark.parametrize("tool", TOOLS)
def test_while_a_tool_is_imported(tool: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(STOPS)
    reached = tmp_path / "reached"
    process = started(TOOLS[tool], "--help", PYTHONPATH=str(tmp_path), REACHED=str(reached))
    assert interrupted(process, reached.exists) == "error: interrupted; nothing was written\n"


READING = {
    "compare_loss": "{fifo} {fifo} --out {folder}/out",
}
"""Tools that read a file which somebody else still writes."""

STARTING = {
    "bench_collectives": "--device cpu --backends hetero --out {folder}/out",
    "bench_link": "--cpu --transports shm --out {folder}/out",
    "bench_meshes": "--model examples/presets/tiny.yaml --meshes TP2xDP1/TP1xDP2 "
    "--out {folder}/out",
    "bench_splits": "--model examples/presets/tiny.yaml --out {folder}/out",
    "benchmark_parity": "--out {folder}/out",
    "count_start_up": "--counted 8 --timed 64 --out {folder}/out",
    "demo": "--out {folder}/out",
    "measure_overlap": "--model examples/presets/tiny.yaml --out {folder}/out",
    "preflight": "",
    "prove_meshes": "--out {folder}/out",
    "prove_parity": "--out {folder}/out -- --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 2 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 "
    "--global-batch-size 1 --lr 1e-3 --train-iters 1 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 100",
    "reproduce_table": "--model examples/presets/tiny.yaml --out {folder}/out",
    "train_public_commands": "--out {folder}/out",
}
"""Tools that start processes."""

ALONE = {
    *("compare_ops", "convert_checkpoint", "generate_text"),
    *("inspect_data", "list_flags", "merge_datasets", "public_commands"),
    *("plan", "profile_layers", "validate_planner", "compare_planners"),
}
"""Tools that do their work in one process and under `run`, as compare_loss does."""

OF_THEIR_OWN = {"preprocess_data", "train_tokenizer"}
"""Interrupted in their own test files, while their workers and SentencePiece work."""


def test_every_tool_is_interrupted_somewhere() -> None:
    assert {*READING, *STARTING, *ALONE, *OF_THEIR_OWN} == set(TOOLS)


@pytest.mark.parametrize("tool", READING)
def test_while_it_reads(tool: str, tmp_path: Path) -> None:
    fifo = tmp_path / "input.txt"
    os.mkfifo(fifo)
    writers: list[int] = []

    def is_read() -> bool:
        # Opens only where somebody reads.
        with contextlib.suppress(OSError):
            writers.append(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        return bool(writers)

    words = READING[tool].format(fifo=fifo, folder=tmp_path).split()
    said = interrupted(preloaded_tool(tmp_path, TOOLS[tool], *words), is_read)
    assert said.startswith("error: interrupted")
    assert said.count("\n") == 1


@pytest.mark.parametrize("tool", STARTING)
def test_while_its_processes_work(tool: str, tmp_path: Path) -> None:
    words = STARTING[tool].format(folder=tmp_path).split()
    process = preloaded_tool(tmp_path, TOOLS[tool], *words)
    said = interrupted(process, psutil.Process(process.pid).children)
    assert said.startswith("error: interrupted")
    assert said.count("\n") == 1
