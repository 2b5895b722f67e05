"""The --hetero- flags: a plan's file, or its shorthand."""

import pytest

from hetero.errors import UserError
from megatron.hetero.arguments.problems import Problems
from megatron.hetero.arguments.validate import check_sizes
from megatron.hetero.layout import apply_plan_file

TWO = "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1"
PLAN = "--hetero-pipeline --hetero-plan plan.yaml"


def test_plan_leaves_the_parallel_sizes_to_whoever_reads_it(parse):
    args = parse(PLAN, world_size=6)
    assert args.pipeline_model_parallel_size is None
    assert not hasattr(args, "data_parallel_size")
    with pytest.raises(ValueError, match="pipeline_model_parallel_size"):
        check_sizes(args, Problems())  # a mistake of the caller
    args = parse(f"{PLAN} --pipeline-model-parallel-size 2", world_size=2)
    assert args.pipeline_model_parallel_size == 2, "kept for comparison"


@pytest.mark.parametrize(
    "flags", ["--pipeline-model-parallel-layout EttttttttL", "--decoder-last-pipeline-num-layers 3"]
)
def test_plan_and_another_layout_exclude_each_other(parse, flags, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("meshes: [{vendor: amd, layers: [8]}]")
    args = parse(f"--hetero-pipeline --hetero-plan {path} {flags}", world_size=1)
    with pytest.raises(UserError, match="--hetero-plan"):
        apply_plan_file(args)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--hetero-micro-batch-sizes 1 2 3", "--hetero-micro-batch-sizes has 3 values"),
        ("--micro-batch-size x --hetero-data-sizes 3 1", "--micro-batch-size must be a whole"),
    ],
)
def test_nothing_is_said_of_batches_of_micro_batches_that_were_refused(refusal, flags, words):
    told = refusal(f"{TWO} {flags} --global-batch-size 7", world_size=4)
    assert words in told
    assert "\n" not in told


def test_all_that_is_wrong_with_meshes_is_said_at_once(refusal):
    text = refusal(
        f"{TWO} --hetero-tensor-sizes 3 8 --hetero-data-sizes 2 3 --micro-batch-size 1 "
        "--hetero-pipeline-layers 3 4",
        world_size=4,
    )
    for words in (
        "adds up to 7, but --num-layers is 8",
        "--num-attention-heads 4 must be a multiple of mesh 0's (amd) tensor-parallel size 3",
        "--num-attention-heads 4 must be a multiple of mesh 1's (nvidia) tensor-parallel size 8",
        "the plan needs 30 ranks",
        "mesh 0 (amd) has 2 data-parallel ranks and cannot take the 3 sequences",
    ):
        assert words in text


@pytest.mark.parametrize("flag", ["--hetero-tensor-sizes 1 2", "--hetero-pipeline-layers 3 4"])
def test_sizes_of_meshes_without_meshes_are_refused_and_compared_with_nothing(refusal, flag):
    told = refusal(flag, world_size=2)
    assert f"{flag.split()[0]} needs --hetero-pipeline" in told
    assert "\n" not in told


def test_a_size_that_is_no_number_hides_no_other_size_without_meshes(refusal):
    told = refusal("--hetero-pipeline-layers x --hetero-tensor-sizes 2", world_size=1)
    assert "--hetero-pipeline-layers must be a whole number" in told
    assert "--hetero-tensor-sizes needs --hetero-pipeline" in told


def test_all_that_is_wrong_with_replicas_is_said_at_once(refusal):
    text = refusal(
        "--hetero-data-parallel nvidia:2,amd:3 --hetero-data-shares 3 --hetero-checksum "
        "--train-samples 5",
        world_size=4,
    )
    for words in ("has 1 number", "--hetero-checksum needs", "exclude"):
        assert words in text
    assert "5 replicas of 1 rank each" in text
