"""A script's own state in memory: after a loss it ends as if there had been none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import preloaded
from tests.distributed.harness import free_port, wait_for

PATIENCE = 120.0
SCRIPT = """
import json, os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hetero.recover

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
state = hetero.recover.state()
step, saved = state.load() or (0, None)
if saved is not None:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
while step < 40:
    step += 1
    generator = torch.Generator().manual_seed(100 * step + rank)
    loss = model(torch.randn(8, 4, generator=generator)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    kept = state.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    with open(f"{sys.argv[1]}/rank_{rank}", "a") as log:
        log.write(json.dumps([step, loss.item(), kept, os.getpid()]) + chr(10))
    time.sleep(float(sys.argv[2]))
dist.destroy_process_group()
"""


pytestmark = pytest.mark.usefixtures("preloaded_ranks")


def start(folder: Path, node: int, port: int, *, pause: float) -> subprocess.Popen[bytes]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    words = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"]
    words += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--hetero-restarts", "3"]
    return subprocess.Popen(
        [sys.executable, "-m", "hetero.run", *words, str(script), str(folder), str(pause)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": preloaded.python_path()},
        stderr=(folder / f"launcher_{node}").open("a"),
    )


def rows(folder: Path, rank: int) -> list[list]:
    path = folder / f"rank_{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, float]:
    folder, port = tmp_path_factory.mktemp("undisturbed"), free_port()
    for launcher in [start(folder, node, port, pause=0) for node in (0, 1)]:
        assert launcher.wait(PATIENCE) == 0
    losses = {step: loss for step, loss, *_ in rows(folder, 1)}
    assert list(losses) == list(range(1, 41))
    return losses


@pytest.mark.parametrize("lost", ["rank", "node"])
def test_a_script_goes_on_from_the_state_that_it_kept(
    tmp_path: Path, undisturbed: dict[int, float], lost: str
) -> None:
    port = free_port()
    launchers = [start(tmp_path, node, port, pause=0.2) for node in (0, 1)]
    # The third is begun once the second has its copies: it is whole whatever is lost.
    wait_for(
        lambda: sum(kept for *_, kept, _ in rows(tmp_path, 1)) >= 3, seconds=PATIENCE, what="state"
    )
    if lost == "rank":
        psutil.Process(rows(tmp_path, 1)[-1][-1]).kill()
    else:
        launcher = psutil.Process(launchers[1].pid)
        for process in (launcher, *launcher.children(recursive=True)):
            process.kill()
        launchers[1].wait()
        launchers[1] = start(tmp_path, 1, port, pause=0.0)
    for launcher in launchers:
        assert launcher.wait(PATIENCE) == 0, (tmp_path / "launcher_0").read_text()
    for rank in (0, 1):
        found = rows(tmp_path, rank)
        first = next(row for row in found if row[-1] == found[-1][-1])
        assert first[0] > 1, "it began anew"
        assert {step for step, *_ in found} == set(undisturbed)
    assert all(undisturbed[step] == loss for step, loss, *_ in rows(tmp_path, 1))


def test_a_state_that_cannot_be_read_again_is_refused_with_its_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist, hetero.recover\n"
        "class Own: pass\n"
        "dist.init_process_group('gloo')\n"
        "hetero.recover.state().save(1, {'own': Own() if dist.get_rank() else 1})\n"
    )
    words = ["--nproc-per-node", "2", "--hetero-restarts", "1", "--standalone", str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "hetero.run", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": preloaded.python_path()},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode != 0
    assert re.search("rank 1 on .* cannot keep its state: Weights only load failed", done.stderr)


def test_a_script_does_not_begin_anew_where_launchers_have_found_its_state(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist, hetero.recover\n"
        "dist.init_process_group('gloo')\n"
        "print(hetero.recover.state().load())\n"
    )
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    folders = {"HETERO_STATE_FOLDER": str(tmp_path), "HETERO_RESUME_FOLDER": str(tmp_path)}

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, **place, "PYTHONPATH": preloaded.python_path(), **folders, **more}
        return subprocess.run(
            [sys.executable, str(script)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    assert run().stdout == "None\n"
    refused = run(HETERO_RESUME_ITERATION="7")
    assert refused.returncode == 1
    assert "the state of step 7, from which the script has to resume, is not" in refused.stderr
