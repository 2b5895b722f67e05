"""Loads of experts are what counting by hand gives; only losses that there are are told."""

from __future__ import annotations

import pytest
import torch

from hetero.plan import Mesh, Plan
from hetero.tools.operators.recording import built_model
from megatron.hetero.experts import ExpertLoads, RouterLosses, layers_with_experts, routers
from tests.megatron.launches import parsed

SEQUENCE, BATCH, EXPERTS = 16, 2, 4
TOKENS = SEQUENCE * BATCH
MODEL = (
    f"--num-layers 2 --padded-vocab-size 100 --seq-length {SEQUENCE} --max-position-embeddings "
    f"{SEQUENCE} --position-embedding-type rope --disable-bias-linear --num-experts {EXPERTS} "
    "--hidden-dropout 0 --attention-dropout 0"
)
TO_ONE = "--moe-router-topk 1 --moe-router-pre-softmax"
HALF = "--moe-expert-capacity-factor 0.5"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

Choices = list[list[int]]
"""Of each layer, the expert that each token of a sequence prefers."""


def loads(flags: str, choices: Choices, *, steps: int = 1) -> tuple[dict[str, float], list[float]]:
    """What is told of steps in which routers choose so, and the counts that it is read from."""
    args = parsed(f"{MODEL} {flags}")
    tokens = torch.ones(BATCH, SEQUENCE, dtype=torch.int64)
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    # The compiler cannot trace what stands in for a GPU.
    eager = torch.compiler.set_stance("force_eager")
    with eager, built_model(args, torch.device("cpu")) as (model, _):
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        for router, chosen in zip(routers([model]), choices, strict=True):
            preferred = 8.0 * torch.nn.functional.one_hot(torch.tensor(chosen), EXPERTS)
            gate = router.gating
            router.gating = lambda x, gate=gate, p=preferred: 0.01 * gate(x) + p[:, None]
        counted = ExpertLoads(args, [model])
        for _ in range(steps):
            model(tokens, positions, None, labels=tokens).sum().backward()
        model.eval()
        with torch.no_grad():
            model(tokens, positions, None, labels=tokens)
        summed = counted.take(1, torch.device("cpu")).tolist()
        assert not any(counted.take(1, torch.device("cpu")).tolist())
        return counted.read(summed), summed


EVEN = [token % EXPERTS for token in range(SEQUENCE)]
ALL_TO_ONE = [0] * SEQUENCE
HALF_TO_ONE = [2] * (SEQUENCE // 2) + [0, 1, 2, 3] * (SEQUENCE // 8)


@pytest.mark.parametrize("more", ["", FULL], ids=["plain", "recomputed"])
def test_the_largest_load_is_told_over_the_mean_of_its_layer(more: str) -> None:
    told, summed = loads(f"{TO_ONE} {more}", [EVEN, HALF_TO_ONE])
    assert summed == [8, 8, 8, 8, 4, 4, 20, 4, 2 * TOKENS]
    assert told == {
        "expert_load_max": pytest.approx((1 + 2.5) / 2),
        "expert_load_max_of_any_layer": pytest.approx(2.5),
    }


def test_loads_add_up_over_micro_batches_and_not_over_evaluations() -> None:
    _, summed = loads(TO_ONE, [ALL_TO_ONE, EVEN], steps=3)
    assert summed == [3 * TOKENS, 0, 0, 0, 24, 24, 24, 24, 3 * 2 * TOKENS]


@pytest.mark.parametrize("more", ["", "--moe-pad-expert-input-to-capacity"], ids=["", "padded"])
def test_tokens_beyond_the_capacity_of_an_expert_are_no_load_and_counted_as_dropped(
    more: str,
) -> None:
    """Half of an equal share of 8 tokens is 4: of 32 tokens for one expert 28 are dropped, of 8 for
    each of them 4."""
    told, summed = loads(f"{TO_ONE} {HALF} {more}", [ALL_TO_ONE, EVEN])
    assert summed == [4, 0, 0, 0, 4, 4, 4, 4, 2 * TOKENS]
    assert told["expert_load_max"] == pytest.approx((4 + 1) / 2)
    assert told["dropped_token_fraction"] == pytest.approx((28 + 16) / 64)


def test_layers_for_multi_token_prediction_are_counted_as_the_last_one_is() -> None:
    assert layers_with_experts(parsed(f"{MODEL} --moe-layer-freq 2")) == (0,)
    assert layers_with_experts(parsed(f"{MODEL} --mtp-num-layers 2")) == (0, 1, 2, 3)
    last = "--moe-layer-freq [0]+[1]"
    assert layers_with_experts(parsed(f"{MODEL} {last} --mtp-num-layers 1")) == (1, 2)
    assert layers_with_experts(parsed()) == ()


def test_a_dense_model_tells_no_loads() -> None:
    counted = ExpertLoads(parsed(), [])
    assert counted.size == 0
    assert counted.take(1, torch.device("cpu")).shape == (0,)
    assert counted.read([]) == {}


@pytest.mark.parametrize(
    ("types", "told"),
    [("none", set()), ("none aux_loss", {"load_balancing_loss"}), ("sinkhorn", set())],
)
def test_a_balance_without_a_loss_tells_none_whatever_its_coefficient(
    types: str, told: set[str]
) -> None:
    coefficients = {"none": "0.1", "none aux_loss": "0.1 0.2", "sinkhorn": "0"}[types]
    flags = f"--moe-router-load-balancing-type {types} --moe-aux-loss-coeff {coefficients}"
    plan = Plan(meshes=(Mesh("cpu", stages=1),), layers=((2,),))
    losses = RouterLosses(parsed(f"{MODEL} {flags}"), plan, plan.coordinate(0))
    assert set(losses.read([1.0] * losses.size)) == told
