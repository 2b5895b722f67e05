"""What the live view knows of a plan."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from hetero.plan import Mesh, Plan
from hetero.startup.identity import RankIdentity
from megatron.hetero.run_description import describe_run, predicted_throughput

ARGS = Namespace(train_iters=50, hetero_plan=None)


def identities(plan: Plan) -> list[RankIdentity]:
    """Of NVIDIA's ranks alone: those of AMD are simulated."""
    return [
        RankIdentity(
            rank=rank,
            local_rank=rank,
            host=f"host-{rank // 2}",
            vendor=plan.vendor_of_rank(rank),
            actual_vendor="nvidia",
            device="H100",
            project_version="1",
            torch_version="2.11",
            core_version="0.16",
        )
        for rank in range(plan.world_size)
    ]


def test_a_pipeline_across_vendors() -> None:
    plan = Plan(
        meshes=(Mesh("amd", stages=1, tensor=2), Mesh("nvidia", stages=2, data=2)),
        layers=((3,), (4,), (5,)),
    )
    run = describe_run(ARGS, plan, identities(plan))
    assert [(stage.stage, stage.mesh, stage.layers, stage.ranks) for stage in run.stages] == [
        (0, 0, 3, (0, 1)),
        (1, 1, 4, (2, 3)),
        (2, 1, 5, (4, 5)),
    ]
    assert [mesh.stages for mesh in run.meshes] == [(0,), (1, 2)]
    assert [edge.is_boundary for edge in run.edges] == [True, False]
    assert [rank.is_simulated for rank in run.ranks] == [True, True] + 4 * [False]
    assert (run.ranks[1].tensor, run.ranks[3].data) == (1, 1)
    assert run.total_iterations == 50
    assert run.predicted_tokens_per_second is None


def test_whole_replicas_have_every_stage_twice() -> None:
    plan = Plan(
        meshes=(Mesh("amd", stages=2), Mesh("nvidia", stages=2)),
        layers=((1,), (2,)),
        whole_replicas=True,
    )
    run = describe_run(ARGS, plan, identities(plan))
    assert [(stage.stage, stage.mesh, stage.layers) for stage in run.stages] == [
        (0, 0, 1),
        (1, 0, 2),
        (0, 1, 1),
        (1, 1, 2),
    ]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            "# By hetero plan for llama, global batch 8: predicted 1.25 s a step, 12,345 tokens/s",
            12345.0,
        ),
        ("# my own plan, 12,345 tokens/s", None),
        ("meshes: []", None),
        ("", None),
    ],
)
def test_the_prediction_is_read_from_the_planners_comment(
    line: str, found: float | None, tmp_path: Path
) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(f"{line}\nmeshes: []\n")
    assert predicted_throughput(str(file)) == found


def test_a_plan_by_the_planner_has_one(tmp_path: Path) -> None:
    from hetero.tools import plan as planner

    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        "nodes:\n"
        "  - {name: green, accelerator: H100-SXM, nodes: 1, gpus_per_node: 1}\n"
        "  - {name: red, accelerator: MI300X, nodes: 1, gpus_per_node: 1}\n"
    )
    words = f"--cluster {cluster} --model llama3.2-1b --global-batch 16 --tensor 1 --no-replicas"
    assert planner.main([*words.split(), "--out", str(tmp_path / "out")]) == 0
    found = predicted_throughput(str(tmp_path / "out" / "plan.yaml"))
    assert found is not None
    assert found > 0
    assert predicted_throughput(str(tmp_path / "absent.yaml")) is None
