"""Our declarations of HIP, HSA and RCCL are those of today's ROCm, without a GPU and without ROCm.

Nothing of AMD's runs here: AMD's bindings for Python are unpacked, and their text is read. Values
of enumerators stand only in their compiled part, which a newer Python is asked for.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import pytest

from hetero.collectives import vendor_library
from hetero.device import hip_driver
from hetero.device.driver_base import (
    HOST_REGISTER_FLAGS,
    INVALID_CONTEXT,
    LAZY_PEER_ACCESS,
    IpcHandle,
)
from hetero.device.vendor_library import Symbol
from hetero.native.binding import FOLDER
from tests.hetero.device import amd_packages
from tests.hetero.device.c_types import CType, Declarations, of_ctypes
from tests.hetero.device.test_driver_symbols import in_c

IN_C = {
    "hip_copy": "hipMemcpyAsync",
    "hip_wait": "hipStreamWaitValue32",
    "hip_write": "hipStreamWriteValue32",
    "event_record": "hipEventRecord",
    "event_wait": "hipStreamWaitEvent",
    "driver.synchronize_stream": "hipStreamSynchronize",
    "driver.synchronize_event": "hipEventSynchronize",
}
"""What C declares of HIP by itself, and the function that it calls by it."""

RCCL_NAMES = {"SUM": "ncclSum", "PRODUCT": "ncclProd", "MIN": "ncclMin", "MAX": "ncclMax"}
RCCL_DTYPES = {
    "uint8": "ncclUint8",
    "int8": "ncclInt8",
    "int32": "ncclInt32",
    "int64": "ncclInt64",
    "float16": "ncclFloat16",
    "bfloat16": "ncclBfloat16",
    "float32": "ncclFloat32",
    "float64": "ncclFloat64",
}

ASK = """
import json
from rocm.bindings import hip
kinds = (hip.hipDeviceAttribute_t, hip.hipError_t, hip.hipMemcpyKind)
values = {member.name: int(member) for kind in kinds for member in kind}
values |= {name: value for name, value in vars(hip).items() if isinstance(value, int)}
values["hipIpcMemHandle_t"] = hip.hipIpcMemHandle_t().c_sizeof()
print(json.dumps(values))
"""


@pytest.fixture(scope="session")
def bindings(request: pytest.FixtureRequest) -> Path:
    return amd_packages.rocm_bindings(request.config)


@pytest.fixture(scope="session")
def hip(bindings: Path) -> Declarations:
    return Declarations((bindings / "rocm/bindings/cyhip.pxd").read_text())


@pytest.fixture(scope="session")
def rccl(bindings: Path) -> Declarations:
    return Declarations((bindings / "rocm/bindings/cyrccl.pxd").read_text())


@pytest.fixture(scope="session")
def values(bindings: Path) -> dict[str, int]:
    """HIP's numbers by their names, as AMD compiled them."""
    return json.loads(_answer(_newer_python(), ASK, path=bindings))


@pytest.fixture(scope="session")
def hsa(request: pytest.FixtureRequest) -> dict[str, list[CType]]:
    """Result and arguments of each function of HSA."""
    root = amd_packages.tinygrad(request.config)
    text = (root / "tinygrad/runtime/autogen/hsa.py").read_text()
    pattern = r"^try: \((\w+):=dll\.\w+\)\.restype, \w+\.argtypes = (\w+), \[(.*?)\]$"
    found = re.findall(pattern, text, re.MULTILINE)
    return {
        name: [_of_generated(part) for part in (result, *filter(None, arguments.split(", ")))]
        for name, result, arguments in found
        if name in {symbol.name for symbol in hip_driver.HSA_SYMBOLS}
    }


def differences(symbols: Iterable[Symbol], declared: Declarations) -> list[str]:
    found = []
    for symbol in symbols:
        theirs = declared.function(symbol.name)
        if theirs is None:
            found.append(f"{symbol.name} is not declared")
            continue
        found += _differences(symbol, theirs[0], theirs[1])
    return found


def test_todays_hip_declares_every_function_as_we_do(hip: Declarations) -> None:
    assert differences(hip_driver.SYMBOLS, hip) == []
    print(f"{len(hip_driver.SYMBOLS)} functions agree")


def test_todays_hip_takes_what_c_calls_it_with(hip: Declarations) -> None:
    plain = Declarations()
    text = (FOLDER / "streams.c").read_text()
    ours = dict(re.findall(r"^typedef int \(\*(\w+)\)\((.*?)\);$", text, re.MULTILINE))
    text = (FOLDER / "host.c").read_text()
    ours |= {
        call: arguments
        for arguments, call in re.findall(
            r"int \(\*\w+\)\((.*?)\) = .*?gpu->(driver\.\w+);$", text, re.MULTILINE
        )
    }
    checked = {}
    for name, function in IN_C.items():
        theirs = hip.function(function)
        assert theirs is not None, function
        checked[name] = [plain.type(argument) for argument in ours[name].split(",")]
        assert len(checked[name]) == len(theirs[1]), name
        assert all(a.agrees(b) for a, b in zip(checked[name], theirs[1], strict=True)), name
    assert set(checked) == {name for name in ours if not name.startswith(("cuda_", "host_"))}


@pytest.mark.parametrize(
    "wrong",
    [
        Symbol("hipMalloc", (POINTER(c_uint64), c_uint)),
        Symbol("hipMalloc", (POINTER(c_int), c_size_t)),
        Symbol("hipMalloc", (POINTER(c_uint64),)),
        Symbol("hipMallocs", (POINTER(c_uint64), c_size_t)),
        Symbol("hipFree", (c_uint,)),
        Symbol("hipGetErrorName", (c_int,)),
        Symbol("hipInit", (c_uint,), result=c_char_p),
        Symbol("hipStreamWaitValue32", (c_void_p, c_void_p, c_uint64, c_uint, c_uint32)),
        Symbol("hipIpcOpenMemHandle", (POINTER(c_uint64), POINTER(IpcHandle), c_uint)),
        Symbol("hipIpcGetMemHandle", (POINTER(c_uint64), c_void_p)),
    ],
    ids=lambda symbol: f"{symbol.name}-{len(symbol.arguments)}",
)
def test_a_wrong_declaration_of_hip_is_found(hip: Declarations, wrong: Symbol) -> None:
    assert len(differences([wrong], hip)) == 1


def test_todays_hip_has_our_numbers(values: dict[str, int]) -> None:
    names = {
        "hipDeviceAttributeCanUseStreamWaitValue": hip_driver.CAN_USE_STREAM_WAIT_VALUE,
        "hipErrorInvalidContext": INVALID_CONTEXT,
        "hipIpcMemLazyEnablePeerAccess": LAZY_PEER_ACCESS,
        "hipMemcpyDefault": in_c("HIP_MEMCPY_DEFAULT"),
        "hipStreamWaitValueGte": in_c("AT_LEAST"),
        "hipIpcMemHandle_t": ctypes.sizeof(IpcHandle),
    }
    assert {name: values[name] for name in names} == names
    flags = values["hipHostRegisterPortable"] | values["hipHostRegisterMapped"]
    assert flags == HOST_REGISTER_FLAGS
    # A library is named by the major release of its interface.
    assert f"libamdhip64.so.{values['HIP_VERSION_MAJOR']}" in hip_driver._NAMES
    print(f"HIP {values['HIP_VERSION_MAJOR']}.{values['HIP_VERSION_MINOR']}")


def test_hsa_of_rocm_7_declares_every_function_as_we_do(hsa: dict[str, list[CType]]) -> None:
    assert set(hsa) == {symbol.name for symbol in hip_driver.HSA_SYMBOLS}
    for symbol in hip_driver.HSA_SYMBOLS:
        result, *arguments = hsa[symbol.name]
        assert _differences(symbol, result, arguments) == []


def test_todays_rccl_reduces_what_it_is_given_and_nothing_bitwise(rccl: Declarations) -> None:
    kernels = set(vendor_library._COMBINE)
    available = set(rccl.enumerators("ncclRedOp_t"))
    assert {RCCL_NAMES[name] for name in kernels - set(vendor_library._BITWISE)} <= available
    # The reason for refusing BAND, BOR and BXOR on GPUs.
    assert not [name for name in available if re.search("and|or|xor|bit", name.lower())]

    dtypes = {str(dtype).removeprefix("torch.") for dtype in vendor_library._PLAIN}
    assert {RCCL_DTYPES[name] for name in dtypes} <= set(rccl.enumerators("ncclDataType_t"))


def _differences(symbol: Symbol, result: CType, arguments: list[CType]) -> list[str]:
    ours = [of_ctypes(declared) for declared in (symbol.result, *symbol.arguments)]
    theirs = [result, *arguments]
    if len(ours) == len(theirs) and all(map(CType.agrees, ours, theirs)):
        return []
    return [f"{symbol.name} is declared as {theirs}, and by us as {ours}"]


def _of_generated(text: str) -> CType:
    """Of ctypes in a generated text: `ctypes.POINTER(ctypes.c_int32)`."""
    aliases: dict[str, Any] = {"hsa_status_t": c_int, "size_t": c_size_t, "uint64_t": c_uint64}
    name, levels = text, 0
    while inner := re.fullmatch(r"ctypes\.POINTER\((.*)\)", name):
        name, levels = inner[1], levels + 1
    declared = aliases.get(name) or getattr(ctypes, name.removeprefix("ctypes."))
    for _ in range(levels):
        declared = POINTER(declared)
    return of_ctypes(declared)


def _newer_python() -> str:
    """A Python that loads AMD's bindings: this one, one on the path, or one installed beside it."""
    needed = tuple(map(int, amd_packages.BINDINGS_PYTHON.split(".")))
    if sys.version_info >= needed:
        return sys.executable
    beside = Path(sys.base_prefix).parent.glob("*/bin/python3.*")
    for name in (*(f"python3.{minor}" for minor in range(needed[1], 20)), *map(str, beside)):
        try:
            asked = _answer(name, "import sys; print(*sys.version_info[:2])")
        except (OSError, subprocess.SubprocessError):
            continue
        if tuple(map(int, asked.split())) >= needed:
            return name
    pytest.skip(f"NOT CHECKED: no Python {amd_packages.BINDINGS_PYTHON} or newer on this machine")


def _answer(python: str, program: str, *, path: Path | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    ran = subprocess.run(
        [python, "-c", program],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return ran.stdout
