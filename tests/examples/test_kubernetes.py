"""The Jobs for Kubernetes: as its schema has them, and with commands that form one run."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.examples.launch_commands import EXAMPLES, Command, parsed, refusal, run

MANIFEST = EXAMPLES / "kubernetes" / "job.yaml"
VERSION = "1.33"


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def test_the_manifest_has_the_schema_of_kubernetes(objects: list[dict[str, Any]]) -> None:
    assert [one["kind"] for one in objects] == ["Service", "Job", "Job"]
    for one in objects:
        kubernetes_validate.validate(one, VERSION, strict=True)
    broken = objects[1] | {"spec": objects[1]["spec"] | {"backoffLimitPerNode": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSION, strict=True)


def node(job: dict[str, Any], index: int) -> Command:
    """What the pod of an index runs."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    environ = {one["name"]: one["value"] for one in container["env"]}
    assert container["command"] == ["bash", "/workspace/examples/kubernetes/node.sh"]
    outcome = run(
        "kubernetes/node.sh",
        *(*container["args"], "--dry-run"),
        **environ | {"JOB_COMPLETION_INDEX": str(index)},
    )
    assert outcome.returncode == 0, outcome.stderr
    return parsed(outcome.stdout.strip())


def test_the_pods_of_both_jobs_are_the_nodes_of_one_run(objects: list[dict[str, Any]]) -> None:
    service, *jobs = objects
    commands = [node(job, index) for job in jobs for index in range(job["spec"]["completions"])]
    assert [command.launcher["--node-rank"] for command in commands] == list("0123")
    assert [command.plan.vendor_of_rank(8 * n) for n, command in enumerate(commands)] == [
        *["nvidia"] * 2,
        *["amd"] * 2,
    ]
    first = commands[0]
    for command in commands:
        assert vars(command.args) == vars(first.args)
        assert command.launcher | {"--node-rank": ""} == first.launcher | {"--node-rank": ""}
    assert first.launcher["--nnodes"] == "4"
    assert first.launcher["--hetero-restarts"] == "20"
    assert first.args.hetero_memory_checkpoint_interval == 20
    name = service["metadata"]["name"]
    assert first.launcher["--master-addr"] == f"{jobs[0]['metadata']['name']}-0.{name}"
    for job in jobs:
        template = job["spec"]["template"]
        assert template["metadata"]["labels"].items() >= service["spec"]["selector"].items()
        assert template["spec"]["subdomain"] == name
        assert job["spec"]["completions"] == job["spec"]["parallelism"]


def test_a_pod_without_an_index_is_refused() -> None:
    assert "completionMode: Indexed" in refusal("kubernetes/node.sh", MODEL="llama3_8b")
    said = refusal("kubernetes/node.sh", MODEL="gpt5", JOB_COMPLETION_INDEX="0")
    assert "MODEL is 'gpt5'" in said
