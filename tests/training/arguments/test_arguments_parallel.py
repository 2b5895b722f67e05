"""Ranks: how they divide into tensor, pipeline and data parallelism, and interleaving."""

import pytest

from megatron.training.arguments.problems import Problems
from megatron.training.arguments.validate import check_sizes

PP2 = "--pipeline-model-parallel-size 2"
VPP2 = "--num-virtual-stages-per-pipeline-rank 2"


@pytest.mark.parametrize(
    ("flags", "virtual"),
    [
        ("", None),
        (VPP2, 2),
        ("--num-layers-per-virtual-pipeline-stage 2", 2),
        ("--num-layers-per-virtual-pipeline-stage 4", None),
        (f"{VPP2} --num-layers 6 --decoder-first-pipeline-num-layers 2", 2),
        ("--pipeline-model-parallel-layout 'Et|ttt|tt|ttL'", 2),
        ("--pipeline-model-parallel-layout 'Etttt|ttttL'", None),
    ],
)
def test_model_chunks_on_a_rank(parse, flags, virtual):
    args = parse(f"{PP2} --global-batch-size 8 {flags}", world_size=2)
    assert args.virtual_pipeline_model_parallel_size == virtual
    assert args.overlap_p2p_comm is (virtual is not None)
    assert args.align_param_gather is (virtual is not None)


@pytest.mark.parametrize(
    ("microbatches", "group", "fits"),
    [
        (1, "", False),
        (2, "", True),
        (4, "", True),
        (4, "5", False),
        (4, "3", False),
        (6, "3", True),
    ],
)
def test_interleaved_micro_batches_come_in_groups(parse, refusal, microbatches, group, fits):
    flags = f"{PP2} {VPP2} --global-batch-size {2 * microbatches}"
    if group:
        flags += f" --microbatch-group-size-per-virtual-pipeline-stage {group}"
    if fits:
        assert parse(flags, world_size=2).virtual_pipeline_model_parallel_size == 2
    else:
        assert f"{microbatches} micro batch" in refusal(flags, world_size=2)


MESHES = "--hetero-pipeline --hetero-vendors nvidia amd --hetero-pipeline-sizes 1 1"


def test_weight_gradients_are_delayed_across_vendors_alone(parse):
    assert parse(f"{MESHES} --delay-wgrad-compute", world_size=2).delay_wgrad_compute
    alone = parse("--delay-wgrad-compute")
    assert not alone.delay_wgrad_compute
    assert "--delay-wgrad-compute: it needs --hetero-pipeline" in alone.ignored_flags
    one_stage = "--hetero-pipeline --hetero-vendors amd --hetero-pipeline-sizes 1"
    lost = parse(f"{one_stage} --delay-wgrad-compute", world_size=2)
    assert not lost.delay_wgrad_compute, "nothing would compute what waits"
    assert "--delay-wgrad-compute: it needs a second pipeline stage" in lost.ignored_flags


def test_validation_without_a_pipeline_size_is_a_mistake_of_the_caller(parse):
    args = parse("--hetero-pipeline --hetero-plan plan.yaml")
    with pytest.raises(ValueError, match="pipeline_model_parallel_size"):
        check_sizes(args, Problems())
