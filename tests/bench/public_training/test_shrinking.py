"""A public command that is shrunk stays the command it was, and is accepted, also mixed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.public_commands import Command, load_commands, verdicts
from bench.public_training.chosen import CHOSEN
from bench.public_training.shrinking import PROCESSES, TOKENIZER_FILES, Replacement, shrink
from bench.public_training.trained_commands import THREE_FLAGS
from hetero.errors import UserError
from megatron.hetero.arguments import parse_args

PLACES = {"text": Path("/text"), "run": Path("/run")}


def command(words: str, *, gpus: int = 8) -> Command:
    return replace(load_commands()[0], words=tuple(words.split()), gpus=gpus)


def used(words: str, *, gpus: int = 8) -> dict[str, str]:
    model = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
    return {one.flag: one.used for one in shrink(command(model + words, gpus=gpus)).replaced}


def test_every_command_with_text_is_accepted_when_it_is_small_and_when_it_is_mixed() -> None:
    # A script of several versions is taken once, as its newest.
    newest = {
        (*Path(verdict.command.path).parts[-2:], verdict.command.variant): verdict
        for verdict in verdicts()
        if verdict.refusal is None and "NullTokenizer" not in verdict.command.words
    }
    assert len(newest) > 100
    for verdict in newest.values():
        small = shrink(verdict.command)
        mixed = (*small.flags(**PLACES), *THREE_FLAGS)
        args = parse_args(mixed, world_size=small.processes_of(2))
        assert args.hetero_pipeline_sizes == [1, 1], verdict.command.name
        assert (args.hidden_size, args.seq_length, args.data_parallel_size) == (64, 64, small.data)
        assert small.processes <= small.processes_of(2) <= PROCESSES


@pytest.mark.parametrize("one", CHOSEN, ids=lambda one: one.short)
def test_all_that_is_not_listed_stays_as_it_is_written(one) -> None:
    small = shrink(one.command)
    parse_args(small.flags(**PLACES), world_size=small.processes)
    listed = {replaced.flag for replaced in small.replaced}
    assert _without(small.words, listed) == _without(
        ["--data-path" if word == "--mock-data" else word for word in one.command.words], listed
    )
    assert listed <= {word for word in small.words if word.startswith("--")}


def _without(words, flags) -> list[str]:
    """The words but for these flags and what follows them."""
    kept, keeps = [], True
    for word in words:
        if word.startswith("--"):
            keeps = word not in flags
        if keeps:
            kept.append(word)
    return kept


def test_the_ten_come_from_as_many_sources_as_there_are() -> None:
    sources = [one.command.repository for one in CHOSEN]
    assert len(sources) == len({one.command.words for one in CHOSEN}) == 10
    trains = {
        verdict.command.repository
        for verdict in verdicts()
        if verdict.refusal is None and "--skip-train" not in verdict.command.words
    }
    assert set(sources) == trains


def test_sizes_keep_their_proportions() -> None:
    small = used("--ffn-hidden-size 14336 --num-query-groups 8 --seq-length 4096")
    assert small["--ffn-hidden-size"] == "224"
    assert small["--num-query-groups"] == "2"
    assert used("--num-query-groups 32")["--num-query-groups"] == "4"


def test_a_schedule_shrinks_with_the_iterations_and_the_batch() -> None:
    small = used(
        "--micro-batch-size 4 --global-batch-size 256 --train-samples 256000 "
        "--lr-decay-samples 128000 --lr-warmup-samples 51200"
    )
    # Eight replicas of eight micro batches become two of four, with half the samples.
    assert small["--global-batch-size"] == "16"
    assert small["--train-samples"] == "160"
    assert (small["--lr-decay-samples"], small["--lr-warmup-samples"]) == ("80", "32")
    assert used("--train-iters 500 --lr-warmup-iters 100")["--lr-warmup-iters"] == "2"


def test_a_growing_loss_scale_gets_the_steps_that_it_skips() -> None:
    assert used("--fp16 --train-iters 5")["--train-iters"] == "30"
    assert "--train-iters" not in used("--fp16 --loss-scale 8192 --train-iters 5")


def test_weights_of_data_stay_and_made_up_data_become_text() -> None:
    small = shrink(command("--hidden-size 64 --num-attention-heads 4 --data-path 0.3 a 0.7 b"))
    tokens = "TEXT/gpt2/tokens_text_document"
    assert small.replaced[-1] == Replacement(
        "--data-path", "0.3 a 0.7 b", f"0.3 {tokens} 0.7 {tokens}"
    )
    assert used("--mock-data")["--data-path"] == tokens
    assert used("--train-data-path 1.0")["--train-data-path"] == f"1.0 {tokens}"


def test_a_command_that_names_no_tokenizer_of_text_is_refused_with_those_that_do() -> None:
    with pytest.raises(UserError, match=" or ".join(TOKENIZER_FILES)):
        shrink(command("--tokenizer-type NullTokenizer --hidden-size 64 --num-attention-heads 4"))
