"""Training across two (simulated) vendors that starts from Hugging Face's weights, and what comes
out of a mixed run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from hetero.tools import preprocess_data
from hetero.tools.convert_checkpoint import main as convert
from hetero.tools.generate_text import main as generate_text
from hetero.tools.runs import SIMULATED
from megatron.hetero.arguments import parse_args
from megatron.hetero.tokenizer.build import build_tokenizer
from tests.distributed.harness import MIXED, TINY_LLAMA, launch, steps_of_samples, train
from tests.megatron.huggingface.tiny_huggingface import (
    FAMILIES,
    WITH_EXPERTS,
    save_tokenizer,
    tiny_model,
)
from tests.sentences import without_time

HETERO = [*MIXED, *"--hetero-pipeline-layers 1 3 --hetero-transport cpu-forward".split()]
STEPS, BATCH = 6, 4
ROWS = 509
"""More than the tokenizer has tokens, and not what its size would be padded to."""
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.1
RECIPE = (
    "--use-checkpoint-args --exit-on-missing-checkpoint "
    f"--seq-length 32 --micro-batch-size 1 --global-batch-size {BATCH} --train-iters {STEPS} "
    f"--lr {LEARNING_RATE} --lr-decay-style constant --weight-decay {WEIGHT_DECAY} "
    "--clip-grad 1.0 --adam-beta2 0.95 --log-interval 1 --eval-iters 0 --num-workers 0"
).split()


def test_losses_equal_those_of_transformers_on_the_same_tokens(corpus, tmp_path: Path) -> None:
    theirs = tiny_model("llama", vocab_size=ROWS)
    theirs.save_pretrained(tmp_path / "theirs")
    assert convert(["hf-to-megatron", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    flags = [*RECIPE, *corpus.flags, "--load", str(tmp_path / "ours")]

    ours = train([*flags, *HETERO], 2, tmp_path / "run", environ=SIMULATED)
    expected = _losses_of_transformers(theirs, steps_of_samples(flags, steps=STEPS, batch=BATCH))

    assert len(ours.losses) == STEPS
    (taken,) = [
        line for line in without_time(ours.stdout).splitlines() if line.startswith("taken from ")
    ]
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


HOMOGENEOUS = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tttL".split()
SHORT = [*RECIPE, "--train-iters", "2"]


# What of a family differs between the two ways to pipeline it is routed or added over stages.
ALSO_HOMOGENEOUS = ("llama", *WITH_EXPERTS)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_trains_mixed_as_in_transformers(name: str, corpus, tmp_path: Path) -> None:
    theirs = tiny_model(name, vocab_size=ROWS)
    theirs.save_pretrained(tmp_path / "theirs")
    assert convert(["hf-to-megatron", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    flags = [*SHORT, *corpus.flags, "--load", str(tmp_path / "ours")]
    # transformers leaves the bias of scores as it is.
    flags += ["--moe-router-bias-update-rate", "0"] if name in WITH_EXPERTS else []

    mixed = train([*flags, *HETERO], 2, tmp_path / "mixed", environ=SIMULATED)
    expected = _losses_of_transformers(theirs, steps_of_samples(flags, steps=2, batch=BATCH))

    if name in ALSO_HOMOGENEOUS:
        homogeneous = train([*flags, *HOMOGENEOUS], 2, tmp_path / "homogeneous")
        assert mixed.numbers() == homogeneous.numbers()
    assert mixed.losses == pytest.approx(expected, rel=1e-4)


# The smallest weight is far larger than such a step.
_UNCHANGED = (
    "--lr 1e-30 --weight-decay 0 --moe-router-bias-update-rate 0 --train-iters 1 --finetune"
).split()
_EP2 = "--expert-model-parallel-size 2"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("qwen3_moe", "deepseek_v2")))
        for name in WITH_EXPERTS
    ],
)
def test_experts_keep_their_bits_on_the_way_through_several_layouts(
    name: str, corpus, tmp_path: Path
) -> None:
    """Each run loads what the one before it saved, and learns nothing."""
    changes = {"vocab_size": ROWS + 1} | ({"num_local_experts": 6} if name == "mixtral" else {})
    tiny_model(name, **changes).save_pretrained(tmp_path / "theirs")
    assert convert(["hf-to-megatron", str(tmp_path / "theirs"), str(tmp_path / "0")]) == 0
    layouts = {
        "shared": (2, f"{_EP2} --use-distributed-optimizer"),
        "both": (4, f"{_EP2} --tensor-model-parallel-size 2 --sequence-parallel"),
        "sliced": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    }
    for number, (ranks, words) in enumerate(layouts.values()):
        folders = ["--load", str(tmp_path / f"{number}"), "--save", str(tmp_path / f"{number + 1}")]
        flags = [*RECIPE, *corpus.flags, *_UNCHANGED, *words.split(), *folders]
        train(flags, ranks, tmp_path / f"run{number}")
    last = tmp_path / f"{len(layouts)}"
    rows = ["--vocab-size", f"{ROWS + 1}"]
    assert convert(["megatron-to-hf", str(last), str(tmp_path / "back"), *rows]) == 0

    before, after = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "back")
    )
    assert set(before) == set(after)
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key


def test_norms_across_heads_are_the_same_with_tensor_parallelism(corpus, tmp_path: Path) -> None:
    """Every rank has some heads of the queries, over all of which OLMo-2's norms go."""
    tiny_model("olmo2", vocab_size=ROWS + 1).save_pretrained(tmp_path / "theirs")
    assert convert(["hf-to-megatron", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    flags = [*SHORT, *corpus.flags, "--load", str(tmp_path / "ours")]
    one = train(flags, 1, tmp_path / "one")
    split = ["--tensor-model-parallel-size", "2"]
    for extra in ([], ["--sequence-parallel"]):
        two = train([*flags, *split, *extra], 2, tmp_path / f"two{len(extra)}")
        assert two.losses == pytest.approx(one.losses, rel=1e-6)
        assert two.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)


def test_a_checkpoint_is_complete_wherever_it_is_and_wherever_one_stands(
    corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was trained with a tokenizer that is gone, by a path relative to a folder that is too."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "then").mkdir()
    shutil.copy(corpus.tokenizer, tmp_path / "then" / "tok.model")
    data = ["--data-path", str(corpus.prefix), "--data-cache-path", str(corpus.cache)]
    kind = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model"]
    with monkeypatch.context() as there:
        there.chdir(tmp_path / "then")
        flags = [*TINY_LLAMA, *data, *HETERO, *kind, "tok.model", "--train-iters", "4"]
        saving = ["--save", "saved", "--save-interval", "1", "--exit-interval", "2"]
        train([*flags, *saving], 2, tmp_path / "run", environ=SIMULATED)
    shutil.move(tmp_path / "then" / "saved", tmp_path / "moved")
    shutil.rmtree(tmp_path / "then")
    moved = str(tmp_path / "moved")
    copies = [path for path in (tmp_path / "moved").iterdir() if path.name.startswith("tokenizer-")]
    assert [path.name for path in copies[0].iterdir()] == ["tokenizer.model"]
    assert len(copies) == 1

    model = [word for word in RECIPE if word != "--exit-on-missing-checkpoint"]
    resumed = [*model, *data, *HETERO, "--load", moved, "--save", moved, "--train-iters", "4"]
    resumed += "--lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 1".split()
    resumed += ["--adam-beta2", "0.999"]
    assert len(train(resumed, 2, tmp_path / "resumed", environ=SIMULATED).losses) == 2
    assert sorted(tmp_path.glob("moved/tokenizer-*")) == copies

    capsys.readouterr()
    assert generate_text(["--load", moved, "--prompt", "The value", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("The value")
    assert convert(["megatron-to-hf", moved, str(tmp_path / "theirs")]) == 0
    reference = sentencepiece.SentencePieceProcessor(str(corpus.tokenizer))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    for text in ("The value of  x", " Zwölf 漢字 🙂\n\ttab ", "", "a</b>"):
        assert tokenizer(text).input_ids == reference.encode(text)
        assert tokenizer.decode(reference.encode(text)) == text
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    settings = json.loads((tmp_path / "theirs" / "generation_config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert settings == {"bos_token_id": 1, "eos_token_id": 2}


def test_a_token_without_a_row_trains_and_is_refused_where_it_occurs(
    corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "theirs"
    tiny_model("llama", vocab_size=257).save_pretrained(folder)
    save_tokenizer(folder, added=["<pad>", "<extra>"])
    text = tmp_path / "text.txt"
    text.write_text("Twelve boxers fight.\n" * 200)
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    for name in ("plain", "extra"):
        words = ["--input", str(text), "--output-prefix", str(tmp_path / name), *kind]
        assert preprocess_data.main([*words, "--workers", "1"]) == 0
        text.write_text("Twelve boxers <extra> fight.\n" * 200)
    assert convert(["hf-to-megatron", str(folder), str(tmp_path / "ours")]) == 0
    assert "no row of its 257: '<pad>', '<extra>'" in capsys.readouterr().err
    flags = [*SHORT, *HETERO, "--split", "100,0,0", "--load", str(tmp_path / "ours")]

    plain = ["--data-path", str(tmp_path / "plain_text_document")]
    saving = ["--save", str(tmp_path / "saved")]
    assert train([*flags, *plain, *saving], 2, tmp_path / "run", environ=SIMULATED).losses
    assert convert(["megatron-to-hf", str(tmp_path / "saved"), str(tmp_path / "back")]) == 0
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["vocab_size"] == 257
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()

    extra = ["--data-path", str(tmp_path / "extra_text_document")]
    outcomes = launch([*flags, *extra], 2, environ=SIMULATED)
    assert {outcome.code for outcome in outcomes} == {2}
    assert "holds token 258 but the model knows 257" in "".join(o.stderr for o in outcomes)


def test_text_comes_out_of_a_mixed_run_and_its_weights_go_to_hugging_face(
    corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    saved = str(tmp_path / "checkpoints")
    flags = [*TINY_LLAMA, *corpus.flags, *HETERO, "--use-distributed-optimizer", "--train-iters"]
    train([*flags, "10", "--save", saved], 2, tmp_path / "run", environ=SIMULATED)
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
