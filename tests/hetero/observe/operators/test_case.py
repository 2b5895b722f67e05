"""What a run keeps of an operator is recomputed, judged, written and read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetero.errors import UserError
from hetero.observe.operators import case as cases
from hetero.observe.operators.case import Case, again, cut_to_file, is_finite, judge, read, write
from hetero.observe.operators.tolerance import Rounding

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(dtype: torch.dtype = torch.float32) -> Case:
    hidden, weight = numbers(96, 64).to(dtype), numbers(128, 64, seed=1).to(dtype)
    return Case(
        operator="layers.3.linear_fc1",
        kind="linear",
        rounding=Rounding(roundings=2, terms=128),
        settings={},
        inputs={"hidden": hidden},
        parameters={"weight": weight},
        outputs={"output": F.linear(hidden, weight)},
        where={"vendor": "amd", "rank": 3},
    )


def attention() -> Case:
    """Queries 5 and 11 of two heads, each with every key."""
    query, key, value = (numbers(12, 2, 8, seed=seed) for seed in range(3))
    whole = F.scaled_dot_product_attention(
        *(each.transpose(0, 1) for each in (query, key, value)), is_causal=True
    ).transpose(0, 1)
    positions = torch.tensor([5, 11])
    return Case(
        operator="layers.0.core_attention",
        kind="attention",
        rounding=Rounding(roundings=4, terms=20, amplification=8.0),
        settings={"scale": None},
        inputs={"query": query[positions], "key": key, "value": value, "positions": positions},
        outputs={"output": whole[positions]},
    )


def with_bit(case: Case, bit: int) -> Case:
    """With that bit of every thousandth element of the output flipped."""
    output = case.outputs["output"].clone()
    some = output.view(-1)[::1000].clone()
    output.view(-1)[::1000] = (some.view(INTEGERS[some.dtype]) ^ (1 << bit)).view(some.dtype)
    return replace(case, outputs={"output": output})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_pytorch_computes_agrees_with_float64(dtype: torch.dtype) -> None:
    (verdict,) = judge(linear(dtype))
    assert verdict.difference.passed
    assert 0.0 < verdict.share < 1.0


@pytest.mark.parametrize("case", [linear(), attention()], ids=["linear", "attention"])
def test_the_operator_can_be_computed_again(case: Case) -> None:
    here = again(case, torch.device("cpu"))
    assert here is not None
    assert all(each.difference.passed for each in [*judge(case), *judge(here)])


def test_attention_that_sees_one_key_too_many_is_found() -> None:
    case = attention()
    later = {**case.inputs, "positions": case.inputs["positions"] - 1}
    assert not judge(replace(case, inputs=later))[0].difference.passed


@pytest.mark.parametrize(
    ("dtype", "bit"),
    [(torch.float32, bit) for bit in (11, 15, 22, 31)]
    + [(torch.bfloat16, bit) for bit in (5, 6, 15)],
)
def test_a_bit_in_a_thousand_elements_is_found(dtype: torch.dtype, bit: int) -> None:
    assert not judge(with_bit(linear(dtype), bit))[0].difference.passed


@pytest.mark.parametrize(("dtype", "bit"), [(torch.float32, 0), (torch.bfloat16, 0)])
def test_the_last_bit_is_rounding(dtype: torch.dtype, bit: int) -> None:
    assert judge(with_bit(linear(dtype), bit))[0].difference.passed


def test_an_input_that_is_not_a_number_is_nobodys_error() -> None:
    case = linear()
    assert is_finite(case)
    case.inputs["hidden"][3, 5] = torch.inf
    assert not is_finite(case)


class Largest(TorchDispatchMode):
    """Notes the most elements that an operation has returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return result


@pytest.mark.parametrize("value", [0.0, torch.inf, -torch.inf, torch.nan])
def test_a_weight_is_searched_for_what_is_no_number_without_a_copy(value: float) -> None:
    case = linear(torch.bfloat16)
    case.parameters["weight"][5, 7] = value
    with Largest() as largest:
        assert is_finite(case) == (value == 0.0)
    assert largest.elements == 1


def test_an_overflow_of_half_precision_is_not_judged() -> None:
    case = linear(torch.float16)
    large = {"hidden": case.inputs["hidden"] * 1000}
    weight = {"weight": case.parameters["weight"] * 100}
    output = {"output": F.linear(large["hidden"], weight["weight"])}
    assert judge(replace(case, inputs=large, parameters=weight, outputs=output)) == []


def test_a_case_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    case, file = attention(), tmp_path / "deep" / "case.safetensors"
    write(case, file)
    found = read(file)
    assert (found.operator, found.kind, found.rounding, found.settings) == (
        case.operator,
        case.kind,
        case.rounding,
        case.settings,
    )
    for name, tensor in case.inputs.items():
        assert torch.equal(found.inputs[name], tensor)
    assert [path.name for path in file.parent.iterdir()] == ["case.safetensors"]


@pytest.mark.parametrize("content", [None, b"", b"no safetensors"])
def test_what_is_no_case_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "case.safetensors"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"case\.safetensors"):
        read(file)


@pytest.mark.parametrize("column", [0, 60, 127])
def test_a_large_weight_is_cut_to_what_is_about_the_worst_column(
    column: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "_SAVED", 32 * 64)
    case = linear()
    cut = cut_to_file(case, column=column)
    first = cut.settings["first_column"]
    assert first <= column < first + 32
    assert cut.parameters["weight"].shape == (32, 64)
    assert torch.equal(cut.outputs["output"], case.outputs["output"][:, first : first + 32])
    assert judge(cut)[0].difference.passed
