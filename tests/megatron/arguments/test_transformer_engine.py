"""--transformer-impl: TransformerEngine's layers where it is installed, else local ones."""

from __future__ import annotations

import sys
from unittest import mock

import pytest

from hetero.errors import UserError
from megatron.hetero import model
from megatron.hetero.initialize import check_host
from tests.megatron.launches import configured

TE = "--transformer-impl transformer_engine"


def test_an_engine_that_is_not_installed_gives_way_to_the_local_layers(parse, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    args = parse(f"{TE} --recompute-activations --recompute-modules layernorm core_attn")
    assert (args.transformer_impl, args.lacks_transformer_engine) == ("local", True)
    assert args.recompute_modules == ["core_attn"]


def test_local_layers_that_were_asked_for_lack_nothing(parse) -> None:
    assert parse().lacks_transformer_engine is False


@pytest.mark.usefixtures("engine")
def test_an_engine_that_is_installed_is_accepted() -> None:
    launch = configured(TE)
    args = launch.args
    assert (args.transformer_impl, args.lacks_transformer_engine) == ("transformer_engine", False)
    check_host(args, launch.plan, 0)


@pytest.mark.usefixtures("engine")
def test_an_engine_that_cannot_be_imported_is_refused_with_the_remedy(monkeypatch) -> None:
    launch = configured(TE)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(UserError, match=r"cannot be imported .* install it with .*\[te\]"):
        check_host(launch.args, launch.plan, 0)


@pytest.mark.usefixtures("engine")
def test_the_layers_are_the_engines(parse) -> None:
    with mock.patch.object(model, "get_gpt_layer_with_transformer_engine_spec") as spec:
        built = model.layer_spec(parse(f"{TE} --qk-layernorm"), mock.Mock(), range(2), mock.Mock())
    spec.assert_called_once_with(qk_layernorm=True)
    assert built is spec.return_value
