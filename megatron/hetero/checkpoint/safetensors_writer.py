"""Writes a `.safetensors` file item by item, with a few blocks in host memory at most.

The safetensors library writes files only from tensors that are all in memory. The format is a
length, a JSON header and the bytes of each tensor. Checksums are computed while writing. Files are
read with the library.
"""

from __future__ import annotations

import json
import math
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero.recover.stored_files import BLOCK_BYTES, StoredFile, io_threads
from megatron.hetero.checkpoint.index import StoredRegion, StoredTensor
from megatron.hetero.checkpoint.regions import Region

_CODES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}


class WriteCancelled(Exception):
    """Another rank's part failed, so nobody needs this one."""


@dataclass(frozen=True)
class WriteItem:
    """One rank's part of a tensor in a file: regions of it, one after the other in flat memory.

    `source` returns the elements in a tensor of any shape and device. It is called when they are
    written, on the writing thread.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    regions: tuple[Region, ...]
    source: Callable[[], torch.Tensor]

    @property
    def elements(self) -> int:
        return sum(region.size for region in self.regions)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> WriteItem:
        shape = tuple(tensor.shape)
        return cls(name, shape, tensor.dtype, (Region.whole(shape),), lambda: tensor)

    def stored_in(self, file: str) -> StoredTensor:
        offsets = [0]
        for region in self.regions:
            offsets.append(offsets[-1] + region.size)
        return StoredTensor(
            shape=self.shape,
            dtype=str(self.dtype).removeprefix("torch."),
            regions=tuple(
                StoredRegion(file, offset, region)
                for offset, region in zip(offsets, self.regions, strict=False)
            ),
        )


def write_safetensors(
    path: Path,
    write_items: Sequence[WriteItem],
    *,
    cancelled: threading.Event | None = None,
    synced: bool = True,
) -> StoredFile:
    """Write `write_items` in order, flat, under their names.

    The calling thread takes the elements of each item, and `io_threads` others write them, a block
    each. With `synced` the file is on the disk when this returns. Raises OSError, or WriteCancelled
    once `cancelled` is set.
    """
    threads = io_threads()
    size, checksums = 0, []
    writing: deque[Future[int]] = deque()
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(threads, "checkpoint") as pool:
        for block in _file_blocks(_contents(write_items, cancelled)):
            if len(writing) == threads:
                checksums.append(writing.popleft().result())
            writing.append(pool.submit(_write_block, file.fileno(), block, size))
            size += sum(map(len, block))
        checksums += [written.result() for written in writing]
        if synced:
            os.fsync(file.fileno())
    return StoredFile(size=size, blocks=tuple(checksums))


def _contents(
    write_items: Sequence[WriteItem], cancelled: threading.Event | None
) -> Iterator[memoryview]:
    yield memoryview(safetensors_header((i.name, i.dtype, (i.elements,)) for i in write_items))
    for write_item in write_items:
        written = 0
        for data in _blocks(write_item):
            if cancelled is not None and cancelled.is_set():
                raise WriteCancelled
            yield data
            written += len(data)
        if written != write_item.bytes:
            raise ValueError(
                f"{write_item.name} gave {written} bytes instead of {write_item.bytes}"
            )


def _file_blocks(contents: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes, in parts that make up BLOCK_BYTES each; the last ones may be fewer."""
    block: list[memoryview] = []
    room = BLOCK_BYTES
    for data in contents:
        while len(data):
            block.append(data[:room])
            data = data[room:]
            room -= len(block[-1])
            if not room:
                yield block
                block, room = [], BLOCK_BYTES
    if block:
        yield block


def _write_block(file: int, block: Sequence[memoryview], position: int) -> int:
    """Write it at a position of an open file; returns its checksum."""
    checksum = 0
    for data in block:
        checksum = zlib.crc32(data, checksum)
        while len(data):
            count = os.pwrite(file, data, position)
            position += count
            data = data[count:]
    return checksum


def safetensors_header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """The bytes of a file before its data: length and JSON. `tensors`: name, dtype and shape."""
    position = 0
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    for name, dtype, shape in tensors:
        end = position + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries).encode()
    # Data is aligned for every dtype; the format allows trailing spaces in its header.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _blocks(write_item: WriteItem) -> Iterator[memoryview]:
    values = write_item.source()
    if values.dtype != write_item.dtype:
        raise ValueError(
            f"{write_item.name} is {values.dtype}, not {write_item.dtype} as announced"
        )
    return tensor_blocks(values)


def tensor_blocks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's bytes in host memory, one block at a time."""
    flat = tensor.detach().reshape(-1)
    step = BLOCK_BYTES // flat.dtype.itemsize
    for begin in range(0, flat.numel(), step):
        block = flat[begin : begin + step].cpu().contiguous()
        yield memoryview(block.view(torch.uint8).numpy().data)
