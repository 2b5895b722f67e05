"""fp8 of TransformerEngine's layers: what megatron-core is told, and what is believed after it.

The engine cannot be installed everywhere, so that here megatron-core's own linear layers stand in
for its, and say of themselves, as they do, whether they were called within its fp8 context.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import fp8_utils
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import transformer_block

from hetero.errors import HeteroError, UserError
from hetero.tools.operators.recording import built_model
from megatron.hetero import fp8_engine, model
from megatron.hetero.fp8 import Fp8Layers
from megatron.hetero.fp8_scaling import LayerScaling
from tests.megatron.launches import configured, parsed

CPU = torch.device("cpu")
TE = "--transformer-impl transformer_engine --bf16 --padded-vocab-size 128"
HYBRID = f"{TE} --fp8-format hybrid"
TENSORWISE = f"{HYBRID} --fp8-recipe tensorwise"
ENDS = "--first-last-layers-bf16 --num-layers-at-end-in-bf16 2"
PIPELINE = "--hetero-pipeline --hetero-vendors nvidia amd --hetero-pipeline-sizes 1 1"
pytestmark = pytest.mark.usefixtures("engine")


def config_of(flags: str, ranks: int = 1) -> Any:
    launch = configured(flags, world_size=ranks)
    return model.transformer_config(launch.args, launch.plan, CPU)


def test_megatron_core_is_told_what_the_flags_say() -> None:
    config = config_of(
        f"{TE} --fp8-format e4m3 --fp8-margin 1 --fp8-amax-history-len 16 --no-fp8-wgrad "
        "--fp8-amax-compute-algo max"
    )
    assert (config.fp8, config.fp8_recipe, config.fp8_margin) == ("e4m3", "delayed", 1)
    assert (config.fp8_amax_history_len, config.fp8_amax_compute_algo) == (16, "max")
    assert (config.fp8_wgrad, config.fp8_param) == (False, False)


def test_megatron_core_hears_nothing_of_fp8_that_is_not_the_engines() -> None:
    assert config_of(TE).fp8 is None
    local = TENSORWISE.replace("transformer_engine", "local")
    assert config_of(local).fp8 is None


def test_layers_in_bf16_are_the_first_and_last_of_the_whole_model() -> None:
    flags = f"{TENSORWISE} {ENDS} {PIPELINE} --hetero-pipeline-layers 6 2"
    config = config_of(flags, 2)
    in_bf16 = [n for n in range(8) if fp8_utils.is_first_last_bf16_layer(config, n)]
    assert in_bf16 == [0, 6, 7]
    chosen = fp8_engine.layers_in_fp8(configured(flags, world_size=2).args)
    assert list(chosen) == [n for n in range(8) if n not in in_bf16]


@pytest.mark.parametrize(
    ("more", "ranks", "expected"),
    [
        ("", 1, False),
        ("", 2, False),
        (PIPELINE, 2, False),
        ("--hetero-data-parallel nvidia:1,amd:1", 2, True),
    ],
    ids=["one", "replicas", "pipeline", "replicas-of-two-vendors"],
)
def test_replicas_that_may_run_at_their_own_pace_do_not_agree_on_maxima(
    more: str, ranks: int, expected: bool
) -> None:
    assert config_of(f"{HYBRID} {more}", ranks).tp_only_amax_red is expected


class Engine:
    """Its fp8 context, and whether a layer is within."""

    def __init__(self) -> None:
        self.is_enabled = False

    @contextmanager
    def context(self, config: Any, layer: int = -1, is_init: bool = False) -> Iterator[None]:
        assert not is_init or not config.fp8_param
        outside = self.is_enabled
        if not is_init and not fp8_utils.is_first_last_bf16_layer(config, layer):
            self.is_enabled = True
        try:
            yield
        finally:
            self.is_enabled = outside

    def layer(self, base: type[torch.nn.Module], says: str) -> type[torch.nn.Module]:
        """A linear layer that `says` what it computes in, under this name."""
        engine = self

        class Linear(base):  # type: ignore[misc, valid-type]
            def init_fp8_metadata(self) -> None:
                setattr(self, says, engine.is_enabled)

            def forward(self, *inputs: Any, **how: Any) -> Any:
                self.init_fp8_metadata()
                return super().forward(*inputs, **how)

        return Linear


def after_one_pass(
    flags: str, *, has_context: bool = True, says: str = "fp8", is_known: bool = True
) -> tuple[Fp8Layers, Namespace]:
    """The layers that are watched, after a forward and a backward pass of a model."""
    args, engine = parsed(flags), Engine()
    spec = get_gpt_layer_local_spec(normalization=args.normalization)
    if is_known:
        for part in (spec.submodules.self_attention, spec.submodules.mlp):
            for name, module in vars(part.submodules).items():
                if module in (ColumnParallelLinear, RowParallelLinear):
                    setattr(part.submodules, name, engine.layer(module, says))
    context = engine.context if has_context else lambda *_, **__: nullcontext()
    with (
        mock.patch.object(model, "get_gpt_layer_with_transformer_engine_spec", return_value=spec),
        mock.patch.object(transformer_block, "get_fp8_context", context),
        built_model(args, CPU) as (chunk, _),
    ):
        layers = fp8_engine.install(args, [chunk], [0], vendor="amd", device=CPU)
        for parameter in chunk.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        tokens = torch.arange(args.seq_length).unsqueeze(0)
        mask = torch.ones(1, 1, args.seq_length, args.seq_length, dtype=torch.bool).triu(1)
        chunk(tokens, tokens, mask, labels=tokens).sum().backward()
    return layers, args


def of_layers(layers: Fp8Layers) -> list[int]:
    return sorted({int(layer.name.split(".")[2]) for layer in layers._layers})


@pytest.mark.parametrize("flags", [HYBRID, TENSORWISE], ids=["delayed", "tensorwise"])
def test_layers_that_were_in_the_engines_fp8_are_believed_and_counted(flags: str) -> None:
    layers, args = after_one_pass(flags)
    layers.require_products(rank="rank 3")
    assert len(layers) == 4 * args.num_layers
    assert layers.products() == {
        "forward": 4 * args.num_layers,
        "input_gradient": 0,
        "weight_gradient": 0,
    }
    said = "e4m3fnuz and e5m2fnuz in 32 linear layers of TransformerEngine"
    scales = "" if flags == TENSORWISE else ", whose scales are in no checkpoint"
    assert layers.describe() == said + scales


def test_the_engines_layers_stay_its_own() -> None:
    layers, _ = after_one_pass(TENSORWISE)
    assert not any(isinstance(layer, LayerScaling) for layer in layers._layers)
    layers.end_step()
    layers.weights_changed()
    layers.restart()
    assert layers.take_products() == 0


def test_first_and_last_layers_in_bf16_are_not_asked() -> None:
    layers, _ = after_one_pass(f"{TENSORWISE} {ENDS}")
    layers.require_products(rank="rank 3")
    assert of_layers(layers) == [1, 2, 3, 4, 5]


def test_layers_that_megatron_core_ran_in_bf16_end_the_run() -> None:
    layers, _ = after_one_pass(TENSORWISE, has_context=False)
    with pytest.raises(HeteroError, match=r"rank 3: decoder\.layers\.0\..* no forward in fp8"):
        layers.require_products(rank="rank 3")


def test_layers_that_say_it_in_another_way_are_not_believed() -> None:
    layers, _ = after_one_pass(TENSORWISE, says="is_in_fp8")
    with pytest.raises(HeteroError, match="no forward in fp8"):
        layers.require_products(rank="rank 3")


def test_a_single_pass_in_bf16_ends_the_run() -> None:
    layers, _ = after_one_pass(TENSORWISE)
    layer = layers._layers[5]
    layer._count(torch.nn.Module(), None, None)  # type: ignore[attr-defined]
    with pytest.raises(HeteroError, match=layer.name.replace(".", r"\.")):
        layers.require_products(rank="rank 3")


def test_layers_that_are_not_known_as_the_engines_are_refused() -> None:
    with pytest.raises(HeteroError, match=r"decoder\.layers\.0 has no linear layers that are"):
        after_one_pass(TENSORWISE, is_known=False)


def test_sizes_that_gpus_do_not_take_are_refused_of_the_engines_layers_too() -> None:
    with pytest.raises(UserError) as refused:
        after_one_pass(f"{TENSORWISE} --ffn-hidden-size 40 --micro-batch-size 1 --seq-length 24")
    first, *_, last = refused.value.sentences
    assert "linear_fc1 is 40 x 64 on a rank" in first
    assert "24 tokens on a rank" in last
