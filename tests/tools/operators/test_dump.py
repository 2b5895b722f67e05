"""Dumps as files, and which of them may be compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hetero.tools.operators.dump import read, require_comparable, write
from tests.sentences import all_said_of, sentence_of
from tests.tools.operators.made_dumps import dump, reference


def test_what_is_written_is_read_back_and_plain_safetensors_with_a_json_header(
    tmp_path: Path,
) -> None:
    written = dump()
    write(written, tmp_path / "a.dump")
    found = read(tmp_path / "a.dump")
    assert found.header == written.header
    assert found.samples.keys() == written.samples.keys()
    for name, sample in written.samples.items():
        other = found.samples[name]
        assert torch.equal(sample.values, other.values)
        assert sample.dtype == other.dtype
        assert (sample.shape, sample.rms) == (other.shape, other.rms)
    assert [path.name for path in tmp_path.iterdir()] == ["a.dump"]
    with safe_open(tmp_path / "a.dump", framework="pt") as stored:
        header = json.loads(stored.metadata()["header"])
    assert (header["device"], header["inputs"]["tokens"]) == ("NVIDIA H200", "bb")


def test_a_file_that_is_no_dump_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    save_file({"x": torch.ones(1)}, tmp_path / "other")
    write(dump(), tmp_path / "cut")
    (tmp_path / "cut").write_bytes((tmp_path / "cut").read_bytes()[:-100])
    for name, reason in (
        ("absent", "is no file"),
        ("text", "damaged or another kind"),
        ("other", "is no dump"),
        ("cut", "cannot be read"),
    ):
        said = sentence_of(read, tmp_path / name)
        assert reason in said
        assert str(tmp_path / name) in said


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"sample": 5}, "--sample: 0 and 5"),
        ({"flags": {"hidden_size": 64}}, "rotary_base is 10000 in one and None"),
        ({"inputs": {"weight linear": "aa", "tokens": "cc"}}, "different bits of tokens"),
        ({"operators": ()}, "different operators"),
    ],
)
def test_dumps_not_made_from_the_same_are_refused(changed, named) -> None:
    assert named in sentence_of(require_comparable, dump().header, dump(**changed).header)


def test_all_that_two_dumps_were_made_from_differently_is_told_at_once() -> None:
    other = dump(dtype="float16", seed=7, flags={"hidden_size": 32, "rotary_base": 500})
    _, *said = all_said_of(require_comparable, dump().header, other.header).splitlines()
    told = (
        *("--dtype: bfloat16 and float16", "--seed: 1234 and 7"),
        *("hidden_size is 64", "rotary_base is 10000 in one and 500"),
    )
    for named, sentence in zip(told, said, strict=True):
        assert named in sentence


def test_device_versions_and_kernels_may_differ() -> None:
    other = dump(
        vendor="amd", device="MI300X", torch="2.13.0", kernels={"attention_backend": "flash"}
    )
    for header in (other.header, reference().header):
        require_comparable(dump().header, header)
        assert header != dump().header
