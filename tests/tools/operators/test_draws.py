"""What operators are given: the same bits everywhere, and nothing a mistake could hide behind."""

from __future__ import annotations

import pytest
import torch

from hetero.errors import UserError
from hetero.tools.operators.draws import Draws
from hetero.tools.operators.layer_flags import layer_arguments
from hetero.tools.operators.recording import record
from tests.tools.operators.small_models import GPT, LLAMA, computed, reference

KNOWN = ["0x1.4be0e80000000p-1", "-0x1.1195900000000p-1", "0x1.6bcc000000000p-4"]


def test_a_draw_depends_on_seed_and_name_alone() -> None:
    one, two, other = (Draws(seed=seed, dtype=torch.bfloat16) for seed in (1, 1, 2))
    two.normal("another", (3,))
    drawn = one.normal("x", (4, 5))
    assert torch.equal(drawn, two.normal("x", (4, 5)))
    assert one.digests["x"] == two.digests["x"]
    assert not torch.equal(one.normal("y", (4, 5)), drawn)
    assert not torch.equal(other.normal("x", (4, 5)), drawn)


def test_these_bits_are_drawn_on_every_machine() -> None:
    """Sums and products of float32 alone; a change here makes dumps of two versions differ."""
    draws = Draws(seed=1234, dtype=torch.float32)
    assert [value.hex() for value in draws.normal("x", (3,)).tolist()] == KNOWN
    many = draws.normal("many", (100_000,), std=0.5)
    assert float(many.std()) == pytest.approx(0.5, rel=0.02)
    assert abs(float(many.mean())) < 0.01
    assert float(many.abs().max()) <= 1.5


def test_both_sides_are_given_the_same_bits_and_a_run_repeats() -> None:
    one, two = computed(LLAMA), computed(LLAMA)
    assert one.header.inputs == reference(LLAMA).header.inputs
    for name, sample in one.samples.items():
        assert torch.equal(sample.values, two.samples[name].values), name
    # Gains and biases are not ones and zeros.
    inputs = computed(GPT).header.inputs
    names = [name for name in inputs if name.startswith("weight ") and "decoder" in name]
    assert len({inputs[name] for name in names}) == len(names)


def test_flags_of_a_training_run_are_read_for_the_layers_alone() -> None:
    words = f"{LLAMA} --bf16 --hidden-dropout 0.1 --attention-dropout 0.1 --recompute-activations"
    args = layer_arguments(words.split(), dtype="fp16", layers=3)
    assert (args.params_dtype, args.bf16, args.fp16) == ("float16", False, True)
    assert (args.num_layers, args.hidden_dropout, args.attention_dropout) == (3, 0.0, 0.0)
    assert args.recompute_granularity is None


@pytest.mark.usefixtures("engine")
def test_transformer_engines_joined_modules_are_refused() -> None:
    """Where it is installed; elsewhere the local layers are taken."""
    words = f"{LLAMA} --transformer-impl transformer_engine"
    with pytest.raises(UserError, match="--transformer-impl local"):
        layer_arguments(words.split(), dtype="bf16", layers=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    args = layer_arguments(LLAMA.split(), dtype="bf16", layers=1)
    with pytest.raises(UserError, match="use a PyTorch that sees a GPU"):
        record(args, device="cuda", sample=0)
