"""Bad input ends every rank within seconds, with one sentence from one rank, and no file."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from socket import gethostname

import pytest

from hetero.tools import train_tokenizer
from hetero.tools.runs import SIMULATED
from tests.distributed.harness import (
    ENTRY,
    MIXED,
    TINY_LLAMA,
    RankOutcome,
    changed_entry,
    launch,
)


def assert_refused(outcomes: Sequence[RankOutcome], *words: str, code: int = 2) -> str:
    """Every rank ended with the code; one sentence in all, with the words in it."""
    assert [outcome.code for outcome in outcomes] == [code] * len(outcomes), outcomes
    spoken = "".join(outcome.stderr for outcome in outcomes)
    assert "Traceback" not in spoken, spoken
    sentences = [line for line in spoken.splitlines() if line.startswith("error:")]
    assert len(sentences) == 1, spoken
    for word in words:
        assert word in sentences[0]
    return sentences[0]


def refused(flags: Sequence[str], nproc: int = 2, **how: object) -> list[RankOutcome]:
    return launch([*TINY_LLAMA, *flags], nproc, **{"seconds": 60, **how})


def copy_of(corpus, folder: Path) -> Path:
    """A copy of the dataset that a test may damage; its prefix."""
    for suffix in (".bin", ".idx"):
        shutil.copy(str(corpus.prefix) + suffix, folder / f"data{suffix}")
    return folder / "data"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_command_line_that_is_wrong_on_one_rank_alone_ends_all(corpus, rank: int) -> None:
    flags = [*TINY_LLAMA, *corpus.flags]
    wrong = [*flags, "--num-layer", "4", "--lr", "fast"]
    outcomes = launch(flags, 2, seconds=120, flags_by_rank={rank: wrong})
    assert_refused(outcomes, "2 errors" if rank == 0 else "rank 1: 2 errors")
    spoken = "".join(outcome.stderr for outcome in outcomes)
    assert spoken.count("did you mean --num-layers?") == spoken.count("not 'fast'") == 1


def test_every_node_hears_what_is_wrong(corpus) -> None:
    """Two nodes of one rank each: their consoles are two."""
    outcomes = refused([*corpus.flags, "--num-layer", "4"], by_rank={1: {"LOCAL_RANK": "0"}})
    for outcome in outcomes:
        assert_refused([outcome], "--num-layer", "--num-layers")


def test_a_truncated_dataset(corpus, tmp_path: Path) -> None:
    prefix = copy_of(corpus, tmp_path)
    damaged = prefix.with_suffix(".bin")
    damaged.write_bytes(damaged.read_bytes()[:-9])
    outcomes = refused([*corpus.flags, "--data-path", str(prefix), *MIXED], environ=SIMULATED)
    assert_refused(outcomes, damaged.name, "cut short")


def test_a_sequence_longer_than_the_data_which_leaves_no_file_and_no_folder(
    corpus, tmp_path: Path
) -> None:
    length = "10000000"
    flags = [*corpus.flags, "--seq-length", length, "--max-position-embeddings", length]
    kept = tmp_path / "kept"
    kept.mkdir()
    flags += ["--save", str(tmp_path / "a" / "b"), "--save-interval", "1"]
    flags += ["--tensorboard-dir", str(tmp_path / "board"), "--metrics-file", str(kept / "metrics")]
    flags += ["--hetero-report", str(kept / "report")]
    assert_refused(refused(flags), "--seq-length 10000000", "longer than the data")
    assert [*tmp_path.rglob("*")] == [kept]


def test_a_tokenizer_and_data_that_are_missing_are_told_together(tmp_path: Path) -> None:
    flags = ["--tokenizer-type", "SentencePieceTokenizer", "--split", "90,10,0"]
    flags += ["--tokenizer-model", str(tmp_path / "no.model"), "--data-path", str(tmp_path / "no")]
    (outcome,) = launch([*TINY_LLAMA, *flags], 1, seconds=60)
    assert_refused([outcome], "2 errors")
    for said in ("no.model cannot be read", "no.idx does not exist"):
        assert outcome.stderr.count(said) == 1


@pytest.mark.parametrize("tensor", ["1", "2"])
def test_data_of_another_tokenizer(corpus, tensor: str) -> None:
    """With the vocabulary split over ranks megatron-core would train on it in silence."""
    outcomes = refused(
        [
            *corpus.flags,
            *("--tokenizer-type", "NullTokenizer", "--vocab-size", "100"),
            *("--tensor-model-parallel-size", tensor),
        ]
    )
    assert_refused(outcomes, "holds token", "the model knows")


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of as many tokens, of other text."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "text.txt").write_text("\n\n".join(topics[name] for name in sorted(topics)[40:]))
    words = ["--input", f"{folder}/text.txt", "--output-prefix", f"{folder}/tok"]
    assert train_tokenizer.main([*words, "--vocab-size", "500"]) == 0
    return f"{folder}/tok.model"


def test_data_of_another_tokenizer_of_the_same_size(
    corpus, other_tokenizer: str, tmp_path: Path
) -> None:
    """Every token id is in the vocabulary, so only what lies beside the data tells."""
    blend = [str(copy_of(corpus, tmp_path)), str(corpus.prefix)]
    shutil.copy(f"{corpus.prefix}.json", f"{blend[0]}.json")
    flags = [*corpus.flags, "--tokenizer-model", other_tokenizer, *MIXED]
    outcomes = refused([*flags, "--data-path", *blend], environ=SIMULATED)
    made = f"was made with SentencePieceTokenizer {corpus.tokenizer} of 500 tokens: other tokens"
    assert_refused(outcomes, *(f"{prefix} {made}" for prefix in blend), "preprocess the text")


def test_nodes_with_different_tokenizers_of_one_size(
    corpus, other_tokenizer: str, tmp_path: Path
) -> None:
    prefix = copy_of(corpus, tmp_path)  # without the description that names its tokenizer
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, "--data-path", str(prefix)]
    other = {1: [*flags, "--tokenizer-model", other_tokenizer]}
    outcomes = launch(flags, 2, environ=SIMULATED, flags_by_rank=other)
    says = f"rank 1 on {gethostname()} reads another tokenizer"
    assert_refused(outcomes, says, "give every node the same tokenizer")


TWO_NODES = {1: {"LOCAL_RANK": "0"}}


def test_nodes_with_different_data_under_one_name(corpus, tmp_path: Path) -> None:
    """The first stage would take its tokens from one and the last its labels from the other."""
    prefix = copy_of(corpus, tmp_path)
    data = prefix.with_suffix(".bin")
    tokens = data.read_bytes()
    data.write_bytes(tokens[4:6] + tokens[2:])
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED]
    other = {1: [*flags, "--data-path", str(prefix)]}
    host = gethostname()
    says = f"rank 1 on {host} reads other data than rank 0 on {host}"
    for outcome in launch(flags, 2, environ=SIMULATED, by_rank=TWO_NODES, flags_by_rank=other):
        assert_refused([outcome], says, "same files")


def test_a_damaged_index_cache(corpus, tmp_path: Path) -> None:
    flags = [*TINY_LLAMA, *corpus.flags, "--data-cache-path", str(tmp_path), "--skip-train"]
    assert launch(flags, 1)[0].code == 0
    for cached in tmp_path.rglob("*.npy"):
        cached.write_bytes(b"")
    assert_refused(launch(flags, 2), "delete the index cache")


def test_an_index_cache_that_cannot_be_written(corpus, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    flags = [*corpus.flags, "--data-cache-path", str(tmp_path / "file" / "cache")]
    assert_refused(refused(flags, 1), "cannot be stored", "Not a directory", "--data-cache-path")


def test_an_index_cache_for_which_the_disk_has_no_room(corpus, tmp_path: Path) -> None:
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    flags = [*corpus.flags, "--data-cache-path", str(tmp_path / "cache")]
    outcomes = refused(flags, 1, scripts={0: changed_entry(tmp_path, full)})
    assert_refused(outcomes, "cannot be stored", " written)", "has room")


def test_data_that_only_one_rank_cannot_see(corpus, tmp_path: Path) -> None:
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED]
    elsewhere = [*flags, "--data-path", str(tmp_path / "gone")]
    outcomes = launch(flags, 2, seconds=120, environ=SIMULATED, flags_by_rank={1: elsewhere})
    assert_refused(outcomes, "rank 1", "gone.idx")


def test_two_sides_with_different_versions(corpus, tmp_path: Path) -> None:
    other_side = changed_entry(tmp_path, "import torch; torch.__version__ = '2.12.1+rocm7'")
    outcomes = refused([*corpus.flags, *MIXED], environ=SIMULATED, scripts={1: other_side})
    assert_refused(outcomes, "rank 1", "PyTorch", "2.12.1")


def test_two_sides_with_different_flags(corpus) -> None:
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED]
    other = {1: [*flags, "--seed", "7"]}
    outcomes = launch(flags, 2, seconds=120, environ=SIMULATED, flags_by_rank=other)
    assert_refused(outcomes, "without --seed", "--seed 7")


def test_a_metrics_file_that_cannot_be_written(corpus, tmp_path: Path) -> None:
    outcomes = refused([*corpus.flags, "--metrics-file", str(tmp_path)], nproc=1)
    assert_refused(outcomes, "--metrics-file")


def test_a_rank_that_fails_before_training_ends_the_others(corpus, tmp_path: Path) -> None:
    broken = changed_entry(
        tmp_path,
        "import megatron.hetero.data as data_agreement\n"
        "data_agreement.build_tokenizer = lambda args: 1 / 0",
    )
    outcomes = refused([*corpus.flags, *MIXED], environ=SIMULATED, scripts={1: broken})
    assert [outcome.code for outcome in outcomes] == [1, 1]
    named = f"rank 1 on {gethostname()} (stage 1) failed while the ranks compared their data files"
    assert f"{named}: ZeroDivisionError: division by zero" in outcomes[0].stderr
    assert "ZeroDivisionError" in outcomes[1].stderr


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named(corpus) -> None:
    absent = ENTRY.parent / "tests" / "distributed" / "harness.py"  # starts, and ends at once
    outcomes = refused(
        [*corpus.flags, *MIXED, "--distributed-timeout-minutes", "1"],
        environ=SIMULATED,
        scripts={1: absent},
        seconds=100,
    )
    assert outcomes[0].code == 2
    assert "rank 1 did not come within 60 s" in outcomes[0].stderr


def test_a_rendezvous_port_in_use(corpus) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        outcomes = refused([*corpus.flags], nproc=1, environ={}, by_rank={0: {"MASTER_PORT": port}})
    assert_refused(outcomes, port, "choose another")


def test_a_transport_that_these_ranks_cannot_use(corpus) -> None:
    flags = [*corpus.flags, *MIXED, "--hetero-transport", "ipc"]
    on_cpus = {**SIMULATED, "CUDA_VISIBLE_DEVICES": "-1"}
    assert_refused(refused(flags, environ=on_cpus), "ipc", "GPUs")


def test_a_loss_that_is_not_a_number_ends_the_run_with_1(corpus) -> None:
    rates = "--lr 1e30 --min-lr 1e29 --lr-warmup-iters 0 --clip-grad 0".split()
    outcomes = refused([*corpus.flags, *MIXED, *rates], environ=SIMULATED)
    assert_refused(outcomes, "iteration", "nan", "--lr", code=1)
