"""A kernel of one block that copies a few bytes and then writes a word, for the CUDA driver.

A copy engine's call and the write of a word after it are two calls of the driver, of 8 and 3 us on
two H200s; a launch is one, of 4. It is PTX, which the driver itself compiles for any GPU since
Volta, so that nothing but the driver is needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_uint32, c_uint64, c_void_p

from hetero.device.driver_base import SmallCopies
from hetero.device.library import Function

NAME = "copy_and_write"
THREADS = 1024

_VECTOR_BYTES = 16
_STRIDE = THREADS * _VECTOR_BYTES
_VECTORS = 4
"""That a thread asks for before it needs the first: a read over NVLink takes more than 1 us."""


def _loads_then_stores() -> str:
    lines = []
    for number in range(_VECTORS):
        lines.append(f"add.u64 %offset{number}, %at, {number * _STRIDE};")
        lines.append(f"setp.lt.u64 %in{number}, %offset{number}, %whole;")
        lines.append(f"add.u64 %from, %source, %offset{number};")
        words = ", ".join(f"%v{number}{word}" for word in "abcd")
        lines.append(f"@%in{number} ld.relaxed.sys.v4.u32 {{{words}}}, [%from];")
    for number in range(_VECTORS):
        words = ", ".join(f"%v{number}{word}" for word in "abcd")
        lines.append(f"add.u64 %to, %target, %offset{number};")
        lines.append(f"@%in{number} st.v4.u32 [%to], {{{words}}};")
    return "\n    ".join(lines)


def _vectors() -> str:
    return ", ".join(f"%v{number}{word}" for number in range(_VECTORS) for word in "abcd")


PTX = f"""
.version 6.0
.target sm_70
.address_size 64

// target, source: any alignment. The word, unless its address is 0, gets the value when every byte
// is in place for whoever reads it, on any device.
.visible .entry {NAME}(
    .param .u64 target, .param .u64 source, .param .u64 nbytes,
    .param .u64 word, .param .u32 value)
{{
    .reg .pred %more, %first, %named, %aligned, %in<{_VECTORS}>;
    .reg .b16 %byte;
    .reg .b32 %thread, %value, {_vectors()};
    .reg .b64 %target, %source, %nbytes, %word, %whole, %at, %from, %to, %bits, %offset<{_VECTORS}>;

    ld.param.u64 %target, [target];
    ld.param.u64 %source, [source];
    ld.param.u64 %nbytes, [nbytes];
    ld.param.u64 %word, [word];
    ld.param.u32 %value, [value];
    mov.u32 %thread, %tid.x;

    // All but the last few bytes in vectors, if both ends are aligned for them; none otherwise.
    or.b64 %bits, %target, %source;
    and.b64 %bits, %bits, {_VECTOR_BYTES - 1};
    setp.eq.u64 %aligned, %bits, 0;
    and.b64 %whole, %nbytes, {-_VECTOR_BYTES};
    selp.b64 %whole, %whole, 0, %aligned;

    mul.wide.u32 %at, %thread, {_VECTOR_BYTES};
vectors:
    setp.lt.u64 %more, %at, %whole;
    @!%more bra rest;
    {_loads_then_stores()}
    add.u64 %at, %at, {_VECTORS * _STRIDE};
    bra vectors;

rest:
    cvt.u64.u32 %at, %thread;
    add.u64 %at, %at, %whole;
bytes:
    setp.lt.u64 %more, %at, %nbytes;
    @!%more bra copied;
    add.u64 %from, %source, %at;
    add.u64 %to, %target, %at;
    ld.volatile.u8 %byte, [%from];
    st.u8 [%to], %byte;
    add.u64 %at, %at, {THREADS};
    bra bytes;

copied:
    bar.sync 0;
    setp.eq.u32 %first, %thread, 0;
    setp.ne.u64 %named, %word, 0;
    and.pred %first, %first, %named;
    @!%first bra end;
    fence.acq_rel.sys;
    st.relaxed.sys.u32 [%word], %value;
end:
    ret;
}}
"""


class _Arguments(ctypes.Structure):
    """The kernel's parameters."""

    _fields_ = (
        ("target", c_uint64),
        ("source", c_uint64),
        ("nbytes", c_uint64),
        ("word", c_uint64),
        ("value", c_uint32),
    )


class KernelCopies(SmallCopies):
    """By the kernel. The arguments of a launch lie in one place, so one caller at a time."""

    def __init__(
        self, kernel: int, *, launch: Function, check: Callable[[str, int, str], None]
    ) -> None:
        self._kernel, self._launch, self._check = kernel, launch, check
        self._arguments = _Arguments()
        begin = ctypes.addressof(self._arguments)
        places = [begin + getattr(_Arguments, name).offset for name, _ in _Arguments._fields_]
        self._places = (c_void_p * len(places))(*places)

    def copy_and_write(
        self, stream: int, *, target: int, source: int, nbytes: int, word: int, value: int
    ) -> None:
        arguments = self._arguments
        arguments.target, arguments.source, arguments.nbytes = target, source, nbytes
        arguments.word, arguments.value = word, value
        code = self._launch(self._kernel, 1, 1, 1, THREADS, 1, 1, 0, stream, self._places, None)
        if code:
            purpose = f"copy {nbytes} bytes from {source:#x} to {target:#x} by a kernel"
            self._check("cuLaunchKernel", code, purpose)
