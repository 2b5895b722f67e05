"""What tests of any part share."""

from __future__ import annotations

import gc
import multiprocessing.spawn
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from tests import preloaded
from tests.tools.refusals import Refused, refusal


def pytest_configure(config: pytest.Config) -> None:
    """One thread for torch, which reads it when it is imported, and no launcher around the tests.

    Tiny models gain nothing by more threads, and lose much where other tests run beside them.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Runs that fail, as many tests have them do, write dumps: not into the checkout.
    folder = Path(tempfile.gettempdir(), f"flight_recorder_of_tests_{os.getuid()}")
    os.environ.setdefault("HETERO_FLIGHT_RECORDER", str(folder))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    # A shell in the background, setsid and nohup have them ignored, which processes inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if not hasattr(config, "workerinput"):
        os.environ.pop(preloaded.ADDRESS, None)
        if getattr(config.option, "numprocesses", None):
            # One for all workers, which inherit it; it imports when the first asks.
            os.environ[preloaded.ADDRESS] = preloaded.address()
    # What is imported and collected stays: a fifth of that time would go into looking for garbage.
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _no_attention_of_others() -> Iterator[None]:
    """megatron-core writes the attention of a model built here into the environment, for good.

    Models that a later test builds, and runs that it starts, would inherit it and refuse another.
    """
    yield
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine, as far as a command line is concerned."""
    module = ModuleType("transformer_engine")
    module.__spec__ = ModuleSpec("transformer_engine", None)
    monkeypatch.setitem(sys.modules, "transformer_engine", module)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """The sentence with which a program, here its `main`, refuses words."""
    return partial(refusal, capsys)


@pytest.fixture(scope="module")
def preloaded_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every Python that a module starts, and what those start, begins with torch imported."""
    with pytest.MonkeyPatch.context() as patch:
        environ = preloaded.as_interpreter(tmp_path_factory.mktemp("python"))
        for name, value in environ.items():
            patch.setenv(name, value)
        patch.setattr(sys, "executable", environ["PYTHON_EXEC"])
        patch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(environ["PYTHON_EXEC"]))
        yield
