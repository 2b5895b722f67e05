"""Training across two (simulated) vendors that starts from Hugging Face's weights, and what comes
out of a mixed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hetero.tools.convert_checkpoint import main as convert
from hetero.tools.generate_text import main as generate_text
from hetero.tools.runs import SIMULATED
from megatron.hetero.arguments import parse_args
from megatron.hetero.tokenizer.build import build_tokenizer
from tests.distributed.harness import MIXED, TINY_LLAMA, steps_of_samples, train
from tests.megatron.huggingface.tiny_huggingface import MODELS

HETERO = [*MIXED, *"--hetero-pipeline-layers 1 3 --hetero-transport cpu-forward".split()]
STEPS, BATCH = 20, 4
ROWS = 509
"""More than the tokenizer has tokens, and not what its size would be padded to."""
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.1
RECIPE = (
    "--use-checkpoint-args --exit-on-missing-checkpoint "
    f"--seq-length 32 --micro-batch-size 1 --global-batch-size {BATCH} --train-iters {STEPS} "
    f"--lr {LEARNING_RATE} --lr-decay-style constant --weight-decay {WEIGHT_DECAY} "
    "--clip-grad 1.0 --adam-beta2 0.95 --log-interval 1 --eval-iters 0 --num-workers 0"
).split()


@pytest.mark.parametrize("name", sorted(MODELS))
def test_losses_equal_those_of_transformers_on_the_same_tokens(
    name: str, corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = MODELS[name](vocab_size=ROWS)
    theirs.save_pretrained(tmp_path / "theirs")
    assert convert(["hf-to-megatron", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    flags = [*RECIPE, *corpus.flags, "--load", str(tmp_path / "ours")]

    ours = train([*flags, *HETERO], 2, tmp_path / "run", environ=SIMULATED)
    expected = _losses_of_transformers(theirs, steps_of_samples(flags, steps=STEPS, batch=BATCH))

    assert len(ours.losses) == STEPS
    (taken,) = [line for line in ours.stdout.splitlines() if line.startswith("taken from ")]
    # Megatron's default of both is 0.1, under which losses would be others in every run.
    assert "--hidden-dropout 0.0" in taken
    assert "--attention-dropout 0.0" in taken
    assert expected[-1] < expected[0] - 0.1
    assert ours.losses[0] == pytest.approx(expected[0], rel=1e-5)
    assert ours.losses == pytest.approx(expected, rel=1e-3)


def _losses_of_transformers(model: Any, batches: list[list[dict[str, Any]]]) -> list[float]:
    """The same recipe in plain PyTorch: Megatron decays no bias and no norm."""
    model.train()
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))
    losses = []
    for batch in batches:
        tokens, labels = (torch.stack([s[key] for s in batch]) for key in ("tokens", "labels"))
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_text_comes_out_of_a_mixed_run_and_its_weights_go_to_hugging_face(
    corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    saved = str(tmp_path / "checkpoints")
    flags = [*TINY_LLAMA, *corpus.flags, *HETERO, "--use-distributed-optimizer", "--train-iters"]
    train([*flags, "30", "--save", saved], 2, tmp_path / "run", environ=SIMULATED)
    capsys.readouterr()

    assert (
        generate_text(["--load", saved, "--prompt", "The value of", "--max-new-tokens", "8"]) == 0
    )
    text = capsys.readouterr().out
    assert text.startswith("The value of")

    assert convert(["megatron-to-hf", saved, str(tmp_path / "theirs")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    tokenizer = build_tokenizer(parse_args([*TINY_LLAMA, *corpus.flags], world_size=1))
    prompt = torch.tensor([tokenizer.tokenize("The value of")])
    ids = model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=tokenizer.eod)
    assert text == tokenizer.detokenize([i for i in ids[0].tolist() if i != tokenizer.eod]) + "\n"
