"""Megatron-LM's pickles: what they hold is read, what they want to run is refused by name."""

from __future__ import annotations

import os
import pickle
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path, PosixPath
from typing import Any

import numpy
import pytest
import torch
from megatron.core.enums import ModelType
from megatron.core.transformer.enums import AttnBackend

from hetero.errors import UserError
from megatron.hetero.checkpoint.index import DamagedCheckpoint
from megatron.hetero.megatron_lm.pickles import Placeholder, RestrictedLoader


class Malicious:
    """Its pickle runs a command when it is read."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


@pytest.fixture
def loader() -> RestrictedLoader:
    return RestrictedLoader()


def test_arguments_are_read_and_classes_of_megatron_become_placeholders(
    loader: RestrictedLoader, tmp_path: Path
) -> None:
    args = Namespace(
        num_layers=4,
        params_dtype=torch.bfloat16,
        attention_backend=AttnBackend.auto,
        model_type=ModelType.encoder_or_decoder,
        save=PosixPath("/somewhere"),
        split=numpy.array([1.0, 2.0]),
    )
    torch.save({"args": args, "weight": torch.arange(4.0)}, tmp_path / "common.pt")
    found = loader.load_file(tmp_path / "common.pt")
    assert found["args"].num_layers == 4
    assert found["args"].params_dtype is torch.bfloat16
    assert isinstance(found["args"].attention_backend, Placeholder)
    assert torch.equal(found["weight"], torch.arange(4.0))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_pickle_that_runs_something_is_refused_by_name(
    loader: RestrictedLoader, tmp_path: Path, protocol: int
) -> None:
    """In the metadata; tests/tools/test_convert_megatron.py has one among tensors."""
    marker = tmp_path / "ran"
    data = pickle.dumps({"a": Malicious(f"touch {marker}")}, protocol=protocol)
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(UserError, match=r"posix\.system"):
        loader.load_pickle(tmp_path / ".metadata")
    assert not marker.exists()


def test_a_name_that_hides_behind_an_allowed_module_is_not_looked_up(
    loader: RestrictedLoader, tmp_path: Path
) -> None:
    """Any attribute of `torch.distributed.` becomes a placeholder: nothing is imported."""
    reached = b"\x80\x02ctorch.distributed.run\nmain\n(X\x01\x00\x00\x00atR."
    (tmp_path / ".metadata").write_bytes(reached)
    found = loader.load_pickle(tmp_path / ".metadata")
    assert isinstance(found, Placeholder)
    assert found.arguments == ("a",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_of_any_protocol_are_what_the_full_unpickler_gives(
    loader: RestrictedLoader, tmp_path: Path, protocol: int
) -> None:
    shared = ["text", "text", 2**40, -3, 1.5, None, True]
    value = {
        "a": (shared, shared),
        "size": torch.Size([2, 3]),
        "long": "x" * 300,
        "": OrderedDict(),
    }
    (tmp_path / "file").write_bytes(pickle.dumps(value, protocol=protocol))
    found = loader.load_pickle(tmp_path / "file")
    assert found == value
    assert found["a"][0] is found["a"][1]


@pytest.mark.parametrize("data", [b"", b"no pickle", pickle.dumps(["a", "b"])[:-4], b"\x80\x04N"])
def test_a_damaged_file_is_told(loader: RestrictedLoader, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="file"):
        loader.load_pickle(tmp_path / "file")
    with pytest.raises(DamagedCheckpoint, match=r"file .*[^(]\)$"):
        loader.load_file(tmp_path / "file")
