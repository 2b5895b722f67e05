"""One command from a cluster file to the plan that training runs, or to all that is wrong."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero.plan import Mesh, Plan, load_plan
from hetero.planner.placement import Placement
from hetero.planner.solution import find_best_plans
from hetero.presets import model_file
from hetero.tools.plan import _parse, main
from hetero.tools.planning.plan_files import node_commands, training_flags
from hetero.tools.planning.planning_request import read_request
from megatron.hetero.arguments import parse_args, read_command_line
from tests.commands import PRESETS
from tests.hetero.planner.expert_models import DEEPSEEK_LIKE, QWEN3_30B
from tests.tools.refusals import Refused

CLUSTER = """\
nodes:
  - {name: green, accelerator: H100-SXM, nodes: 1}
  - {name: red, accelerator: MI300X, nodes: 1}
"""


def profile_of_one_point(folder: Path, **point: int) -> str:
    """The file of an accelerator of which one shape was measured."""
    shape = {"tensor": 1, "micro_batch": 1, "seq_length": 8192, "recompute": "none", **point}
    part = {"forward": 1.0, "backward": 2.0}
    costs = {"layer": part, "embedding": part, "head": part, "layer_activation_bytes": 1.0}
    points = [{**shape, "costs": costs}]
    measured = {"points": points, "optimizer_seconds_per_parameter": 1e-9}
    file = folder / "profile.json"
    file.write_text(json.dumps({"format": 1, "accelerators": {"H100-SXM": measured}}))
    return str(file)


def request(folder: Path, *flags: str, cluster: str = CLUSTER) -> list[str]:
    """The last of a flag counts."""
    file = folder / "cluster.yaml"
    file.write_text(cluster)
    return [
        *("--cluster", str(file), "--model", "llama3-8b", "--global-batch", "64"),
        *("--tensor", "1", "2", "--micro-batch", "1", "--out", str(folder / "out"), *flags),
    ]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    questions = ("split", "link", "nodes", "slower")
    assert main(request(folder, "--no-replicas", "--what-if", *questions)) == 0
    return folder / "out"


def test_the_plan_file_is_what_training_reads(answered: Path) -> None:
    plan = load_plan(answered / "plan.yaml")
    assert plan.num_layers == 32
    assert {mesh.vendor for mesh in plan.meshes} == {"nvidia", "amd"}
    assert plan.world_size == 16
    flags = yaml.safe_load((answered / "flags.yaml").read_text())
    assert flags["hetero-plan"] == str((answered / "plan.yaml").resolve())
    assert flags["global-batch-size"] == 64


def test_the_report_draws_the_pipeline_and_answers_every_question(answered: Path) -> None:
    page = (answered / "report.html").read_text()
    for title in (
        "One step, drawn",
        "Other splits of the layers",
        "Slower and faster links between kinds of nodes",
        "Other numbers of nodes of red",
        "amd slower than its profile",
    ):
        assert title in page
    assert page.count("<svg") >= 3 + 6


def test_the_answer_ends_with_a_command_for_each_node_that_training_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The nodes together start the ranks of the plan, in its order of vendors."""
    nodes = CLUSTER.replace("nodes: 1", "nodes: 2, addresses: [10.0.0.1, second]", 1)
    assert main(request(tmp_path, "--no-replicas", cluster=nodes)) == 0
    said = capsys.readouterr().out
    commands = (tmp_path / "out" / "commands.txt").read_text()
    assert said.endswith(commands)
    plan = load_plan(tmp_path / "out" / "plan.yaml")
    vendors = [mesh.vendor for mesh in plan.meshes for _ in range(mesh.world_size)]
    ranks: list[str] = []
    master = "10.0.0.1" if vendors[0] == "nvidia" else "$HOST"
    titles = [line for line in commands.splitlines() if line.startswith("# node ")]
    words = [shlex.split(line) for line in re.findall(r"^hetero.*\\\n.*<", commands, re.M)]
    for number, (title, command) in enumerate(zip(titles, words, strict=True)):
        assert command[command.index("--nnodes") + 1] == str(len(titles))
        assert command[command.index("--node-rank") + 1] == str(number)
        assert command[command.index("--master-addr") + 1] == master
        count = int(command[command.index("--nproc-per-node") + 1])
        ranks += [{"green": "nvidia", "red": "amd"}[title.split(": ")[1].split()[0]]] * count
        flags = command[command.index("--yaml-cfg") : -1]
        args = parse_args(
            [*flags, "--lr", "1", "--train-iters", "1", "--mock-data"], world_size=plan.world_size
        )
        assert args.hetero_plan == str((tmp_path / "out" / "plan.yaml").resolve())
    assert ranks == vendors


def test_a_kind_that_comes_again_goes_on_where_it_stopped(tmp_path: Path) -> None:
    meshes = [Mesh(vendor, stages=1, data=4) for vendor in ("nvidia", "amd", "nvidia")]
    plan = Plan(meshes=tuple(meshes), layers=((10,), (10,), (12,)))
    options = _parse(request(tmp_path))
    placement = Placement(plan, ("green", "red", "green"), 16)
    lines = node_commands(placement, read_request(options), tmp_path)
    starts = [line for line in lines if "--node-rank" in line]
    assert [line.startswith("CUDA_VISIBLE_DEVICES=4,5,6,7 ") for line in starts] == [
        *(False, False, True)
    ]


def test_addresses_must_be_one_for_each_node(refused: Refused, tmp_path: Path) -> None:
    cluster = CLUSTER.replace("nodes: 1", "nodes: 2, addresses: [10.0.0.1]", 1)
    said = refused(main, request(tmp_path, cluster=cluster))
    assert "addresses must list the address or host name of each of the 2 nodes" in said


def test_a_vendor_on_whose_nodes_nothing_fits_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = CLUSTER.replace("H100-SXM, nodes: 1", "H100-SXM, nodes: 1, gpus_per_node: 1")
    assert main(request(tmp_path, "--no-replicas", cluster=small)) == 0
    assert "nvidia alone: does not fit in memory" in capsys.readouterr().out


def test_a_model_s_path_cannot_add_to_the_plan(tmp_path: Path) -> None:
    model = tmp_path / "a\nvendor: x.yaml"
    model.write_text(model_file("llama3.2_1b").read_text())
    assert main(request(tmp_path, "--model", str(model), "--no-replicas")) == 0
    assert load_plan(tmp_path / "out" / "plan.yaml").num_layers == 16


def test_the_step_can_be_opened_in_perfetto(answered: Path) -> None:
    events = json.loads((answered / "trace.json").read_text())["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"forward", "backward"}
    assert len(rows) >= load_plan(answered / "plan.yaml").stages


def test_the_faster_vendor_takes_more_layers(tmp_path: Path) -> None:
    assert main(request(tmp_path, "--no-replicas", cluster=CLUSTER.replace("MI300", "MI355"))) == 0
    plan = load_plan(tmp_path / "out" / "plan.yaml")
    layers = dict.fromkeys(("nvidia", "amd"), 0)
    stage = 0
    for mesh in plan.meshes:
        layers[mesh.vendor] += sum(sum(plan.layers[n]) for n in range(stage, stage + mesh.stages))
        stage += mesh.stages
    assert layers["amd"] > layers["nvidia"] > 0


NULL_TOKENIZER = {"tokenizer-type": "NullTokenizer", "vocab-size": 100000}


@pytest.mark.parametrize("of", [QWEN3_30B, DEEPSEEK_LIKE], ids=["qwen", "deepseek"])
def test_training_takes_the_plan_of_a_mixture_of_experts(
    tmp_path: Path, of: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes in the model's own file give way to the plan's."""
    file = tmp_path / "model.yaml"
    own = {"expert-model-parallel-size": 4, "expert-tensor-parallel-size": 1}
    file.write_text(yaml.safe_dump(of | own | NULL_TOKENIZER))
    words = request(tmp_path, "--model", str(file), "--no-replicas")
    assert main([*words, "--experts", "2", "8"]) == 0
    assert "EP 8" in capsys.readouterr().out
    plan = load_plan(tmp_path / "out" / "plan.yaml")
    flags = ["--yaml-cfg", str(file), "--yaml-cfg", str(tmp_path / "out" / "flags.yaml")]
    more = "--lr 1 --train-iters 1 --mock-data".split()
    read = read_command_line([*flags, *more], world_size=plan.world_size).plan
    assert [mesh.experts for mesh in read.meshes] == [mesh.experts for mesh in plan.meshes]
    assert max(mesh.experts for mesh in plan.meshes) == 8


def test_replicas_that_share_experts_are_flags_that_training_understands(tmp_path: Path) -> None:
    replica = Mesh("nvidia", 1, tensor=2, data=4, experts=4, expert_tensor=1, share=3)
    replica = replace(replica, micro_batch_size=1, sequence_parallel=True)
    plan = Plan(
        meshes=(replica, replace(replica, vendor="amd", data=2, share=2)),
        layers=((27,),),
        whole_replicas=True,
    )
    own = training_flags(Placement(plan, ("green", "red"), 16), tmp_path / "plan.yaml")
    file = tmp_path / "flags.yaml"
    file.write_text(yaml.safe_dump(DEEPSEEK_LIKE | NULL_TOKENIZER | own))
    more = "--lr 1 --train-iters 1 --mock-data".split()
    args = read_command_line(["--yaml-cfg", str(file), *more], world_size=12).args
    sizes = args.expert_model_parallel_size, args.expert_tensor_parallel_size
    assert sizes == (4, 1)


LONG = "nodes: [{name: green, accelerator: H200}, {name: red, accelerator: MI325X}]\n"
LONG_WORDS = "--seq-length 131072 --global-batch 16".split()


def test_a_context_of_128_thousand_tokens_fits_where_ranks_share_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    words = request(tmp_path, *LONG_WORDS, "--tensor", "1", "--recompute", "none", cluster=LONG)
    told = refused(main, [*words, "--context", "1"])
    assert "activations of 131072 tokens a sample come on top" in told
    assert main([*words, "--no-replicas"]) == 0
    plan = load_plan(tmp_path / "out" / "plan.yaml")
    assert all(mesh.context > 1 for mesh in plan.meshes)
    assert " x CP 8 x DP 1" in capsys.readouterr().out
    files = ["--yaml-cfg", str(model_file("llama3-8b"))]
    files += ["--yaml-cfg", str(tmp_path / "out" / "flags.yaml")]
    more = "--lr 1 --train-iters 1 --mock-data".split()
    read = read_command_line([*files, *more], world_size=plan.world_size).plan
    assert [mesh.context for mesh in read.meshes] == [mesh.context for mesh in plan.meshes]


def test_ranks_share_long_sequences_where_that_is_faster_than_what_fits_without(
    tmp_path: Path,
) -> None:
    """Tensor parallelism over whole nodes fits, too."""

    def seconds(*words: str) -> float:
        options = _parse(request(tmp_path, *LONG_WORDS, *words, cluster=LONG))
        best = find_best_plans(read_request(options).problem)
        assert best is not None
        return best.first.seconds

    sizes = ["--tensor", "1", "2", "4", "8"]
    assert 1.15 * seconds(*sizes) < seconds(*sizes, "--context", "1")


def test_replicas_of_ranks_that_share_sequences_are_flags_too(tmp_path: Path) -> None:
    assert main(request(tmp_path, *LONG_WORDS, cluster=LONG)) == 0
    flags = yaml.safe_load((tmp_path / "out" / "flags.yaml").read_text())
    assert flags["hetero-data-parallel"] == "nvidia:1,amd:1"
    assert flags["context-parallel-size"] == 8


@pytest.mark.parametrize("other", ["amd", "nvidia"])
def test_replicas_are_written_as_flags_that_training_understands(
    other: str, tmp_path: Path
) -> None:
    replica = Mesh("nvidia", stages=2, data=2, share=3, micro_batch_size=2, recompute="full")
    plan = Plan(
        meshes=(replica, replace(replica, vendor=other, data=1, share=2)),
        layers=((3,), (1,)),
        whole_replicas=True,
    )
    flags = training_flags(Placement(plan, ("green", "red"), 16), tmp_path / "plan.yaml")
    file = tmp_path / "flags.yaml"
    file.write_text(yaml.safe_dump(flags))
    preset = str(PRESETS / "tiny.yaml")
    words = ["--yaml-cfg", preset, "--yaml-cfg", str(file)]
    configuration = read_command_line(words, world_size=plan.world_size)
    args, read = configuration.args, configuration.plan
    assert read.layers == plan.layers
    assert [(m.vendor, m.stages, m.tensor, m.data, m.share) for m in read.meshes] == [
        ("nvidia", 2, 1, 2, 3),
        (other, 2, 1, 1, 2),
    ]
    assert (args.global_batch_size, args.micro_batch_size) == (16, 2)
    assert args.recompute_granularity == "full"


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path, refused: Refused) -> None:
    damaged = tmp_path / "profile.json"
    damaged.write_text(json.dumps({"format": 99}))
    wrong = ("--profile", str(damaged), "--model", "llama9-8b", "--out", "/proc/plan")
    words = request(tmp_path, *wrong, cluster="nodes: [{accelerator: H1000, nodes: 1}]\n")
    told = refused(main, words, several=True)
    for said in ("H1000", "--out /proc/plan cannot be written", "llama9-8b", str(damaged)):
        assert said in told


@pytest.mark.parametrize("target", ["out", "nowhere"])
def test_results_at_the_end_of_no_link_are_refused_before_anything_is_planned(
    target: str, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to itself, and one to nothing."""
    (tmp_path / "out").symlink_to(target)
    monkeypatch.setattr("hetero.tools.plan.solve", None)
    assert f"--out {tmp_path}/out cannot be written" in refused(main, request(tmp_path))


SMALL = "nodes: [{accelerator: V100-SXM2-16GB, nodes: 1, gpus_per_node: 1}]\n"
TWO_GPUS = CLUSTER.replace("nodes: 1", "gpus_per_node: 1")


@pytest.mark.parametrize(
    ("words", "cluster", "said"),
    [
        ("--tensor 3", CLUSTER, "no --tensor size of 3 both divides the model's 32 heads"),
        ("--context 3 5", CLUSTER, "no --context size of 3, 5 both divides 8192 tokens into"),
        ("--context 32", CLUSTER, "has its ranks on one node, or on all GPUs of several"),
        ("--micro-batch 3", CLUSTER, "no --micro-batch of 3 divides it"),
        (f"--global-batch {10**18}", CLUSTER, "give at most 1000000000"),
        ("--interleave 17", CLUSTER, "32 layers cannot be 17 chunks of each of two stages"),
        ("", SMALL, "no plan of llama3-8b for a global batch of 64 fits"),
        ("--interleave 2 --global-batch 7", TWO_GPUS, "into no number of micro-batches that --int"),
    ],
)
def test_choices_of_which_none_can_be_are_named(
    words: str, cluster: str, said: str, tmp_path: Path, refused: Refused
) -> None:
    told = refused(main, request(tmp_path, *words.split(), cluster=cluster))
    assert said in told
    assert ("GiB" in told) is (cluster == SMALL), "what lacks memory"
    assert not (tmp_path / "out").exists()


def test_sizes_for_experts_that_divide_none_are_named(tmp_path: Path, refused: Refused) -> None:
    model = tmp_path / "model.yaml"
    model.write_text(yaml.safe_dump(QWEN3_30B))
    told = refused(main, request(tmp_path, "--model", str(model), "--experts", "7", "96"))
    assert "no --experts size of 7, 96 divides the model's 128 experts" in told
    assert "--experts 7, 8: the model llama3-8b has no experts" in refused(
        main, request(tmp_path, "--experts", "7", "8")
    )
    assert not (tmp_path / "out").exists()


def test_a_model_with_mtp_layers_has_fewer_of_the_others_on_the_last_stage(tmp_path: Path) -> None:
    """And training takes the plan with the model's own flags, by which MTP layers are not
    recomputed."""
    model = tmp_path / "model.yaml"
    more = "mtp-num-layers: 2\nrecompute-method: block\n"
    model.write_text(model_file("llama3-8b").read_text() + more)
    words = ("--no-replicas", "--tensor", "1", "--interleave", "1")
    assert main(request(tmp_path, *words, "--model", str(model))) == 0
    plan = load_plan(tmp_path / "out" / "plan.yaml")
    assert sum(plan.layers[-1]) < 32 / plan.stages


def test_a_model_that_cannot_be_trained_is_refused(tmp_path: Path, refused: Refused) -> None:
    model = tmp_path / "model.yaml"
    # A misspelt flag is not left at its default.
    model.write_text("num-layers: 2\nhidden-size: x\nswiglo: true\nadd-bias-liner: false\n")
    told = refused(main, request(tmp_path, "--model", str(model)), several=True)
    for said in ("--swiglo", "--add-bias-liner", "hidden-size is 'x'", "not say num-attention"):
        assert said in told


def test_a_profile_that_lacks_the_point_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    file = profile_of_one_point(tmp_path, tensor=8)
    told = refused(main, request(tmp_path, "--profile", file))
    assert "the profile of H100-SXM lacks tensor size 1" in told
    assert "of all that may be chosen it has none" in told
    assert told.count("tensor size 2") == 2  # with and without recomputation
    flags = "--tensor", "2", "8", "--recompute", "none"
    assert main(request(tmp_path, "--profile", file, *flags)) == 0
    note = "H100-SXM, not measured: 1 point that the search did without: tensor size 2,"
    assert note in capsys.readouterr().out


def test_missing_measurements_are_listed_by_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = "nodes: [{accelerator: H100-SXM, nodes: 8, gpus_per_node: 2}]"
    flags = "--micro-batch 1 2 4 --recompute none --profile".split()
    assert main(request(tmp_path, *flags, profile_of_one_point(tmp_path), cluster=small)) == 0
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "not measured" in line]
    assert told.endswith(
        "5 points that the search did without: tensor size 1, recompute none, micro-batch 2 4; "
        "tensor size 2, recompute none, micro-batch 1 2 4"
    )


def test_a_run_trains_on_the_sequences_and_in_the_precision_that_were_planned(
    tmp_path: Path, refused: Refused
) -> None:
    words = request(tmp_path, "--seq-length", "4096", "--recompute", "full", "--no-replicas")
    assert main(words) == 0
    flags = tmp_path / "out" / "flags.yaml"
    ranks = load_plan(tmp_path / "out" / "plan.yaml").world_size
    preset = str(model_file("llama3-8b"))
    files = ["--yaml-cfg", preset, "--yaml-cfg", str(flags)]
    read = parse_args([*files, *"--lr 1 --train-iters 1 --mock-data".split()], world_size=ranks)
    assert (read.seq_length, read.bf16) == (4096, True)
    told = refused(main, [*words, "--dtype", "fp32"])
    assert "says bf16, and --dtype is fp32; give --dtype bf16" in told


def test_figures_of_bf16_are_not_taken_for_those_of_fp32(tmp_path: Path, refused: Refused) -> None:
    model = tmp_path / "model.yaml"
    model.write_text(model_file("llama3-8b").read_text().replace("bf16: true", "bf16: false"))
    told = refused(main, request(tmp_path, "--model", str(model), "--dtype", "fp32"))
    assert "the published figures are of bf16" in told
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"format": 1, "model": {"dtype": "bf16"}, "accelerators": {}}))
    words = request(tmp_path, "--model", str(model), "--profile", str(profile), "--dtype", "fp32")
    told = refused(main, words)
    assert "dtype bf16 where the plan's is fp32; plan with --dtype bf16, or measure with" in told


FP8 = ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise")


@pytest.mark.parametrize(
    ("other", "flag", "meshes"),
    [
        ("MI300X", "hybrid", {"nvidia": "hybrid", "amd": "hybrid"}),
        ("MI250X", "hybrid", {"nvidia": "hybrid", "amd": "none"}),
        (None, None, {"amd": "none"}),
    ],
)
def test_training_computes_in_fp8_where_the_plan_says_so(
    other: str | None, flag: str | None, meshes: dict[str, str], tmp_path: Path
) -> None:
    """Of a model whose own file asks for fp8, too."""
    cluster = "nodes:\n  - {accelerator: MI250X, nodes: 2}\n"
    if other is not None:
        cluster = CLUSTER.replace("H100-SXM, nodes: 1", "H100-SXM, nodes: 1, gpus_per_node: 2")
        cluster = cluster.replace("MI300X, nodes: 1", f"{other}, nodes: 1, gpus_per_node: 2")
    model = tmp_path / "model.yaml"
    model.write_text(model_file("llama3-8b").read_text() + "\nfp8: {fp8-format: e4m3}\n")
    words = request(tmp_path, *FP8, "--model", str(model), "--no-replicas", cluster=cluster)
    assert main([*words, "--seq-length", "4096"]) == 0
    plan = load_plan(tmp_path / "out" / "plan.yaml")
    files = ["--yaml-cfg", str(model), "--yaml-cfg", str(tmp_path / "out" / "flags.yaml")]
    more = "--lr 1 --train-iters 1 --mock-data".split()
    configuration = read_command_line([*files, *more], world_size=plan.world_size)
    assert configuration.args.fp8_format == flag
    assert {mesh.vendor: mesh.fp8 for mesh in configuration.plan.meshes} == meshes
    if flag is not None:
        assert configuration.args.fp8_recipe == "tensorwise"
    assert ("fp8: none" in (tmp_path / "out" / "plan.yaml").read_text()) == (other != "MI300X")


def test_a_profile_of_bf16_is_not_taken_for_one_of_fp8(tmp_path: Path, refused: Refused) -> None:
    file = profile_of_one_point(tmp_path)
    own = ("--profile", file, "--tensor", "1", "--recompute", "none")
    told = refused(main, request(tmp_path, *own, *FP8))
    assert "measured without fp8, and layers in fp8 tensorwise are asked for" in told
    older = CLUSTER.replace("H100-SXM", "A100-SXM4-80GB")
    measured = Path(file).read_text().replace("H100-SXM", "A100-SXM4-80GB")
    Path(file).write_text(measured)
    assert main(request(tmp_path, *own, *FP8, "--no-replicas", cluster=older)) == 0


def test_layers_that_stay_in_bf16_need_measurements_of_their_own(
    tmp_path: Path, refused: Refused
) -> None:
    model = tmp_path / "model.yaml"
    ends = "\nends: {fp8-format: hybrid, fp8-recipe: tensorwise, first-last-layers-bf16: true}\n"
    model.write_text(model_file("llama3-8b").read_text() + ends)
    point: dict[str, Any] = {"fp8": "tensorwise"}
    own = ("--profile", profile_of_one_point(tmp_path, **point), "--recompute", "none")
    told = refused(main, request(tmp_path, *own, "--tensor", "1", "--model", str(model)))
    assert "measured in fp8 tensorwise, and layers without fp8 are asked for" in told


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--fp8-format", "hybrid", "--dtype", "fp16"), "needs --dtype bf16"),
        (("--fp8-recipe", "rowwise"), "nothing is asked for without --fp8-format"),
    ],
)
def test_fp8_flags_that_make_no_sense_are_refused(
    flags: tuple[str, ...], said: str, tmp_path: Path, refused: Refused
) -> None:
    model = tmp_path / "model.yaml"
    model.write_text(model_file("llama3-8b").read_text().replace("bf16: true", "bf16: false"))
    assert said in refused(main, request(tmp_path, *flags, "--model", str(model)))


@pytest.mark.parametrize("pipeline", [True, False], ids=["pipeline", "replicas"])
def test_a_layout_in_the_model_s_own_file_gives_way_to_the_plan(
    pipeline: bool, tmp_path: Path
) -> None:
    model = tmp_path / "model.yaml"
    preset = model_file("llama3.2_1b").read_text()
    model.write_text(
        preset + "\nlayout: {tensor_model_parallel_size: 2, pipeline-model-parallel-size: 2,\n"
        "  num-layers-per-virtual-pipeline-stage: 2, decoder-first-pipeline-num-layers: 9,\n"
        "  recompute-granularity: full, recompute-method: block, recompute-num-layers: 1,\n"
        "  use-distributed-optimizer: true, sequence-parallel: true, context-parallel-size: 4,\n"
        "  distribute-saved-activations: true}\n"
    )
    own = ("--model", str(model), "--recompute", "none", "--no-distributed-optimizer")
    words = request(tmp_path, *own)
    if pipeline:
        words.append("--no-replicas")
    assert main(words) == 0
    folder = tmp_path / "out"
    assert (folder / "plan.yaml").exists() == pipeline
    assert ("replicas on " in (folder / "report.html").read_text()) == (not pipeline)
    files = ["--yaml-cfg", str(model), "--yaml-cfg", str(folder / "flags.yaml")]
    more = "--lr 1 --train-iters 1 --mock-data".split()
    configuration = read_command_line([*files, *more], world_size=16)
    args = configuration.args
    assert configuration.plan.chunks == 1
    assert (args.recompute_granularity, args.use_distributed_optimizer) == (None, False)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("optimizer: sgd", "says optimizer sgd, and only Adam's state is shared out over replicas"),
        ("rampup-batch-size: [3, 3, 99]", "must reach --global-batch-size 64 from 3 in steps of 3"),
    ],
)
def test_a_plan_that_the_model_s_own_flags_do_not_go_with_is_not_written(
    flags: str, said: str, tmp_path: Path, refused: Refused
) -> None:
    model = tmp_path / "model.yaml"
    model.write_text(f"{model_file('llama3.2_1b').read_text()}\nmore: {{{flags}}}\n")
    assert said in refused(main, request(tmp_path, "--model", str(model)))
    assert not (tmp_path / "out").exists()
    if "sgd" in flags:
        own = ("--model", str(model), "--no-distributed-optimizer")
        assert main(request(tmp_path, *own)) == 0


CONFIGS = Path(__file__).parents[1] / "megatron" / "huggingface" / "configs"


@pytest.mark.parametrize("in_a_folder", [False, True])
def test_a_config_of_hugging_face_is_planned_as_it_is(in_a_folder: bool, tmp_path: Path) -> None:
    config = CONFIGS / "granite_3.3_8b.json"
    if in_a_folder:
        (tmp_path / "model").mkdir()
        shutil.copy(config, tmp_path / "model" / "config.json")
        config = tmp_path / "model"
    assert main(request(tmp_path, "--no-replicas", "--model", str(config))) == 0
    out = tmp_path / "out"
    batch = "--lr 1e-4 --train-iters 1 --mock-data --micro-batch-size 1".split()
    batch += "--tokenizer-type NullTokenizer --vocab-size 49158".split()
    files = ["--yaml-cfg", str(out / "model.yaml"), "--yaml-cfg", str(out / "flags.yaml")]
    args = parse_args([*files, *batch], world_size=16)
    assert (args.num_layers, args.residual_multiplier, args.softmax_scale) == (40, 0.22, 2**-7)
    # Its rows, padded as Megatron pads them, and no longer samples than a machine holds.
    assert (args.padded_vocab_size, args.seq_length) == (49280, 4096)


def test_a_folder_without_a_config_is_told_so_unless_it_has_a_preset_s_name(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refused(main, request(tmp_path, "--model", str(tmp_path)))
    assert f"the model {tmp_path} is a folder without config.json" in said
    monkeypatch.chdir(tmp_path)
    Path("llama3.2-1b").mkdir()
    assert main(request(tmp_path, "--no-replicas", "--model", "llama3.2-1b")) == 0


def test_what_a_config_has_no_flag_for_is_told_with_the_rest(
    tmp_path: Path, refused: Refused
) -> None:
    config = json.loads((CONFIGS / "mistral_7b_v0.3.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 4096}))
    words = request(tmp_path, "--model", str(tmp_path), cluster="nodes: [{accelerator: X}]\n")
    said = refused(main, words, several=True)
    assert "sliding_window 4096, less than its max_position_embeddings" in said
    assert "X" in said
    assert not (tmp_path / "out").exists()
