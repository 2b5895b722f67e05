"""The header of every message: it survives the wire, and anything that differs is seen."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero.link.header import (
    DTYPES,
    HEADER_BYTES,
    Header,
    difference,
    unnumbered_header,
)
from hetero.native.binding import MESSAGE_DIMENSIONS

U64 = st.integers(0, 2**64 - 1)

headers = st.builds(
    Header,
    sequence=U64,
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(U64, max_size=MESSAGE_DIMENSIONS).map(tuple),
    nbytes=U64,
    tag=st.integers(0, 2**32 - 1),
)
A_HEADER = Header(sequence=3, dtype=torch.bfloat16, shape=(4, 2), nbytes=16)


@given(headers)
def test_a_header_comes_back_as_it_was_packed(header: Header) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert Header.unpack(packed) == header
    assert difference(packed, packed) is None


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("sequence", 4, "sequence 4 instead of 3"),
        ("dtype", torch.float16, "dtype torch.float16 instead of torch.bfloat16"),
        ("shape", (2, 4), "shape (2, 4) instead of (4, 2)"),
        ("nbytes", 32, "nbytes 32 instead of 16"),
        ("tag", 5, "tag 5 instead of 0"),
    ],
)
def test_a_difference_names_the_field_and_both_values(field: str, value: Any, words: str) -> None:
    changed: Header = replace(A_HEADER, **{field: value})
    assert difference(changed.pack(), A_HEADER.pack()) == words


@pytest.mark.parametrize(
    ("position", "value", "words"),
    [
        *((position, 0x21, "wrong magic") for position in (0, 3)),
        (4, len(DTYPES), "unknown dtype"),
        (6, MESSAGE_DIMENSIONS + 1, "too many dimensions"),
    ],
)
def test_what_is_no_header_of_this_protocol_is_refused(
    position: int, value: int, words: str
) -> None:
    packed = bytearray(A_HEADER.pack())
    packed[position] = value
    assert words in str(difference(bytes(packed), A_HEADER.pack()))


@pytest.mark.parametrize("length", [0, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_a_header_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError):
        Header.unpack((A_HEADER.pack() + b"\0")[:length])


def test_the_codes_of_dtypes_never_change() -> None:
    """Both ends of a boundary may run different builds of one protocol version."""
    assert DTYPES[:5] == (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int64,
    )
    assert A_HEADER.pack()[:8] == b"HTRO\x01\x00\x02\x00"


def test_what_a_link_cannot_carry_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"torch\.qint8; give a view of another dtype"):
        unnumbered_header(torch.qint8, (1,))
    with pytest.raises(ValueError, match="at most 8 dimensions, not 9; give a view"):
        unnumbered_header(torch.float32, (1,) * 9)
