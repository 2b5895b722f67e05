"""The library that plays HIP: complete, and clear about a machine on which it cannot."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.device import hip_driver
from hetero.device.hip_driver import HipDriver
from hetero.errors import LinkError
from tests.hip_on_cuda.library import SOURCE, compile_library

REASON = r"hipErrorNoDevice: no CUDA on this machine to play HIP"


def has_cuda() -> bool:
    try:
        return int(ctypes.CDLL("libcuda.so.1").cuInit(0)) == 0
    except OSError:
        return False


def test_it_has_every_function_that_the_driver_calls(hip_on_cuda: Path) -> None:
    library = ctypes.CDLL(str(hip_on_cuda))
    symbols = (*hip_driver.SYMBOLS, *hip_driver.HSA_SYMBOLS)
    assert [s.name for s in symbols if not hasattr(library, s.name)] == []


def test_it_compiles_from_its_source_alone(compiler, tmp_path: Path) -> None:
    assert compile_library(SOURCE, tmp_path / "library.so").exists()


def test_without_cuda_it_says_so(hip_on_cuda: Path) -> None:
    if has_cuda():
        pytest.skip("NOT CHECKED: this machine has CUDA")
    with pytest.raises(LinkError, match=REASON):
        HipDriver(str(hip_on_cuda))


def test_without_cuda_every_call_says_so(hip_on_cuda: Path) -> None:
    if has_cuda():
        pytest.skip("NOT CHECKED: this machine has CUDA")
    # A child, so that a crash is a failure of this test alone.
    program = (
        "import ctypes, sys\n"
        "library = ctypes.CDLL(sys.argv[1])\n"
        "room = ctypes.create_string_buffer(256)\n"
        "for name in sys.argv[2:]:\n"
        "    print(name, getattr(library, name)(room, room, room, room, room))\n"
    )
    # hipGetLastError has nothing to say; the kind, the flags and the mask are refused before CUDA
    # is asked; the others answer with texts.
    own = {"hipGetLastError", "hipMemcpyAsync", "hipStreamWaitValue32", "hipIpcOpenMemHandle"}
    own |= {"hipGetErrorName", "hipGetErrorString"}
    names = [s.name for s in hip_driver.SYMBOLS if s.name not in own]
    child = subprocess.run(
        [sys.executable, "-c", program, str(hip_on_cuda), *names],
        env=dict(os.environ),
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    answers = dict(line.split() for line in child.stdout.splitlines())
    assert answers == dict.fromkeys(names, "100")
