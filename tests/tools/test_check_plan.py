"""hetero check-plan: what it draws, and what it refuses before any job starts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import yaml

from hetero.plan import Mesh, Plan
from hetero.plan.show import draw_stage, nodes_of, notes
from hetero.presets import model_file
from hetero.tools import check_plan
from tests.hetero.planner.expert_models import DEEPSEEK_LIKE, LATENT

UNEQUAL = """
meshes:
- {vendor: nvidia, layers: [6, 6], data: 4, micro_batch_size: 1, recompute: full}
- {vendor: amd, layers: [20], tensor: 4, data: 2}
"""


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(UNEQUAL)
    return path


def drawn(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert check_plan.main([str(word) for word in words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> list[str]:
    try:
        code: object = check_plan.main([str(word) for word in words])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    lines = printed.err.removeprefix("error: ").splitlines()
    return [line.strip() for line in lines[1:]] if lines[0].endswith(" errors:") else lines


def test_the_picture_shows_every_rank_with_its_node_stage_layers_and_coordinates(
    capsys: pytest.CaptureFixture[str], plan_file: Path
) -> None:
    words = (plan_file, "--world-size", 16, "--gpus-per-node", "amd=4", "nvidia=6")
    expected = f"""\
        {plan_file}: 32 layers in 3 stages on 16 ranks of 4 nodes; 4 sequences in a step of the pipeline
        mesh 0  nvidia  2 stages  TP 1  DP 4  micro-batch 1, recompute full
        mesh 1  amd     1 stage   TP 4  DP 2  micro-batch 2

        stage 0  nvidia  layers 0-5, embedding
                  TP 0
            DP 0     0   node 0
            DP 1     1   node 0
            DP 2     2   node 0
            DP 3     3   node 0
            |
            v
        stage 1  nvidia  layers 6-11
                  TP 0
            DP 0     4   node 0
            DP 1     5   node 0
            DP 2     6   node 1
            DP 3     7   node 1
            |
            |  boundary
            v
        stage 2  amd  layers 12-31, output
                  TP 0  TP 1  TP 2  TP 3
            DP 0     8     9    10    11   node 2
            DP 1    12    13    14    15   node 3

        note: node 1 (nvidia) uses 2 of its 6 GPUs
        """  # noqa: E501
    assert drawn(capsys, *words) == dedent(expected)


def test_model_adds_parameters_memory_and_boundary_bytes(
    capsys: pytest.CaptureFixture[str], plan_file: Path
) -> None:
    words = (plan_file, "--model", "llama3.1-8b", "--global-batch-size", 64)
    text = drawn(capsys, *words, "--gpu-memory", "nvidia=80", "amd=192")
    assert "16 steps in a global batch" in text
    assert text.count("a rank: ") == 3
    assert "a rank: 1.834e9 parameters, estimated " in text
    assert "(3 micro-batches in flight)" in text
    assert "(1 micro-batch in flight)" in text
    # 4 sequences of 8192 tokens of 4096 numbers of two bytes, whatever the sizes on either side.
    assert "boundary: 256.0 MiB a step in 16 slabs, from 4 ranks to 8, then gathered" in text


def test_a_longer_sequence_than_the_model_file_s_counts_in_sizes_and_constraints(
    capsys: pytest.CaptureFixture[str], plan_file: Path, tmp_path: Path
) -> None:
    model = ("--model", "llama3.1-8b")
    text = drawn(capsys, plan_file, *model, "--seq-length", 32768)
    assert "boundary: 1.00 GiB a step" in text  # four times that of the file's 8192 tokens
    (line,) = refused(capsys, plan_file, *model, "--seq-length", 262144)
    assert line.endswith("max-position-embeddings 131072 is below a seq-length of 262144")
    path = tmp_path / "context.yaml"
    path.write_text("meshes: [{vendor: amd, layers: [32], context: 4}]")
    (line,) = refused(capsys, path, *model, "--seq-length", 8196)
    assert line.startswith("--seq-length 8196 must be a multiple of 8")


def test_memory_has_weights_in_fp8_of_the_meshes_that_compute_so(
    capsys: pytest.CaptureFixture[str], plan_file: Path, tmp_path: Path
) -> None:
    """1.834e9 parameters a rank of the first stage, of which the embedding's stay in bf16."""
    model = tmp_path / "model.yaml"
    model.write_text(model_file("llama3.1-8b").read_text() + "\nfp8: {fp8-format: hybrid}\n")
    plan_file.write_text(UNEQUAL.replace("tensor: 4", "tensor: 4, fp8: none"))
    words = (plan_file, "--model", model, "--global-batch-size", 64)
    text = drawn(capsys, *words)
    in_bf16 = drawn(capsys, plan_file, "--model", "llama3.1-8b", "--global-batch-size", 64)
    assert text.count("fp8 hybrid") == 1
    states = [_states(one) for one in (text, in_bf16)]
    layers = 6 * 218_103_808 * 2 / 2**30
    assert states[0][0] - states[1][0] == pytest.approx(layers, abs=0.11)
    assert states[0][2] == states[1][2]


def _states(text: str) -> list[float]:
    """GiB of weights, gradients and optimizer state of each stage's ranks."""
    return [float(found) for found in re.findall(r"states ([\d.]+) GiB", text)]


def test_chunks_of_an_interleaved_stage_are_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("meshes: [{vendor: amd, layers: [3]}, {vendor: cpu, layers: [[1, 1]]}]")
    text = drawn(capsys, path, "--num-virtual-stages-per-pipeline-rank", 2)
    assert "stage 0  amd  layers 0-1, 3, embedding" in text
    assert "stage 1  cpu  layers 2, 4, output" in text


def test_all_that_is_wrong_is_said_at_once_each_with_what_would_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "meshes:\n"
        "- {vendor: nvidia, layers: [6, 6], data: 4, micro_batch_size: 1, tensor: 3}\n"
        "- {vendor: amd, layers: [19], tensor: 4, data: 3}\n"
    )
    said = refused(capsys, path, "--world-size", 12, "--model", "llama3.1-8b")
    for line, words in zip(
        said,
        (
            "the plan needs 36 ranks (nvidia 2 stages x TP 3 x DP 4 + amd 1 stage x TP 4 x "
            "DP 3) but 12 were started; change the number of processes or the plan: with "
            "data-parallel sizes 1 1 it needs 10",
            "mesh 1 (amd) has 3 data-parallel ranks and cannot take the 4 sequences of a step",
            "the stages hold [6, 6, 19] layers, 31 in all, but --num-layers is 32; make them add "
            "up: the nearest that do are [6, 6, 20]",
            "--num-attention-heads 32 must be a multiple of the tensor-parallel size of mesh 0 "
            "(nvidia), 3; the nearest sizes that work are 2 and 4",
            "--num-query-groups 8 must be",
            "--ffn-hidden-size 14336 must be",
        ),
        strict=True,
    ):
        assert line.startswith(words)


def test_plan_and_model_errors_are_reported_together(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan, model = tmp_path / "plan.yaml", tmp_path / "model.yaml"
    plan.write_text(
        "meshes:\n"
        "- {vendor: nvidia, layers: [-1], tensor: 3, data: 2, colour: red}\n"
        "- {vendor: amd, layers: [2], data: 5}\n"
    )
    model.write_text(
        "{num-layers: 4, hidden-size: 64, num-attention-heads: 4, seq-length: 8, vocab-size: 9}"
    )
    said = refused(capsys, plan, "--world-size", 4, "--model", model)
    for line, words in zip(
        said,
        (
            f"the plan {plan}: mesh 0: unknown key 'colour'",
            f"the plan {plan}: mesh 0: a stage has layers -1; a stage or chunk has 0",
            "the plan needs 11 ranks",
            "mesh 0 (nvidia) has 2 data-parallel ranks",
            "--num-attention-heads 4 must be a multiple",
            "--num-query-groups 4 must",
            "--ffn-hidden-size 256 must",
        ),
        strict=True,
    ):
        assert line.startswith(words)
    model.write_text("{num-layers: 4, global-batch-size: 7.5}")
    no_size, no_rows, batch, *of_the_plan = refused(capsys, plan, "--model", model)
    assert "does not say hidden-size, num-attention-heads, seq-length" in no_size
    assert "padded-vocab-size" in no_rows
    assert batch == "global-batch-size is 7.5; it must be a whole number of at least 1"
    assert len(of_the_plan) == 3


@pytest.mark.parametrize(
    ("flag", "value", "choices"),
    [
        ("recompute-granularity", "ful", "selective, full"),
        ("attention-backend", "flsh", "flash, fused, unfused, local, auto"),
        ("fp8-format", "hybird", "e4m3, hybrid"),
    ],
)
def test_an_option_that_the_model_s_file_misspells_is_told_with_all_else(
    capsys: pytest.CaptureFixture[str],
    plan_file: Path,
    tmp_path: Path,
    flag: str,
    value: str,
    choices: str,
) -> None:
    model = tmp_path / "model.yaml"
    model.write_text(f"{model_file('llama3.1-8b').read_text()}\nmore: {{{flag}: {value}}}\n")
    option, ranks = refused(capsys, plan_file, "--model", model, "--world-size", 12)
    assert option == f"{flag} is {value!r}; it must be one of {choices}"
    assert ranks.startswith("the plan needs 16 ranks")


@pytest.mark.parametrize(
    "mesh", ["{vender: amd, layers: [32]}", "{vendor: amd, layer: [32]}"], ids=["vendor", "layers"]
)
def test_a_key_that_is_misspelt_is_not_told_as_missing_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, mesh: str
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(f"meshes: [{mesh}]")
    (told,) = refused(capsys, path, "--model", "llama3.1-8b")
    assert "unknown key" in told


def test_an_expert_size_of_a_dense_model_is_told_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("meshes: [{vendor: amd, layers: [32], data: 4, experts: 3}]")
    (told,) = refused(capsys, path, "--model", "llama3.1-8b")
    assert told == "mesh 0 (amd): expert-parallel size 3, and the model has no experts"


def test_sequences_that_context_parallel_ranks_cannot_share_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "meshes:\n"
        "- {vendor: nvidia, layers: [16], context: 3}\n"
        "- {vendor: amd, layers: [16], tensor: 2, context: 2}\n"
    )
    (said,) = refused(capsys, path, "--model", "llama3.1-8b")
    assert said == (
        "--seq-length 8192 must be a multiple of 6: the context-parallel size of mesh 0 (nvidia), "
        "3 makes 6 chunks of each sequence; the nearest that are: 8190 and 8196"
    )
    path.write_text(path.read_text().replace("context: 3", "context: 4"))
    assert "TP 1  CP 4  DP 1" in drawn(capsys, path, "--model", "llama3.1-8b")


def test_experts_that_the_ranks_of_a_mesh_cannot_share_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan, model = tmp_path / "plan.yaml", tmp_path / "model.yaml"
    plan.write_text(
        "meshes:\n"
        "- {vendor: nvidia, layers: [14], data: 3, experts: 3}\n"
        "- {vendor: amd, layers: [13], tensor: 3, data: 1}\n"
    )
    model.write_text(yaml.safe_dump(DEEPSEEK_LIKE))
    told = "\n".join(refused(capsys, plan, "--model", str(model)))
    assert "mesh 0 (nvidia): --num-experts 64 must be a multiple of the 3 ranks" in told
    assert "mesh 1 (amd): --moe-ffn-hidden-size 1408 must be a multiple of the 3 ranks" in told
    assert "mesh 1 (amd): a mixture of experts with tensor-parallel size 3 needs sequence_" in told
    model.write_text(model_file("llama3-8b").read_text())
    told = "\n".join(refused(capsys, plan, "--model", str(model)))
    assert told.count("expert-parallel size 3, and the model has no experts") == 1
    assert "mesh 0 (nvidia): expert-parallel" in told


def test_experts_that_do_not_divide_a_stage_are_told_with_all_else(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan, model = tmp_path / "plan.yaml", tmp_path / "model.yaml"
    plan.write_text("meshes: [{vendor: amd, layers: [26], data: 3, experts: 2}]")
    model.write_text(yaml.safe_dump(DEEPSEEK_LIKE))
    ranks, experts, layers = refused(capsys, plan, "--world-size", 4, "--model", model)
    assert ranks.startswith("the plan needs 3 ranks")
    assert experts.startswith("mesh 0 (amd): expert-parallel size 2 times 1 rank that share each")
    assert "--num-layers is 27" in layers


def test_ranks_that_share_an_expert_are_the_models_where_a_mesh_names_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan, model = tmp_path / "plan.yaml", tmp_path / "model.yaml"
    plan.write_text(
        "meshes:\n"
        "- {vendor: nvidia, layers: [14], tensor: 2, experts: 2, sequence_parallel: true}\n"
        "- {vendor: amd, layers: [13], data: 2, experts: 2}\n"
    )
    model.write_text(yaml.safe_dump(DEEPSEEK_LIKE))
    (told,) = refused(capsys, plan, "--model", model)
    assert "expert-parallel size 2 times 2 ranks that share each expert must divide the 2" in told
    model.write_text(yaml.safe_dump({**DEEPSEEK_LIKE, "expert-tensor-parallel-size": 1}))
    assert "TP 2  DP 1  EP 2" in drawn(capsys, plan, "--model", model)
    model.write_text(yaml.safe_dump({**DEEPSEEK_LIKE, "expert-tensor-parallel-size": "one"}))
    assert "expert-tensor-parallel-size is 'one'" in refused(capsys, plan, "--model", model)[0]


def test_a_model_s_file_says_how_stages_are_interleaved(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan, model = tmp_path / "plan.yaml", tmp_path / "model.yaml"
    plan.write_text("meshes: [{vendor: amd, layers: [14, 13]}]")
    model.write_text(yaml.safe_dump({**DEEPSEEK_LIKE, "num-virtual-stages-per-pipeline-rank": 2}))
    assert "stage 0  amd  layers 0-6, 14-20" in drawn(capsys, plan, "--model", model)
    one = ("--num-virtual-stages-per-pipeline-rank", "1")
    assert "stage 0  amd  layers 0-13" in drawn(capsys, plan, "--model", model, *one)


def test_sizes_of_the_model_file_that_contradict_the_plan_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan, model = tmp_path / "plan.yaml", tmp_path / "model.yaml"
    plan.write_text("meshes: [{vendor: nvidia, layers: [14]}, {vendor: amd, layers: [13]}]")
    sizes = dict.fromkeys(("tensor-model", "context", "expert-model"), 2)
    flags = {f"{name}-parallel-size": size for name, size in sizes.items()}
    model.write_text(yaml.safe_dump({**DEEPSEEK_LIKE, **flags}))
    said = refused(capsys, plan, "--model", model)
    assert [line.partition(" contradicts the plan, which says 1 1")[0] for line in said] == [
        f"{flag} 2 of the model" for flag in flags
    ]


def test_latent_attention_over_tensor_parallel_ranks_asks_for_sequence_parallelism(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan, model = tmp_path / "plan.yaml", tmp_path / "model.yaml"
    plan.write_text("meshes:\n- {vendor: nvidia, layers: [27], tensor: 2}\n")
    model.write_text(yaml.safe_dump({**DEEPSEEK_LIKE, **LATENT, "num-experts": None}))
    told = "\n".join(refused(capsys, plan, "--model", str(model)))
    assert "latent attention with tensor-parallel size 2 needs sequence_parallel: true" in told


def test_a_mistyped_size_is_refused_rather_than_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("meshes: [{vendor: amd, layers: [1], data: 1000000000000}]")
    for words in ((), ("--world-size", 10**12)):
        (line,) = refused(capsys, path, *words)
        assert line == "the plan has 1000000000000 ranks; at most 1048576 can be drawn"
    (line,) = refused(capsys, path, "--num-virtual-stages-per-pipeline-rank", 10**12)
    assert line.endswith("is more than any stage has layers; give at most 1024")
    path.write_text(f"meshes: [{{vendor: amd, layers: [{10**30}]}}]")
    memory = ("--model", "llama3.1-8b", "--gpu-memory", "amd=1")
    (line,) = refused(capsys, path, *memory)
    assert line.endswith("but --num-layers is 32; make them add up: the nearest that do are [32]")
    assert f"layers 0-{10**30 - 1}, embedding, output" in drawn(capsys, path)


def test_memory_that_cannot_fit_is_refused_with_what_would_make_it_fit(
    capsys: pytest.CaptureFixture[str], plan_file: Path
) -> None:
    words = (plan_file, "--model", "llama3.1-8b", "--gpu-memory")
    nvidia, amd = refused(capsys, *words, "nvidia=20", "amd=30")
    assert nvidia.startswith("mesh 0 (nvidia) needs an estimated ")
    assert "on stage 0, 1 and a GPU has 20.00 GiB; with distributed_optimizer: true it is" in nvidia
    assert "mesh 1 (amd)" in amd
    assert "; with recompute: full it is " in amd
    (fewer,) = refused(capsys, *words, "amd=18")
    assert "recompute: full, at most 17 layers on a stage it is 17." in fewer
    batch, hopeless = refused(capsys, *words, "amd=2", "--global-batch-size", "63")
    assert batch.startswith("a global batch of 63 must be a multiple of the 4 sequences")
    assert hopeless.endswith(
        "give the mesh smaller micro-batches or more tensor- or context-parallel ranks"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--world-size", "x"), "--world-size: must be a whole number of at least 1, not 'x'"),
        (("--gpus-per-node", "intel=8"), "must be VENDOR=N, with one of nvidia, amd, cpu"),
        (("--gpus-per-node", "nvidia"), "must be VENDOR=N, with one of nvidia, amd, cpu"),
        (("--gpus-per-node", "amd=8", "amd=4"), "--gpus-per-node names amd 2 times"),
        (("--gpu-memory", "nvidia=80"), "--gpu-memory needs --model"),
        (("--seq-length", "4096"), "--seq-length needs --model"),
        (("--model", "gpt5"), "gpt5 is neither a file nor a preset"),
        (("--global-batch-size", "30"), "must be a multiple of the 4 sequences of a step"),
        (("--micro-batch",), "unrecognized arguments: --micro-batch"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], plan_file: Path, words: tuple[str, ...], says: str
) -> None:
    (line,) = refused(capsys, plan_file, *words)
    assert says in line


def test_it_waits_for_neither_torch_nor_numpy(plan_file: Path) -> None:
    code = (
        "import sys; from hetero.tools.check_plan import main; "
        f"code = main([{str(plan_file)!r}, '--model', 'llama3.1-8b']); "
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Nodes.

WIDE = Plan((Mesh("amd", 1, data=2), Mesh("amd", 1, tensor=4, data=20)), layers=((1,), (1,)))


def test_meshes_of_one_vendor_share_a_node_and_those_of_two_do_not() -> None:
    meshes = (Mesh("amd", 1, data=3), Mesh("amd", 1, data=2), Mesh("nvidia", 1, data=2))
    nodes = nodes_of(Plan(meshes, layers=((1,),) * 3), {"amd": 4, "nvidia": 8})
    assert [(n.vendor, n.ranks, n.gpus) for n in nodes] == [
        ("amd", range(4), 4),
        ("amd", range(4, 5), 4),
        ("nvidia", range(5, 7), 8),
    ]


def test_tensor_parallel_groups_over_nodes_are_noted() -> None:
    nodes = nodes_of(WIDE, {"amd": 8})
    (over, part) = notes(WIDE, nodes)
    assert "mesh 1 (amd): 10 of its 20 tensor-parallel groups lie on more than one node" in over
    assert "the first on nodes 0-1" in over
    assert part == "node 10 (amd) uses 2 of its 8 GPUs"


def test_of_many_replicas_the_first_and_the_last_are_drawn() -> None:
    lines = list(draw_stage(WIDE, 1, nodes_of(WIDE, {"amd": 8})))
    assert [line.split()[:2] for line in lines[2:]] == [
        ["DP", "0"],
        ["DP", "1"],
        ["DP", "2"],
        ["..."],
        ["DP", "19"],
    ]
    assert lines[-1].endswith("78    79    80    81   nodes 9-10")
