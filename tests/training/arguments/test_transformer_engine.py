"""--transformer-impl: TransformerEngine's layers where it is installed, one sentence elsewhere."""

from __future__ import annotations

import sys
from unittest import mock

import pytest

from hetero.errors import UserError
from megatron.training import model
from megatron.training.initialize import read_arguments
from tests.training.arguments.conftest import command_line

TE = "--transformer-impl transformer_engine"


def test_an_engine_that_is_not_installed_is_refused_with_the_remedy(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(UserError, match=r"needs TransformerEngine; install it with .*\[te\]"):
        read_arguments(command_line(TE, ""), 0)


def test_an_engine_that_is_installed_is_accepted(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", mock.Mock())
    args, _ = read_arguments(command_line(TE, ""), 0)
    assert args.transformer_impl == "transformer_engine"


def test_the_layers_are_the_engines(parse) -> None:
    with mock.patch.object(model, "get_gpt_layer_with_transformer_engine_spec") as spec:
        built = model.layer_spec(parse(f"{TE} --qk-layernorm"), mock.Mock(), 2)
    spec.assert_called_once_with(qk_layernorm=True)
    assert built is spec.return_value
