"""Plan files and mappings: what reads back the same, and which plans are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import UserError
from hetero.plan import (
    Mesh,
    Plan,
    load_plan,
)
from hetero.plan.file import read_mapping
from hetero.plan.plan import (
    layer_problems,
    tensor_problems,
    world_size_problems,
)
from hetero.plan.show import draw_stage, nodes_of
from hetero.text import counted
from tests.hetero.plan.drawn_plans import plans

# Files.


@given(plans())
def test_a_plan_written_out_reads_back_the_same(plan: Plan) -> None:
    text = yaml.safe_dump(plan.to_mapping())
    back = read_mapping(yaml.safe_load(text), source="it", chunks=plan.chunks).plan()
    assert back == plan


def test_a_file_may_leave_out_what_is_one(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "meshes:\n- {vendor: amd, layers: [15], context: 1}\n- {vendor: nvidia, layers: [17]}\n"
    )
    assert load_plan(path) == Plan(
        meshes=(Mesh("amd", stages=1), Mesh("nvidia", stages=1)), layers=((15,), (17,))
    )


def test_a_file_that_counts_layers_by_stage_is_split_over_the_chunks() -> None:
    mapping = {"meshes": [{"vendor": "amd", "layers": [5, [1, 3]]}]}
    assert read_mapping(mapping, source="it", chunks=2).layers == ((3, 2), (1, 3))


# Refusals.


def test_all_errors_of_a_file_are_told_at_once() -> None:
    """Of keys, of types and of counts, also where no mesh of it can be read."""
    first = {"vendor": "nvidea", "layers": [4, 1], "stages": 3, "data": "two", "bogus": 1}
    second = {"layers": [2], "context": 0, "sequence_parallel": 2}
    with pytest.raises(UserError) as error:
        read_mapping({"meshes": [first, second], "mesh": 1}, source="it").plan()
    told = "\n".join(error.value.sentences)
    for wrong in (
        "it: unknown key 'mesh'",
        "mesh 0: unknown key 'bogus'",
        "mesh 0: vendor 'nvidea'",
        "mesh 0: data 'two'",
        "mesh 0: 3 stages but layers for 2",
        "mesh 1: the key 'vendor' is missing",
        "mesh 1: context 0 must be a whole number of at least 1",
        "mesh 1: sequence_parallel 2 must be true or false",
    ):
        assert told.count(wrong) == 1
    assert len(error.value.sentences) == 8
    with pytest.raises(UserError) as error:
        read_mapping({"mesh": []}, source="it")
    assert len(error.value.sentences) == 2


def _refusal(error: pytest.ExceptionInfo[UserError]) -> str:
    sentence = str(error.value)
    assert "\n" not in sentence
    assert error.value.exit_code == 2
    return sentence


@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        ({"vendor": "intel", "stages": 1}, "'intel'"),
        ({"vendor": "amd", "stages": 1, "tensor": -2}, "tensor -2"),
        ({"vendor": "amd", "stages": True}, "stages True"),
        ({"vendor": "amd", "stages": 1, "micro_batch_size": 0}, "micro_batch_size 0"),
        ({"vendor": "amd", "stages": 1, "sequence_parallel": 1}, "sequence_parallel 1"),
        ({"vendor": "amd", "stages": 1, "recompute": "some"}, "none, selective, full"),
    ],
)
def test_a_mesh_that_cannot_be_names_its_number(mesh: dict[str, Any], names: str) -> None:
    with pytest.raises(UserError) as error:
        Mesh(**mesh)
    assert names in _refusal(error)


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        ((), "2 pipeline stages but gives layers for 0"),
        (((1,), (1,), (1,)), "2 pipeline stages but gives layers for 3"),
        (((1,), (1, 1)), "the same number of model chunks"),
        (((1,), (-1,)), "stage 1 has layers [-1]"),
        (((1, 1), (3, -1)), "stage 1 has layers [3, -1]"),
        (((-1,), (-1,)), "stages 0-1 have layers [-1]"),
    ],
)
def test_layers_that_do_not_fit_the_stages_are_refused(layers: Any, names: str) -> None:
    with pytest.raises(UserError) as error:
        Plan(meshes=(Mesh("amd", stages=1), Mesh("nvidia", stages=1)), layers=layers)
    assert names in _refusal(error)


def test_unequal_sequences_a_step_are_refused_with_the_nearest_sizes() -> None:
    def resolved(*sizes: tuple[int | None, int], default: int = 1) -> list[int | None]:
        meshes = (Mesh("amd", 1, data=data, micro_batch_size=size) for size, data in sizes)
        plan = Plan(meshes=tuple(meshes), layers=((1,),) * len(sizes))
        found = plan.resolved(micro_batch_size=default, sequence_parallel=False)
        return [mesh.micro_batch_size for mesh in found.meshes]

    assert resolved((3, 2), (2, 3), (None, 1)) == [3, 2, 6]
    assert resolved((None, 2), (None, 4), default=3) == [6, 3]
    for sizes, words in (
        (((2, 2), (2, 3)), "mesh 1 (amd) has 3 data-parallel ranks of micro-batch size 2"),
        (((2, 2), (2, 3)), "nearest that all can take is 6, with micro-batch sizes 3 2"),
        (((1, 2), (1, 4)), "nearest that all can take is 4, with micro-batch sizes 2 1"),
        (((1, 2), (None, 3)), "mesh 1 (amd) has 3 data-parallel ranks and cannot take the 2"),
        (((None, 2), (None, 3)), "mesh 0 (amd) has 2 data-parallel ranks and cannot take the 3"),
    ):
        with pytest.raises(UserError) as error:
            resolved(*sizes)
        assert words in _refusal(error)


def test_what_no_mesh_names_is_the_global_flags() -> None:
    wide = Mesh("amd", 1, tensor=2, recompute="full")
    plan = Plan((wide, Mesh("nvidia", 1)), layers=((1,), (1,)))
    resolved = plan.resolved(micro_batch_size=3, sequence_parallel=True, recompute="selective")
    assert resolved.meshes == (
        replace(wide, micro_batch_size=3, sequence_parallel=True),
        Mesh("nvidia", 1, micro_batch_size=3, sequence_parallel=False, recompute="selective"),
    )


@given(plans(), st.integers(-1, 200))
def test_another_world_size_is_refused_with_both_numbers(plan: Plan, started: int) -> None:
    found = list(world_size_problems(plan.meshes, started))
    assert len(found) == (started != plan.world_size)
    for sentence in found:
        assert f"needs {counted(plan.world_size, 'rank')}" in sentence
        assert f"but {started} were started" in sentence


@given(plans(), st.integers(0, 200))
def test_another_number_of_layers_is_refused_with_both_numbers(plan: Plan, asked: int) -> None:
    plan.require_layers(plan.num_layers)
    if asked != plan.num_layers:
        with pytest.raises(UserError) as error:
            plan.require_layers(asked)
        sentence = _refusal(error)
        assert f"{plan.num_layers} in all" in sentence
        assert f"--num-layers is {asked}" in sentence


AMD = {"vendor": "amd", "layers": [1]}


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (None, "top-level list named 'meshes'"),
        ({}, "top-level list named 'meshes'"),
        ({"meshes": AMD}, "top-level list named 'meshes'"),
        ({"meshes": []}, "no mesh"),
        ({"meshes": [{"vendor": "amd", "layers": 8}]}, "'layers' must list"),
        ({"meshes": [{"vendor": "amd", "layers": [True]}]}, "True is not a number of layers"),
        ({"meshes": [{"vendor": "amd", "layers": [[1, 2]]}]}, "lists 2 chunks"),
    ],
)
def test_a_mapping_that_is_no_plan_is_refused_in_one_sentence(data: Any, names: str) -> None:
    with pytest.raises(UserError) as error:
        read_mapping(data, source="the plan p.yaml").plan()
    assert names in _refusal(error)


def test_all_that_is_wrong_with_a_file_is_said_at_once() -> None:
    bad = {"vendor": "intel", "layers": [1.5, -2, -2], "tensor": "2", "tensr": 2}
    nameless = {"layer": [1], "data": 0}
    several = {"vendor": "amd", "layers": [-1], "stages": 2, "context": "2"}
    data = {"meshes": [bad, AMD, nameless, several, "amd"], "mesh": 1}
    with pytest.raises(UserError) as error:
        read_mapping(data, source="p.yaml").plan()
    assert [re.split("[;,]", sentence)[0] for sentence in error.value.sentences] == [
        "p.yaml: unknown key 'mesh'",
        "p.yaml: mesh 0: unknown key 'tensr'",
        "p.yaml: mesh 0: 1.5 is not a number of layers",
        "p.yaml: mesh 0: a stage has layers -2",
        "p.yaml: mesh 0: vendor 'intel' must be one of nvidia",
        "p.yaml: mesh 0: tensor '2' must be a whole number of at least 1",
        "p.yaml: mesh 2: unknown key 'layer'",
        "p.yaml: mesh 2: the key 'vendor' is missing",
        "p.yaml: mesh 2: data 0 must be a whole number of at least 1",
        "p.yaml: mesh 3: a stage has layers -1",
        "p.yaml: mesh 3: context '2' must be a whole number of at least 1",
        "p.yaml: mesh 3: 2 stages but layers for 1",
        "p.yaml: mesh 4: expected keys vendor",
    ]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 200))
def test_the_nearest_layers_add_up_and_keep_the_order_of_the_stages(
    layers: list[int], asked: int
) -> None:
    sentence = next(layer_problems(layers, asked), "")
    if asked == sum(layers):
        assert not sentence
    else:
        near = yaml.safe_load(sentence.split("the nearest that do are ")[1])
        assert sum(near) == asked
        assert min(near) >= 0
        if asked >= sum(map(bool, layers)):
            assert all(now or not given for now, given in zip(near, layers, strict=True))
        pairs = sorted(zip(layers, near, strict=True))
        assert all(a[1] <= b[1] + 1 for a, b in pairwise(pairs))


@given(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 99))
def test_data_sizes_that_are_proposed_for_another_world_size_fit_into_it(
    times: int, data: list[int], started: int
) -> None:
    listed = [Mesh("amd", 1, tensor=index + 1, data=n * times) for index, n in enumerate(data)]
    sentence = next(world_size_problems(listed, started), "")
    if "with data-parallel sizes" in sentence:
        sizes = sentence.split("with data-parallel sizes ")[1].split(" it needs")[0].split()
        proposed = [replace(mesh, data=int(n)) for mesh, n in zip(listed, sizes, strict=True)]
        assert sum(mesh.world_size for mesh in proposed) <= started
        ratios = {Fraction(int(n), mesh.data) for n, mesh in zip(sizes, listed, strict=True)}
        assert len(ratios) == 1 or len(set(sizes)) == 1
    elif sentence:
        assert int(sentence.split("at least ")[1]) == sum(mesh.tensor for mesh in listed) > started


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 16))
def test_tensor_sizes_that_are_proposed_divide_every_count(
    heads: int, ffn: int, tensor: int
) -> None:
    counts = {"--num-attention-heads": heads, "--ffn-hidden-size": ffn}
    sentences = list(tensor_problems(counts, tensor, name="TP"))
    assert len(sentences) == sum(count % tensor > 0 for count in counts.values())
    for sentence in sentences:
        near = [int(word) for word in sentence.split("work")[1].split() if word.isdecimal()]
        assert near
        assert all(heads % size == ffn % size == 0 for size in near)


yaml_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["meshes", "vendor", "layers", "stages", "x"]), inner)
    ),
    max_leaves=12,
)


@given(yaml_values | st.fixed_dictionaries({"meshes": st.lists(yaml_values, max_size=3)}))
def test_whatever_the_file_holds_the_answer_is_a_plan_or_a_plan_error(data: Any) -> None:
    try:
        plan = read_mapping(data, source="it").plan()
    except UserError:
        return
    assert plan.num_layers >= plan.stages


@pytest.mark.parametrize(
    "content", [b"meshes: [", b"meshes: 2024-13-45", b"meshes: \xff\xfe", b"[" * 3000], ids=range(4)
)
def test_a_file_that_is_not_yaml_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        load_plan(path)
    assert f"{path} is not valid YAML" in _refusal(error)


def test_each_key_that_stands_twice_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("meshes:\n- vendor: amd\n  layers: [1]\n  layers: [2]\n- {data: 1, data: 2}\n")
    with pytest.raises(UserError) as error:
        load_plan(path)
    said = _refusal(error)
    assert "'layers' stands twice, again in line 4; the key 'data' stands twice, again in" in said


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(UserError) as error:
            load_plan(path)
        assert str(path) in _refusal(error)


def test_a_stage_may_have_no_layers_and_no_stage_fewer() -> None:
    plan = read_mapping(
        {
            "meshes": [
                {"vendor": "nvidia", "layers": [0, 3]},
                {"vendor": "amd", "layers": [0, 1, 0]},
            ]
        },
        source="p.yaml",
    ).plan()
    assert plan.layers == ((0,), (3,), (0,), (1,), (0,))
    assert [list(plan.layer_range(stage)) for stage in range(5)] == [[], [0, 1, 2], [], [3], []]
    assert plan == read_mapping(plan.to_mapping(), source="p.yaml").plan()
    nodes = nodes_of(plan, {"nvidia": 2, "amd": 4})
    drawn = [next(draw_stage(plan, stage, nodes)) for stage in (0, 2, 4)]
    assert [line.split("  ")[-1] for line in drawn] == [
        *("no layers, embedding", "no layers", "no layers, output")
    ]
    with pytest.raises(UserError, match=r"stage 1 has layers \[2, -1\]; a stage or chunk has 0"):
        replace(plan, layers=((1, 1), (2, -1), (0, 0), (1, 0), (0, 0)))
