"""Flags that nodes may give differently: on one node alone each of them trains to the end.

Two ranks stand for two nodes, with a stage of a mixed pipeline on each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname

import pytest

from hetero.tools.runs import SIMULATED
from megatron.hetero.initialize import _LOCAL_FLAGS
from tests.distributed.conftest import Corpus
from tests.distributed.harness import (
    MIXED,
    TINY_LLAMA,
    RankOutcome,
    launch,
    launch_well,
    read_rows,
)

TWO_NODES = {0: {"LOCAL_WORLD_SIZE": "1"}, 1: {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}}
NOT_TYPED = {"ignored_flags", "typed_flags", "taken_flags", "lacks_transformer_engine"}
PLAN = """
meshes:
- {vendor: amd, layers: [2]}
- {vendor: nvidia, layers: [2]}
"""


@dataclass(frozen=True)
class Exempt:
    """Flags that one node has and the other has not."""

    names: frozenset[str]
    """Of `_LOCAL_FLAGS`."""
    extra: str
    """The words of the node that has them; {folder} and {corpus} are filled in."""
    instead: str = ""
    """The words of the other."""
    files: tuple[str, ...] = ()
    """What the node that has them writes."""
    uses_corpus: bool = True


def _flag(name: str, extra: str, **more: object) -> Exempt:
    return Exempt(frozenset({name}), extra, **more)  # type: ignore[arg-type]


_TOKENIZER = "--tokenizer-type SentencePieceTokenizer --tokenizer-model {tokenizer}"
_DATA = "--split 90,10,0 --data-path {data}"
TABLE = [
    _flag("hetero_report", "--hetero-report {folder}/report.json", files=("report.json",)),
    _flag("hetero_flight_recorder", "--hetero-flight-recorder {folder}/dumps"),
    _flag("hetero_operator_cases", "--hetero-operator-cases {folder}/cases"),
    _flag("hetero_metrics_port", "--hetero-metrics-port 0"),
    _flag("hetero_metrics_address", "--hetero-metrics-address 127.0.0.2"),
    _flag("hetero_stall_warning", "--hetero-stall-warning 30"),
    _flag("metrics_file", "--metrics-file {folder}/m.jsonl", files=("m.jsonl",)),
    _flag("tensorboard_dir", "--tensorboard-dir {folder}/board", files=("board",)),
    _flag("wandb_save_dir", "--wandb-save-dir {folder}/wandb"),
    _flag("num_workers", "--num-workers 1"),
    _flag("hetero_nics", "--hetero-nics lo"),
    _flag("data_cache_path", "--data-cache-path {folder}/cache"),
    _flag("data_path", "--data-path {folder}/copy"),
    _flag("tokenizer_model", "--tokenizer-model {folder}/copy.model"),
    Exempt(frozenset({"data_args_path"}), "--data-args-path {folder}/list", uses_corpus=False),
    Exempt(
        frozenset({"train_data_path", "valid_data_path", "test_data_path"}),
        "--train-data-path {folder}/copy --valid-data-path {folder}/copy "
        "--test-data-path {folder}/copy",
        "--train-data-path {data} --valid-data-path {data} --test-data-path {data}",
        uses_corpus=False,
    ),
    Exempt(
        frozenset({"per_split_data_args_path"}),
        "--per-split-data-args-path {folder}/splits.json",
        "--train-data-path {data} --valid-data-path {data} --test-data-path {data}",
        uses_corpus=False,
    ),
    _flag("transformer_impl", "--transformer-impl local"),
    _flag("attention_backend", "--attention-backend unfused"),
    _flag("bias_swiglu_fusion", "--no-bias-swiglu-fusion"),
    _flag("bias_dropout_fusion", "--no-bias-dropout-fusion"),
    _flag("cross_entropy_loss_fusion", "--cross-entropy-loss-fusion"),
    _flag("apply_rope_fusion", "--no-rope-fusion"),
    _flag("gradient_accumulation_fusion", "--no-gradient-accumulation-fusion"),
]
_ELSEWHERE = {"hetero_plan", "vocab_file", "merge_file"}
"""Tests of their own."""


def test_the_table_has_every_flag_that_may_differ() -> None:
    assert frozenset().union(*(row.names for row in TABLE)) == _LOCAL_FLAGS - NOT_TYPED - _ELSEWHERE


def _fill(folder: Path, corpus: Corpus, words: str) -> list[str]:
    return words.format(folder=folder, data=corpus.prefix, tokenizer=corpus.tokenizer).split()


@pytest.fixture
def copies(corpus: Corpus, tmp_path: Path) -> Path:
    """The corpus and its tokenizer under other names, and files that list it."""
    copy = tmp_path / "copy"
    for suffix in (".bin", ".idx"):
        Path(f"{copy}{suffix}").symlink_to(f"{corpus.prefix}{suffix}")
    Path(f"{copy}.model").symlink_to(corpus.tokenizer)
    (tmp_path / "list").write_text(f"{copy}\n")
    splits = {name: [str(copy)] for name in ("train", "valid", "test")}
    (tmp_path / "splits.json").write_text(json.dumps(splits))
    return tmp_path


@pytest.mark.parametrize("node", [0, 1])
def test_all_flags_of_one_node_alone_train_to_the_end(
    corpus: Corpus, copies: Path, node: int
) -> None:
    """All rows of one kind of data at once: a launch for each would take minutes."""
    rows = [row for row in TABLE if row.uses_corpus]
    common = [*TINY_LLAMA, *MIXED, *_fill(copies, corpus, f"{_TOKENIZER} {_DATA}")]
    extra = [word for row in rows for word in _fill(copies, corpus, row.extra)]
    cache = ["--data-cache-path", str(copies / "other cache")]
    flags = {node: [*common, *extra], 1 - node: [*common, *cache]}
    said = launch_well([], 2, flags_by_rank=flags, by_rank=TWO_NODES, environ=SIMULATED)
    assert "iteration        4/" in said[0]
    for row in rows:
        for name in row.files:
            assert (copies / name).exists()
    assert len(read_rows(copies / "m.jsonl")) == 4
    assert json.loads((copies / "report.json").read_text())["iterations"] == 4


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize(
    "row",
    [row for row in TABLE if not row.uses_corpus],
    ids=lambda row: "+".join(sorted(row.names)),
)
def test_data_listed_otherwise_on_one_node_train_to_the_end(
    corpus: Corpus, copies: Path, row: Exempt, node: int
) -> None:
    common = [*TINY_LLAMA, *MIXED, *_fill(copies, corpus, _TOKENIZER)]
    common += ["--data-cache-path", str(corpus.cache)]
    split = ["--split", "90,10,0"] if "data_args_path" in row.names else []
    flags = {
        node: [*common, *split, *_fill(copies, corpus, row.extra)],
        1 - node: [*common, *_fill(copies, corpus, row.instead or _DATA)],
    }
    said = launch_well([], 2, flags_by_rank=flags, by_rank=TWO_NODES, environ=SIMULATED)
    assert "iteration        4/" in said[0]


def _launch(flags: dict[int, Sequence[str]]) -> list[RankOutcome]:
    return launch([], 2, flags_by_rank=flags, by_rank=TWO_NODES, environ=SIMULATED)


MOCK = [*TINY_LLAMA, "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "64"]


def test_outputs_that_nodes_name_differently_are_all_written(tmp_path: Path) -> None:
    """The same file is written once, by the node before."""
    flags = {
        node: [
            *(*MOCK, *MIXED, "--metrics-file", str(tmp_path / "same.jsonl")),
            *("--hetero-report", str(tmp_path / f"{node}.json")),
        ]
        for node in (0, 1)
    }
    assert [outcome.code for outcome in _launch(flags)] == [0, 0]
    first, second = (json.loads((tmp_path / f"{node}.json").read_text()) for node in (0, 1))
    # By each process's own clock.
    assert first.pop("goodput").keys() == second.pop("goodput").keys()
    assert first == second
    assert [row["iteration"] for row in read_rows(tmp_path / "same.jsonl")] == [1, 2, 3, 4]


def test_an_output_that_the_other_node_cannot_write_ends_both_at_once(tmp_path: Path) -> None:
    flags = {0: [*MOCK, *MIXED], 1: [*MOCK, *MIXED, "--hetero-report", "/proc/report.json"]}
    outcomes = _launch(flags)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    for outcome in outcomes:
        assert "rank 1: --hetero-report /proc/report.json cannot be written" in outcome.stderr


def test_a_plan_file_of_one_node_and_the_same_plan_as_flags_of_the_other(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN)
    of_file = [*MOCK, "--hetero-pipeline", "--hetero-plan", str(plan)]
    for flags in ({0: of_file, 1: [*MOCK, *MIXED]}, {0: [*MOCK, *MIXED], 1: of_file}):
        assert [outcome.code for outcome in _launch(flags)] == [0, 0]


def test_a_plan_file_that_differs_is_told_by_the_mesh(tmp_path: Path) -> None:
    flags = {}
    for node, layers in enumerate(("[2]", "[1]")):
        plan = tmp_path / f"{node}.yaml"
        text = PLAN.replace("layers: [2]", f"layers: {layers}", 1)
        plan.write_text(text.replace("[2]", "[3]") if node else text)
        flags[node] = [*MOCK, "--hetero-pipeline", "--hetero-plan", str(plan)]
    outcomes = _launch(flags)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    assert "has mesh 0 as vendor: amd, stages: 1, layers: [2]" in outcomes[0].stderr
    assert f"rank 1 on {gethostname()} has mesh 0 as" in outcomes[0].stderr


def test_a_tokenizer_of_two_files_may_lie_elsewhere_on_each_node(tmp_path: Path) -> None:
    flags = {}
    for node in (0, 1):
        folder = tmp_path / str(node)
        folder.mkdir()
        words = [*"abcdefgh", "<|endoftext|>"]
        vocabulary = {word: index for index, word in enumerate(words)}
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "merges.txt").write_text("#version: 0.2\n")
        files = ["--vocab-file", folder / "vocab.json", "--merge-file", folder / "merges.txt"]
        flags[node] = [
            *(*TINY_LLAMA, *MIXED, "--mock-data", "--tokenizer-type", "GPT2BPETokenizer"),
            *map(str, files),
        ]
    assert [outcome.code for outcome in _launch(flags)] == [0, 0]


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        ("--lr 1e-3", "--lr 2e-3", "with --lr 0.001 and rank 1 on {host} with --lr 0.002"),
        ("", "--seed 5", "without --seed and rank 1 on {host} with --seed 5"),
        ("--untie-embeddings-and-output-weights", "", "and rank 1 on {host} without --untie"),
        ("--global-batch-size 8", "", "with --global-batch-size 8 and rank 1"),
        ("", "--save {folder}", "without --save and rank 1 on {host} with --save"),
        ("", "--log-params-norm", "without --log-params-norm and rank 1"),
        ("--timing-log-level 1", "", "--timing-log-level 1 and rank 1 on {host} without"),
    ],
)
def test_any_other_flag_of_one_node_ends_both_with_its_name(
    tmp_path: Path, one: str, other: str, says: str
) -> None:
    both = [*MOCK, *MIXED]
    flags = {
        node: [*both, *words.format(folder=tmp_path / "save").split()]
        for node, words in enumerate((one, other))
    }
    outcomes = _launch(flags)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    for outcome in outcomes:
        assert says.format(host=gethostname()) in outcome.stderr
