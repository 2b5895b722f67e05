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


FP8 = f"{TE} --bf16 --fp8-format hybrid"


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--fp8-recipe rowwise", "--fp8-recipe rowwise is unknown to TransformerEngine"),
        ("--fp8-recipe tensorwise --no-fp8-wgrad", "--no-fp8-wgrad: TransformerEngine has"),
        ("--first-last-layers-bf16", "delayed has all layers in fp8"),
        (
            "--fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 5 "
            "--hetero-pipeline --hetero-vendors nvidia amd --hetero-pipeline-sizes 1 1",
            "--num-layers-at-end-in-bf16 5: megatron-core has with TransformerEngine's layers at "
            "most 4",
        ),
    ],
    ids=["rowwise", "weight-gradients", "delayed-ends", "many-at-an-end"],
)
def test_fp8_that_the_engine_has_not_is_refused_and_the_local_layers_have_it(
    flags: str, said: str
) -> None:
    ranks = 2 if "--hetero-pipeline" in flags else 1
    with pytest.raises(UserError) as refused:
        configured(f"{FP8} {flags}", world_size=ranks)
    (sentence,) = refused.value.sentences
    assert said in sentence
    assert sentence.endswith("or --transformer-impl local, which needs no TransformerEngine")
    assert configured(f"{FP8} {flags} --transformer-impl local", world_size=ranks)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("own", ["none", "e4m3"])
def test_one_mesh_can_have_the_engines_fp8_and_another_its_own(own: str, tmp_path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "meshes:\n"
        f"- {{vendor: nvidia, layers: [4], transformer_impl: transformer_engine, fp8: {own}}}\n"
        "- {vendor: amd, layers: [4], transformer_impl: local}\n"
    )
    words = f"--bf16 --fp8-format hybrid --hetero-pipeline --hetero-plan {plan}"
    launch = configured(f"{words} --fp8-recipe tensorwise", world_size=2)
    assert [mesh.fp8 for mesh in launch.plan.meshes] == [own, "hybrid"]
    if own == "none":
        assert configured(f"{words} --fp8-recipe rowwise", world_size=2)
    else:
        with pytest.raises(UserError, match="rowwise is unknown to TransformerEngine"):
            configured(f"{words} --fp8-recipe rowwise", world_size=2)
