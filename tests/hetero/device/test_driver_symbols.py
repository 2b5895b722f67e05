"""The drivers' functions are those of the vendors: names in libraries, types and values in headers.

AMD's side needs no GPU: Debian's packages of its runtime are unpacked and asked.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hetero.device import cuda_driver, hip_driver
from hetero.device.driver_base import HOST_REGISTER_FLAGS, INVALID_CONTEXT, LAZY_PEER_ACCESS
from hetero.device.vendor_library import Symbol
from hetero.native.binding import FOLDER
from tests.hetero.device import amd_packages
from tests.hetero.device.headers import Header, declared_sizes

NEWER_THAN_DEBIAN = {"hsa_amd_portable_export_dmabuf"}
CUDA_HOME = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))

# Opens a library, with others preloaded for what it is linked to, and says what it has.
RESOLVE = """
import ctypes, sys
folder, name, *symbols = sys.argv[1:]
library = ctypes.CDLL(f"{folder}/{name}" if folder else name)
print(*(symbol for symbol in symbols if hasattr(library, symbol)))
"""


def resolved(name: str, symbols: tuple[Symbol, ...], *, folder: Path | None = None) -> set[str]:
    """Which of the symbols a library has, asked in a process of its own."""
    environment = dict(os.environ)
    if folder is not None:
        environment["LD_LIBRARY_PATH"] = str(folder)
    command = [sys.executable, "-c", RESOLVE, str(folder or ""), name, *(s.name for s in symbols)]
    child = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=120
    )
    return set(child.stdout.split())


def in_c(name: str) -> int:
    """A number of a driver's that C gives to it (streams.c)."""
    (value,) = re.findall(rf"^#define {name} (\w+)$", (FOLDER / "streams.c").read_text(), re.M)
    return int(value, 0)


def optional(symbols: tuple[Symbol, ...]) -> set[str]:
    return {symbol.name for symbol in symbols if symbol.optional}


@pytest.fixture(scope="session")
def debian(request: pytest.FixtureRequest) -> Path:
    return amd_packages.debian_hip(request.config)


def test_debians_hip_has_every_function_but_the_newer_ones(debian) -> None:
    symbols = (*hip_driver.SYMBOLS, *hip_driver.HSA_SYMBOLS)
    found = resolved("libamdhip64.so.5", symbols, folder=amd_packages.libraries(debian))
    missing = {symbol.name for symbol in symbols} - found
    print(f"resolved {len(found)} of {len(symbols)}; newer than ROCm 5.2.3: {sorted(missing)}")
    assert missing == NEWER_THAN_DEBIAN
    assert missing <= optional(symbols)


def test_debians_hip_without_a_gpu_fails_in_words(debian) -> None:
    program = (
        "from hetero.device.hip_driver import HipDriver\n"
        "from hetero.errors import LinkError\n"
        "try: HipDriver('libamdhip64.so.5')\n"
        "except LinkError as error: print(error)\n"
        "else: print('a GPU')\n"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(amd_packages.libraries(debian))}
    child = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    # Its name of the error is also its words, and they come once.
    refused = re.match(r"hipInit failed \(hipError\w+\) to start the runtime", child.stdout)
    assert refused or child.stdout == "a GPU\n"


def test_hip_is_declared_as_its_header_says(debian, compiler, tmp_path: Path) -> None:
    path = debian / "usr/include/hip/hip_runtime_api.h"
    flags = ["-D__HIP_PLATFORM_AMD__", f"-I{debian}/usr/include"]
    header = Header(path, folder=tmp_path, flags=flags)
    checked = hip_driver.SYMBOLS

    assert header.argument_sizes(s.name for s in checked) == declared_sizes(checked)
    assert header.values(
        [
            "hipDeviceAttributeCanUseStreamWaitValue",
            "hipErrorInvalidContext",
            "hipHostRegisterPortable | hipHostRegisterMapped",
            "hipMemcpyDefault",
            "hipStreamWaitValueGte",
            "sizeof(hipIpcMemHandle_t)",
            "sizeof(hipUUID)",
        ]
    ) == {
        "hipDeviceAttributeCanUseStreamWaitValue": hip_driver.CAN_USE_STREAM_WAIT_VALUE,
        "hipErrorInvalidContext": INVALID_CONTEXT,
        "hipHostRegisterPortable | hipHostRegisterMapped": HOST_REGISTER_FLAGS,
        "hipMemcpyDefault": in_c("HIP_MEMCPY_DEFAULT"),
        "hipStreamWaitValueGte": in_c("AT_LEAST"),
        "sizeof(hipIpcMemHandle_t)": 64,
        "sizeof(hipUUID)": 16,
    }


@pytest.fixture
def cuda_header(compiler) -> Path:
    path = CUDA_HOME / "include/cuda.h"
    if not path.exists():
        pytest.skip(f"NOT CHECKED: no CUDA header at {path}; set CUDA_HOME")
    return path


def test_cuda_is_declared_as_its_header_says(cuda_header: Path, tmp_path: Path) -> None:
    header = Header(cuda_header, folder=tmp_path)
    # In the header a function goes by its plain name, and a macro makes it the second version.
    plain = {symbol.name.removesuffix("_v2"): symbol.name for symbol in cuda_driver.SYMBOLS}

    sizes = header.argument_sizes(plain)
    assert {plain[name]: size for name, size in sizes.items()} == declared_sizes(
        cuda_driver.SYMBOLS
    )
    expected = {
        f"CU_DEVICE_ATTRIBUTE_{attribute.name}": int(attribute)
        for attribute in cuda_driver.Attribute
    } | {
        "CUDA_ERROR_INVALID_CONTEXT": INVALID_CONTEXT,
        "CU_STREAM_WAIT_VALUE_GEQ": in_c("AT_LEAST"),
        "CU_STREAM_WRITE_VALUE_DEFAULT": 0,
        "CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP": (HOST_REGISTER_FLAGS),
        "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS": LAZY_PEER_ACCESS,
        "CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD": cuda_driver.DMA_BUF_FD,
        "CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER": cuda_driver.ORDERED_FOR_OWNER,
        "sizeof(CUipcMemHandle)": 64,
    }
    assert header.values(list(expected)) == expected


def test_cuda_macros_name_the_versions_that_are_bound(cuda_header: Path, tmp_path: Path) -> None:
    plain = [symbol.name.removesuffix("_v2") for symbol in cuda_driver.SYMBOLS]
    source = tmp_path / "names.c"
    source.write_text(f"#include <{cuda_header}>\n" + "\n".join(f"@ {name}" for name in plain))
    text = subprocess.run(
        ["cc", "-E", "-P", str(source)], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    bound = {line.split()[1] for line in text.splitlines() if line.startswith("@ ")}
    assert bound == {symbol.name for symbol in cuda_driver.SYMBOLS}


@pytest.mark.gpu
def test_libcuda_has_every_function() -> None:
    if not torch.cuda.is_available() or torch.version.hip:
        pytest.skip("NOT CHECKED: no NVIDIA GPU on this machine")
    names = {symbol.name for symbol in cuda_driver.SYMBOLS}
    assert resolved(cuda_driver.LIBRARY, cuda_driver.SYMBOLS) == names
