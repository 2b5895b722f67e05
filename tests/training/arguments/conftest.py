"""A launch that is accepted as it is, to which every test adds the flags it is about."""

import shlex
from argparse import Namespace
from collections.abc import Callable

import pytest

from hetero.errors import UserError
from megatron.training.arguments import parse_args

SMALLEST = {
    "--num-layers": "8",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--max-position-embeddings": "32",
    "--micro-batch-size": "2",
    "--train-iters": "10",
    "--lr": "1e-3",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "100",
    "--mock-data": "",
}

Parse = Callable[..., Namespace]
Refusal = Callable[..., str]


def command_line(flags: str, without: str) -> list[str]:
    dropped = without.split()
    kept = [f"{flag} {value}" for flag, value in SMALLEST.items() if flag not in dropped]
    return shlex.split(" ".join([*kept, flags]))


@pytest.fixture
def parse() -> Parse:
    """The arguments of the smallest launch, `without` some of its flags, plus `flags`."""

    def parse_flags(flags: str = "", *, without: str = "", world_size: int = 1) -> Namespace:
        return parse_args(command_line(flags, without), world_size=world_size)

    return parse_flags


@pytest.fixture
def refusal() -> Refusal:
    """The sentences with which such a launch is refused, a line each."""

    def refuse(flags: str = "", *, without: str = "", world_size: int = 1) -> str:
        with pytest.raises(UserError) as error:
            parse_args(command_line(flags, without), world_size=world_size)
        assert error.value.exit_code == 2
        sentences = getattr(error.value, "sentences", (str(error.value),))
        assert not any("\n" in sentence for sentence in sentences)
        return "\n".join(sentences)

    return refuse
