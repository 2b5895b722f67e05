"""Hugging Face's Trainer, Lightning and DeepSpeed over two simulated vendors, and over gloo alone.

The scripts say gloo here and nothing of vendors; what differs is the launcher's environment.
"""

from __future__ import annotations

import importlib
import shutil

import pytest

from tests.commands import ROOT, printed

FOLDER = ROOT / "examples" / "collectives"
HETERO_RUN = ("-m", "hetero.run", "--standalone", "--nproc-per-node", "4")
TORCHRUN = ("-m", "torch.distributed.run", *HETERO_RUN[2:], "-m", "hetero.run")
ACCELERATE = (
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "4"),
    *("-m", "hetero.run"),
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def losses(script: str, *arguments: str, launcher: tuple[str, ...], mixed: bool) -> list[float]:
    """What a run of four ranks prints: two vendors of two, or one vendor over gloo."""
    environment = {
        "HETERO_VENDOR": "nvidia*2,amd*2" if mixed else "nvidia",
        "HETERO_INSTEAD_OF": "gloo" if mixed else "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "ACCELERATE_USE_CPU": "1",
    }
    words = (*launcher, FOLDER / script, "--text", "README.md", *arguments)
    lines = printed(*words, seconds=550, **environment).splitlines()
    (line,) = [line for line in lines if line.startswith("losses over")]
    group, _, numbers = line.partition(": ")
    assert (group == "losses over <group of 4 ranks of 2 vendors>") is mixed, line
    return [float(number) for number in numbers.split()]


def require(package: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        pytest.skip(f"the extra `examples` is not installed: {error}")


def assert_it_learns_the_same(mixed: list[float], alone: list[float]) -> None:
    assert mixed == pytest.approx(alone, rel=1e-5)
    assert mixed[-1] < mixed[0], "it learns"


def test_hugging_face_trainer() -> None:
    require("accelerate")
    script = "huggingface_trainer.py"
    alone = losses(script, launcher=HETERO_RUN, mixed=False)
    assert len(alone) == 6, "five steps and an evaluation"
    assert_it_learns_the_same(losses(script, launcher=HETERO_RUN, mixed=True), alone)
    assert_it_learns_the_same(losses(script, launcher=ACCELERATE, mixed=True), alone)


def test_lightning() -> None:
    require("lightning")
    script = "lightning_fit.py"
    alone = losses(script, launcher=TORCHRUN, mixed=False)
    assert len(alone) == 5
    assert_it_learns_the_same(losses(script, launcher=TORCHRUN, mixed=True), alone)


def test_deepspeed_zero_in_all_its_stages() -> None:
    require("deepspeed")
    if shutil.which("c++") is None:
        pytest.skip("on a CPU DeepSpeed builds an operator, and there is no C++ compiler")
    script = "deepspeed_zero.py"
    alone = losses(script, "--stage", "1", launcher=HETERO_RUN, mixed=False)
    assert len(alone) == 5
    for stage in ("1", "2", "3"):
        mixed = losses(script, "--stage", stage, launcher=HETERO_RUN, mixed=True)
        assert_it_learns_the_same(mixed, alone)
