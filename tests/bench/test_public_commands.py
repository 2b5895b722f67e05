"""A public command that is shrunk stays the command it was, and is accepted, also mixed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bench.public_commands import Command, load_commands, verdicts
from bench.public_training.shrinking import PROCESSES, shrink
from bench.public_training.trained_commands import THREE_FLAGS
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
        assert small.processes <= small.processes_of(2) <= PROCESSES * small.context


def test_sides_of_products_in_fp8_stay_multiples_of_sixteen() -> None:
    latent = "--multi-latent-attention --qk-pos-emb-head-dim 64 --kv-lora-rank 512"
    assert used(latent)["--qk-pos-emb-head-dim"] == "8"
    assert used(f"{latent} --fp8-format hybrid")["--qk-pos-emb-head-dim"] == "16"
