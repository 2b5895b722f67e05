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
from tests.commands import ROOT
from tests.tools.test_help import MODULES

TOOLS = {name.rsplit(".", 1)[-1]: ROOT / f"{name.replace('.', '/')}.py" for name in MODULES}

STOPS = """
import importlib.abc, os, pathlib, signal, sys, time

class Stop(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            pathlib.Path(os.environ["REACHED"]).touch()
            for _ in range(600):  # A signal just before a sleep does not cut it short.
                time.sleep(0.1)
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
    # State left by launchers that other tests have killed is removed by the next one.
    left = "removed the state in memory of a launcher that was killed"
    return "".join(line for line in said.splitlines(keepends=True) if left not in line)


@pytest.mark.parametrize("tool", TOOLS)
def test_while_a_tool_is_imported(tool: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(STOPS)
    reached = tmp_path / "reached"
    process = started(TOOLS[tool], "--help", PYTHONPATH=str(tmp_path), REACHED=str(reached))
    assert interrupted(process, reached.exists) == "error: interrupted; nothing was written\n"


OUT = "--out {folder}/out"
TINY = "--model examples/presets/tiny.yaml"

STARTING = {
    "async_save": "{folder}/out --preset examples/presets/tiny.yaml",
    "bench_meshes": f"{TINY} --meshes TP2xDP1/TP1xDP2 {OUT}",
    "bench_splits": f"{TINY} {OUT}",
    "benchmark_parity": OUT,
    "call_cost": "--json {folder}/out.json",
    "compare_versions": "--pythons python3 --folder {folder}",
    "fp8_losses": "--on-cpu --out {folder}/out.json --layers 2 --hidden 32 --heads 4 --groups 2 "
    "--ffn 64 --sequence 32",
    "expert_speed": "--on-cpu --out {folder}/out.json --layers 1 --hidden 32 --heads 4 --groups 2 "
    "--channels 8 --ffn 16 --experts 4 --topk 2 --sequence 32 --vocabulary 64",
    "fp8_speed": "--on-cpu --out {folder}/out.json --layers 1 --hidden 64 --heads 4 --groups 2 "
    "--ffn 64 --sequence 32 --vocabulary 64",
    "long_context": "--on-cpu --out {folder}/out.json --sequences 64 --layers 1 --hidden 32",
    "count_start_up": f"--counted 8 --timed 64 {OUT}",
    "demo": OUT,
    "conversion_8b": "{folder}/out",
    "fault_table": OUT,
    "goodput": "--json {folder}/out.json",
    "measure_overlap": f"{TINY} {OUT}",
    "memory_checkpoint_cost": "--pairs 2 --json {folder}/out.json",
    "observe_rank_0": "--ranks 8 --json {folder}/out.json",
    "operator_watch_cost": "--checks 4 --json {folder}/out.json",
    "perf": f"links --device cpu --transports shm {OUT}",
    "preflight": "",
    "prove_meshes": OUT,
    "prove_parity": f"{OUT} -- --num-layers 2 --hidden-size 64 --num-attention-heads 2 "
    "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 1 "
    "--lr 1e-3 --train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 100",
    "random_faults": OUT,
    "record_cost": "--pairs 8 --json {folder}/out.json",
    "reproduce_table": f"{TINY} {OUT}",
    "restart_times": "--json {folder}/out.json",
    "run_versions": "--pythons python3 --folder {folder}",
    "signal_table": OUT,
    "state_copy": "--json {folder}/out.json",
    "time_preprocessing": "--out {folder}/out.json",
    "train_public_commands": OUT,
    "verify": OUT,
}

ALONE = {
    *("compare_ops", "convert_checkpoint", "generate_text"),
    *("inspect_data", "list_flags", "merge_datasets", "public_commands"),
    *("plan", "check_plan", "profile_layers", "validate_planner", "compare_planners"),
    *("mesh_ablation", "search_plans", "time_kernels", "top", "trace", "break_things"),
    "rendezvous_cost",
}
"""Tools that do their work in one process and under `run`, as compare_loss does."""

OF_THEIR_OWN = {"preprocess_data", "train_tokenizer"}
"""Interrupted in their own test files, while their workers and SentencePiece work."""


def test_every_tool_is_interrupted_somewhere() -> None:
    assert {"compare_loss", *STARTING, *ALONE, *OF_THEIR_OWN} == set(TOOLS)


def test_while_it_reads(tmp_path: Path) -> None:
    """A file which somebody else still writes."""
    fifo = tmp_path / "input.txt"
    os.mkfifo(fifo)
    writers: list[int] = []

    def is_read() -> bool:
        # Opens only where somebody reads.
        with contextlib.suppress(OSError):
            writers.append(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        return bool(writers)

    words = (fifo, fifo, "--out", tmp_path / "out")
    said = interrupted(preloaded_tool(tmp_path, TOOLS["compare_loss"], *words), is_read)
    assert said.startswith("error: interrupted")
    assert said.count("\n") == 1


@pytest.mark.parametrize("tool", STARTING)
def test_while_its_processes_work(tool: str, tmp_path: Path) -> None:
    words = STARTING[tool].format(folder=tmp_path).split()
    process = preloaded_tool(tmp_path, TOOLS[tool], *words)
    family = psutil.Process(process.pid)

    def work() -> bool:
        """One that has only just been forked does not yet."""
        return any(time.time() - child.create_time() > 0.2 for child in family.children())

    said = interrupted(process, work)
    assert said.startswith("error: interrupted")
    assert said.count("\n") == 1
