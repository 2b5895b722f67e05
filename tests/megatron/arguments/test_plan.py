"""The plan that a command line describes."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero.errors import UserError
from hetero.plan import Mesh, Plan
from hetero.plan.show import draw_meshes
from megatron.hetero.arguments import Configuration, read_command_line
from megatron.hetero.arguments.plan import apply_mesh
from tests.megatron.launches import command_line, configured, parsed
from tests.sentences import all_said_of, sentence_of

MIXED = "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1 "
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"


def _read(flags: str, *, layers: int = 8, ranks: int = 1) -> Configuration:
    sizes = f"--num-layers {layers} --micro-batch-size 1 --global-batch-size 8"
    return configured(f"{sizes} {flags}", world_size=ranks)


def _plan(flags: str, *, layers: int = 8, ranks: int = 1) -> Plan:
    return _read(flags, layers=layers, ranks=ranks).plan


def _mesh(vendor: str, stages: int, **sizes: Any) -> Mesh:
    """A mesh of a plan whose neighbours know what they exchange."""
    return Mesh(vendor, stages, **{"micro_batch_size": 1, "sequence_parallel": False} | sizes)


@pytest.mark.parametrize(
    ("flags", "ranks", "meshes", "layers"),
    [
        ("", 1, [_mesh("cpu", 1)], ((8,),)),
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
            8,
            [_mesh("cpu", 2, tensor=2, data=2)],
            ((4,), (4,)),
        ),
        (MIXED, 2, [_mesh("amd", 1), _mesh("nvidia", 1)], ((4,), (4,))),
        (
            "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 2 "
            "--hetero-pipeline-layers 2 3 3 --tensor-model-parallel-size 2",
            6,
            [_mesh("amd", 1, tensor=2), _mesh("nvidia", 2, tensor=2)],
            ((2,), (3,), (3,)),
        ),
    ],
)
def test_ranks_and_layers_are_shared_out(
    flags: str, ranks: int, meshes: list[Mesh], layers: tuple[tuple[int, ...], ...]
) -> None:
    """Ranks that no flag speaks of are data-parallel; layers that none does fall evenly."""
    assert _plan(flags, ranks=ranks) == Plan(meshes=tuple(meshes), layers=layers)


@pytest.mark.parametrize(
    ("flags", "stages", "layers"),
    [
        ("", 4, (2, 2, 2, 2)),
        (f"{FIRST} 2", 4, (2, 2, 2, 2)),
        (f"{FIRST} 5", 4, (5, 1, 1, 1)),
        (f"{LAST} 5", 4, (1, 1, 1, 5)),
        (f"{FIRST} 1 {LAST} 3", 4, (1, 2, 2, 3)),
        (f"{FIRST} 3 {LAST} 5", 2, (3, 5)),
        ("--pipeline-model-parallel-layout Ettt|t|ttttL", 3, (3, 1, 4)),
        ("--pipeline-model-parallel-layout 'Et|(t|)*2t*5,L'", 4, (1, 1, 1, 5)),
    ],
)
def test_layers_fall_as_the_flags_say(flags: str, stages: int, layers: tuple[int, ...]) -> None:
    plan = _plan(f"--pipeline-model-parallel-size {stages} {flags}", ranks=stages)
    assert plan.layers == tuple((count,) for count in layers)


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ("--num-layers-per-virtual-pipeline-stage 2", ((2, 2), (2, 2))),
        ("--num-virtual-stages-per-pipeline-rank 4", ((1, 1, 1, 1), (1, 1, 1, 1))),
        # A stage's neighbour is the schedule's, not the listing's.
        ("--pipeline-model-parallel-layout Et|tt|ttt|ttL", ((1, 3), (2, 2))),
        (f"--num-virtual-stages-per-pipeline-rank 2 {FIRST} 2", ((1, 1), (3, 3))),
    ],
)
def test_interleaved_layers_fall_as_the_flags_say(flags: str, layers: object) -> None:
    assert _plan(f"--pipeline-model-parallel-size 2 {flags}", ranks=2).layers == layers


def test_interleaved_layers_are_given_chunk_by_chunk_in_layer_order() -> None:
    plan = _plan(
        MIXED + "--num-virtual-stages-per-pipeline-rank 2 --hetero-pipeline-layers 3 2 1 2", ranks=2
    )
    assert plan.layers == ((3, 1), (2, 2))
    visited = [plan.layer_range(s, c) for c in range(2) for s in range(2)]
    assert visited == [range(3), range(3, 5), range(5, 6), range(6, 8)]


def _file(path: Path, text: str) -> str:
    path.write_text(text)
    return f"--hetero-pipeline --hetero-plan {path} "


TWO = """
meshes:
- {vendor: amd, layers: [3], tensor: 2, data: 2}
- {vendor: nvidia, layers: [5], tensor: 2, data: 2}
"""


@pytest.mark.parametrize("scripts_own", ["", "--pipeline-model-parallel-size 1"])
def test_a_plan_file_decides_the_sizes(tmp_path: Path, scripts_own: str) -> None:
    read = _read(_file(tmp_path / "plan.yaml", TWO) + scripts_own, ranks=8)
    args = read.args
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
    assert args.data_parallel_size == 2
    assert read.plan.layers == ((3,), (5,))


@pytest.mark.parametrize(
    "beside",
    ["--hetero-vendors amd nvidia", "--hetero-pipeline-sizes 2 2", "--hetero-tensor-sizes 4 4"],
)
def test_a_flag_beside_a_plan_file_is_the_only_one_that_is_blamed(
    tmp_path: Path, beside: str
) -> None:
    flags = _file(tmp_path / "plan.yaml", TWO) + beside
    with pytest.raises(UserError) as error:
        read_command_line(command_line(flags), world_size=8)
    (said,) = error.value.sentences
    assert said == f"--hetero-plan and {beside.split()[0]} exclude each other; remove one of them"


@pytest.mark.parametrize(
    "flags", ["--pipeline-model-parallel-layout EttttttttL", "--decoder-last-pipeline-num-layers 3"]
)
def test_a_plan_file_and_another_layout_exclude_each_other(flags: str, tmp_path: Path) -> None:
    plan = _file(tmp_path / "plan.yaml", "meshes: [{vendor: amd, layers: [8]}]")
    with pytest.raises(UserError, match="--hetero-plan"):
        _read(plan + flags)


def test_the_layers_of_a_plan_file_are_counted_beside_its_other_errors(tmp_path: Path) -> None:
    text = TWO.replace("vendor: amd", "vendor: and").replace("[3]", "[4]")
    flags = _file(tmp_path / "plan.yaml", text)
    said = all_said_of(_read, flags, layers=8, ranks=8)
    assert "vendor 'and' must be one of" in said
    assert "9 in all, but --num-layers is 8" in said


def test_all_that_is_wrong_with_a_plan_file_is_said_at_once(tmp_path: Path) -> None:
    text = TWO.replace("tensor: 2, data: 2", "tensor: 3, data: 3, sequence_parallel: true, x: 1", 1)
    text = text.replace("data: 2", "data: 2, distributed_optimizer: true")
    flags = _file(tmp_path / "plan.yaml", text) + "--tensor-model-parallel-size 4 --optimizer sgd "
    flags += "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3"
    said = all_said_of(_read, flags, layers=9, ranks=8)
    for words in (
        "--tensor-model-parallel-size 4 contradicts",
        "which says 3 2; leave the flag out",
        "8 in all, but --num-layers is 9",
        "the plan needs 13 ranks",
        "--num-attention-heads 4 must be a multiple of mesh 0's (amd) tensor-parallel size 3",
        "mesh 1 (nvidia) has 2 data-parallel ranks and cannot take the 3 sequences",
        "mesh 0: unknown key 'x'",
        "with sequence parallelism, --seq-length",
        "Adam's state alone, and --optimizer is sgd; leave it out of mesh 1, or",
        "which do not divide the 5 layers of pipeline stage 1",
    ):
        assert words in said


@pytest.mark.parametrize("size", [None, 2])
def test_a_plan_file_s_micro_batch_sizes_stand_for_the_global_one(
    tmp_path: Path, size: int
) -> None:
    text = TWO.replace("tensor: 2, data: 2", f"data: 1, micro_batch_size: {size or 'null'}")
    flags = _file(tmp_path / "plan.yaml", text)
    if size is None:
        with pytest.raises(UserError, match="--micro-batch-size is required"):
            parsed(flags, without="--micro-batch-size", world_size=2)
    else:
        args = parsed(flags, without="--micro-batch-size", world_size=2)
        assert args.micro_batch_size == size


UNEQUAL = """
meshes:
- {vendor: nvidia, layers: [3, 2], data: 2, recompute: full}
- {vendor: amd, layers: [3], tensor: 4, recompute: none}
"""
UNEQUAL_FLAGS = (
    "--hetero-pipeline --hetero-vendors nvidia amd --hetero-pipeline-sizes 2 1 "
    "--hetero-pipeline-layers 3 2 3 --hetero-tensor-sizes 1 4 --hetero-data-sizes 2 1 "
    "--hetero-recompute full none "
)


@pytest.mark.parametrize("common", ["", "--sequence-parallel", "--tensor-model-parallel-size 1"])
def test_flags_and_a_plan_file_describe_the_same_object(tmp_path: Path, common: str) -> None:
    from_file = _plan(_file(tmp_path / "plan.yaml", UNEQUAL) + common, ranks=8)
    assert _plan(UNEQUAL_FLAGS + common, ranks=8) == from_file
    assert from_file.meshes == (
        _mesh("nvidia", 2, data=2, recompute="full"),
        _mesh(
            "amd",
            1,
            tensor=4,
            micro_batch_size=2,
            recompute="none",
            sequence_parallel=common == "--sequence-parallel",
        ),
    )


def test_a_file_s_sequence_parallelism_needs_a_sequence_that_it_shares(tmp_path: Path) -> None:
    text = "meshes:\n- {vendor: amd, layers: [8], tensor: 4, sequence_parallel: true}\n"
    flags = _file(tmp_path / "plan.yaml", text)
    assert _plan(flags, ranks=4).meshes[0].sequence_parallel
    said = sentence_of(_plan, flags + "--seq-length 30", ranks=4)
    assert "--seq-length 30 must be a multiple of mesh 0's" in said
    assert "the nearest size that works is 2" in said
    whole = _file(tmp_path / "plan.yaml", text.replace("true", "false"))
    assert _plan(whole + "--seq-length 30 --sequence-parallel", ranks=4).meshes[0].tensor == 4


def test_sizes_that_no_mesh_has_of_its_own_are_the_global_flags() -> None:
    flags = "--hetero-pipeline --hetero-vendors nvidia amd nvidia --hetero-pipeline-sizes 1 1 1 "
    flags += "--hetero-pipeline-layers 2 3 3 --hetero-tensor-sizes 2 1 1"
    plan = _plan(flags, ranks=8)
    assert [(mesh.vendor, mesh.tensor, mesh.data) for mesh in plan.meshes] == [
        ("nvidia", 2, 2),
        ("amd", 1, 2),
        ("nvidia", 1, 2),
    ]


def test_micro_batches_are_named_for_each_mesh_or_follow() -> None:
    flags = f"{MIXED} --hetero-data-sizes 1 2 "
    assert [mesh.micro_batch_size for mesh in _plan(flags, ranks=3).meshes] == [2, 1]
    plan = _plan(flags + "--hetero-micro-batch-sizes 4 2", ranks=3)
    assert [mesh.micro_batch_size for mesh in plan.meshes] == [4, 2]


def test_a_ranks_flags_become_those_of_its_mesh() -> None:
    read = _read(f"{UNEQUAL_FLAGS} --sequence-parallel --eval-micro-batch-size 4", ranks=8)
    args, (nvidia, amd) = read.args, read.plan.meshes
    names = (
        *("tensor_model_parallel_size", "data_parallel_size", "micro_batch_size"),
        *("eval_micro_batch_size", "sequence_parallel", "recompute_granularity"),
        *("recompute_method", "recompute_num_layers"),
    )
    for mesh, expected in (
        (nvidia, (1, 2, 1, 4, False, "full", "uniform", 1)),
        (amd, (4, 1, 2, 8, True, None, None, None)),
    ):
        own = deepcopy(args)
        apply_mesh(own, replace(mesh, distributed_optimizer=mesh is amd, attention_backend="flash"))
        assert tuple(getattr(own, name) for name in names) == expected
        assert sum(own.data_shares) * own.micro_batch_size == 2
        assert own.use_distributed_optimizer is (mesh is amd)
        assert own.attention_backend == "flash"


def _fp8_plan(folder: Path, *formats: str | None) -> str:
    """Flags of a pipeline with a mesh of each fp8 format; None: the run's."""
    meshes = [
        {"vendor": vendor, "layers": [4]} | ({} if own is None else {"fp8": own})
        for vendor, own in zip(("amd", "nvidia"), formats, strict=True)
    ]
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump({"meshes": meshes}))
    return f"--hetero-pipeline --hetero-plan {path} "


def test_a_mesh_computes_in_its_own_fp8_format_or_in_the_runs(tmp_path: Path) -> None:
    read = _read(f"{_fp8_plan(tmp_path, 'none', None)} --bf16 --fp8-format hybrid", ranks=2)
    assert [mesh.fp8 for mesh in read.plan.meshes] == ["none", "hybrid"]
    found = []
    for mesh in read.plan.meshes:
        own = deepcopy(read.args)
        apply_mesh(own, mesh)
        found.append(own.fp8_format)
    assert found == [None, "hybrid"]
    assert "fp8 hybrid" in "\n".join(draw_meshes(read.plan))


def test_fp8_of_one_mesh_alone_needs_what_fp8_needs(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        _read(f"{_fp8_plan(tmp_path, None, 'e4m3')} --fp8-recipe mxfp8", ranks=2)
    assert [said.split()[0] for said in refused.value.sentences] == ["--fp8-format", "--fp8-recipe"]
    assert _read(f"{_fp8_plan(tmp_path, None, 'none')} --fp8-recipe mxfp8", ranks=2)


def test_a_mesh_recomputes_as_the_global_flags_say_how() -> None:
    how = "--recompute-method block --recompute-num-layers 2"
    read = _read(UNEQUAL_FLAGS + how, ranks=8)
    args = read.args
    apply_mesh(args, read.plan.meshes[0])
    assert (args.recompute_granularity, args.recompute_method) == ("full", "block")
    assert args.recompute_num_layers == 2
    with pytest.raises(UserError, match="do not divide the 3 layers of pipeline stage 0"):
        _plan(UNEQUAL_FLAGS + how.replace("block", "uniform"), ranks=8)


def test_units_of_recomputation_have_to_divide_every_stage() -> None:
    flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3"
    assert _plan(flags, layers=6).layers == ((6,),)
    block = flags.replace("uniform", "block")
    assert _plan(block, layers=8).layers == ((8,),)


EMBEDDING = "--account-for-embedding-in-pipeline-split"
LOSS = "--account-for-loss-in-pipeline-split"


@pytest.mark.parametrize(
    ("flags", "layers", "stages"),
    [
        (EMBEDDING, 7, ((3,), (4,))),
        (LOSS, 7, ((4,), (3,))),
        (f"{EMBEDDING} {LOSS}", 6, ((3,), (3,))),
        (f"{EMBEDDING} --num-layers-per-virtual-pipeline-stage 2", 7, ((1, 2), (2, 2))),
        (f"{EMBEDDING} {LOSS} --num-virtual-stages-per-pipeline-rank 2", 6, ((1, 2), (2, 1))),
    ],
)
def test_embedding_and_loss_take_a_layers_place_where_they_count(
    flags: str, layers: int, stages: tuple[tuple[int, ...], ...]
) -> None:
    for how in ("--pipeline-model-parallel-size 2", MIXED):
        assert _plan(f"{how} {flags}", layers=layers, ranks=2).layers == stages


def test_layers_given_by_stage_have_counted_embedding_and_loss() -> None:
    read = _read(f"{MIXED} {EMBEDDING} --hetero-pipeline-layers 3 5", ranks=2)
    assert read.plan.layers == ((3,), (5,))
    assert "gives the layers" in read.args.ignored_flags[0]


@pytest.mark.parametrize(
    "layers",
    [
        f"{MIXED} --hetero-pipeline-layers 8 0",
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Etttttttt|L",
    ],
)
def test_a_stage_may_hold_the_output_layer_alone(layers: str) -> None:
    assert _plan(layers, ranks=2).layers == ((8,), (0,))
