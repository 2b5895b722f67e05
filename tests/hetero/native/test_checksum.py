"""CRC-32C: the vectors of RFC 3720, and the CPU's instruction against the portable way."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hetero.native.internals import internals

WAYS = ("checksum", "checksum_portable")
# RFC 3720, B.4.
READ_COMMAND = bytes.fromhex(
    "01c00000000000000000000000000000140000000000040000000014000000182800000000000000"
    "0200000000000000"
)
VECTORS = {
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(reversed(range(32))): 0x113FDB5C,
    READ_COMMAND: 0xD9963A56,
    b"": 0,
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(("data", "expected"), VECTORS.items())
def test_it_is_the_checksum_of_the_standard(name: str, data: bytes, expected: int) -> None:
    assert getattr(internals(), name)(data, len(data)) == expected


@given(st.binary(max_size=200), st.integers(0, 9))
def test_both_ways_come_to_the_same_wherever_the_bytes_begin(data: bytes, skipped: int) -> None:
    buffer = ctypes.create_string_buffer(data)
    begin = min(skipped, len(data))
    address, nbytes = ctypes.addressof(buffer) + begin, len(data) - begin
    assert internals().checksum(address, nbytes) == internals().checksum_portable(address, nbytes)
