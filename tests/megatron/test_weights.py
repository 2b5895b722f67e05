"""Initial weights do not depend on the layout, and a digest sees every bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.hetero.weights import (
    InitialWeights,
    TensorRank,
    combine_digests,
    digest,
    global_name,
    initialize,
    named_parameters,
)

HOW = InitialWeights(
    embedding_std=0.02,
    seed=1234,
    std=0.02,
    num_layers=8,
    gated_linear_unit=True,
    tied_embeddings=True,
)
COLUMN = "decoder.layers.3.self_attention.linear_qkv.weight"
ROW = "decoder.layers.3.self_attention.linear_proj.weight"
FC1 = "decoder.layers.3.mlp.linear_fc1.weight"
FC2 = "decoder.layers.3.mlp.linear_fc2.weight"
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"

Gather = Callable[[list[torch.Tensor]], torch.Tensor]


def _parameter(*shape: int, split: int | None = None) -> torch.nn.Parameter:
    """A parameter as megatron-core marks it: `split` is the dimension that tensor ranks share."""
    parameter = torch.nn.Parameter(torch.full(shape, math.nan))
    if split is not None:
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        parameter.partition_dim = split  # type: ignore[attr-defined]
    return parameter


def _draw(name: str, shape: tuple[int, ...], *, how: InitialWeights = HOW) -> torch.Tensor:
    return how.draw(name, _parameter(*shape), TensorRank())


def _shards(name: str, shape: tuple[int, int], dim: int, size: int) -> list[torch.Tensor]:
    local = list(shape)
    local[dim] //= size
    parameter = _parameter(*local, split=dim)
    return [HOW.draw(name, parameter, TensorRank(rank, size)) for rank in range(size)]


def _by_halves(shards: list[torch.Tensor]) -> torch.Tensor:
    """Gate and up projections, each gathered over the ranks."""
    gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
    return torch.cat([*gates, *ups])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "shape", "dim", "gather"),
    [
        (COLUMN, (48, 16), 0, torch.cat),
        (EMBEDDING, (64, 16), 0, torch.cat),
        (ROW, (16, 48), 1, lambda shards: torch.cat(shards, 1)),
        (FC2, (16, 48), 1, lambda shards: torch.cat(shards, 1)),
        (FC1, (48, 16), 0, _by_halves),
    ],
    ids=["column", "embedding", "row", "fc2", "swiglu fc1"],
)
def test_the_shards_of_any_tensor_parallel_size_make_up_the_same_whole(
    name: str, shape: tuple[int, int], dim: int, gather: Gather, size: int
) -> None:
    assert torch.equal(gather(_shards(name, shape, dim, size)), _draw(name, shape))


def test_without_a_gated_unit_fc1_is_split_like_any_column() -> None:
    how = replace(HOW, gated_linear_unit=False)
    shards = [how.draw(FC1, _parameter(12, 8, split=0), TensorRank(r, 2)) for r in range(2)]
    assert torch.equal(torch.cat(shards), _draw(FC1, (24, 8), how=how))


@given(st.integers(0, 200), st.integers(0, 200))
def test_a_layer_is_counted_over_the_whole_model(first: int, local: int) -> None:
    name = f"decoder.layers.{local}.mlp.linear_fc1.weight"
    expected = f"decoder.layers.{first + local}.mlp.linear_fc1.weight"
    for wrapping in ("", "module.", "module.module."):
        assert global_name(wrapping + name, first) == expected
    for name in (EMBEDDING, OUTPUT, "decoder.final_layernorm.weight"):
        assert global_name("module." + name, first) == name


def test_chunks_are_named_by_where_they_start() -> None:
    def chunk(layers: int) -> torch.nn.Module:
        model = torch.nn.Module()
        model.decoder = torch.nn.Module()
        model.decoder.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(layers))
        return model

    names = [name for name, _ in named_parameters([chunk(1), chunk(2)], [4, 9])]
    assert [name for name in names if name.endswith("weight")] == [
        "decoder.layers.4.weight",
        "decoder.layers.9.weight",
        "decoder.layers.10.weight",
    ]


def test_the_two_copies_of_a_tied_embedding_start_alike_with_a_width_of_their_own() -> None:
    how = replace(HOW, embedding_std=0.5)
    output, embedding = (_draw(name, (256, 64), how=how) for name in (OUTPUT, EMBEDDING))
    assert torch.equal(output, embedding)
    assert embedding.std().item() == pytest.approx(0.5, rel=0.02)
    untied = _draw(OUTPUT, (256, 64), how=replace(how, tied_embeddings=False))
    assert untied.std().item() == pytest.approx(0.02, rel=0.02)


def test_names_seeds_and_layers_draw_differently_and_the_global_state_is_left_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    reference = _draw(COLUMN, (8, 8))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(_draw(COLUMN, (8, 8)), reference)
    for other in (
        _draw(COLUMN.replace("3", "4"), (8, 8)),
        _draw(FC1, (8, 8)),
        _draw(COLUMN, (8, 8), how=replace(HOW, seed=1235)),
    ):
        assert not torch.equal(reference, other)


def test_biases_are_zero_and_norms_are_one() -> None:
    assert torch.equal(_draw("decoder.layers.0.mlp.linear_fc1.bias", (9,)), torch.zeros(9))
    assert torch.equal(_draw("decoder.final_layernorm.bias", (9,)), torch.zeros(9))
    assert torch.equal(_draw("decoder.final_layernorm.weight", (9,)), torch.ones(9))
    minus_one = replace(HOW, zero_centered_norms=True)
    assert torch.equal(_draw("final_layernorm.weight", (4,), how=minus_one), torch.zeros(4))


@pytest.mark.parametrize(
    ("name", "std"),
    [
        (COLUMN, 0.02),
        (FC1, 0.02),
        (EMBEDDING, 0.02),
        (ROW, 0.02 / math.sqrt(16)),
        (FC2, 0.02 / math.sqrt(16)),
    ],
)
def test_what_adds_to_the_residual_stream_is_drawn_narrower(name: str, std: float) -> None:
    drawn = _draw(name, (256, 256))
    assert drawn.std().item() == pytest.approx(std, rel=0.02)
    assert drawn.mean().item() == pytest.approx(0.0, abs=std / 50)


def test_xavier_looks_at_the_whole_tensor_not_at_the_shard() -> None:
    how = replace(HOW, xavier_uniform=True)
    shards = [
        how.draw(COLUMN, _parameter(8, 16, split=0), TensorRank(rank, 4)) for rank in range(4)
    ]
    whole = torch.cat(shards)
    assert torch.equal(whole, _draw(COLUMN, (32, 16), how=how))
    assert whole.abs().max().item() <= math.sqrt(6 / (32 + 16))


def test_neither_the_order_nor_the_threads_matter_and_dtypes_stay() -> None:
    def weights(names: list[str], threads: int) -> dict[str, torch.Tensor]:
        parameters = [(name, _parameter(16, 16)) for name in names]
        half = torch.nn.Parameter(torch.empty(8, 8, dtype=torch.bfloat16))
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            initialize([*parameters, (COLUMN, half)], HOW, TensorRank())
        finally:
            torch.set_num_threads(before)
        return {name: parameter.detach() for name, parameter in [*parameters, (COLUMN, half)]}

    names = [f"decoder.layers.{n}.mlp.linear_fc2.weight" for n in range(20)]
    serial, shuffled = weights(names, 1), weights(names[::-1], 4)
    assert all(torch.equal(serial[name], shuffled[name]) for name in names)
    assert torch.equal(serial[COLUMN], _draw(COLUMN, (8, 8)).bfloat16())


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    position=st.integers(0, 11),
    bit=st.integers(0, 7),
)
def test_one_bit_changes_the_digest(dtype: torch.dtype, position: int, bit: int) -> None:
    def digest_of(parameter: torch.nn.Parameter) -> dict[str, str]:
        return digest([("w", parameter)], TensorRank())

    one, other = (torch.nn.Parameter(torch.ones(2, 3, dtype=dtype)) for _ in range(2))
    assert digest_of(one) == digest_of(other)
    other.data.view(-1).view(torch.uint8)[position] ^= 1 << bit
    assert digest_of(one) != digest_of(other)


def test_the_combined_digest_does_not_depend_on_who_held_what() -> None:
    parameters = [(COLUMN, _parameter(4, 4, split=0)), ("norm", _parameter(4))]
    assert set(digest(parameters, TensorRank(1, 2))) == {f"{COLUMN}[1/2]", "norm"}
    assert set(digest(parameters, TensorRank())) == {COLUMN, "norm"}
    whole = combine_digests({"a": "1", "b": "2"})
    assert whole == combine_digests({"b": "2", "a": "1"})
    assert whole != combine_digests({"a": "2", "b": "1"})
    assert whole != combine_digests({"a": "1"})


EXPERT = "module.decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight"


def test_an_expert_is_named_by_its_number_in_the_whole_layer() -> None:
    name = global_name(EXPERT, 2, first_expert=4)
    assert name == "decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight"
    assert global_name(f"module.{FC1}", 0, first_expert=4) == FC1


def test_slices_of_experts_are_of_the_ranks_that_share_each() -> None:
    rank = TensorRank(1, 2, expert_rank=0, expert_size=1)
    name = global_name(EXPERT, 0)
    expert, dense = _parameter(8, 4, split=0), _parameter(8, 4, split=0)
    assert set(digest([(name, expert), (COLUMN, dense)], rank)) == {name, f"{COLUMN}[1/2]"}
    assert torch.equal(HOW.draw(name, expert, rank), _draw(name, (8, 4)))
    shards = [HOW.draw(name, expert, TensorRank(0, 1, each, 2)) for each in range(2)]
    assert torch.equal(_by_halves(shards), _draw(name, (16, 4)))
