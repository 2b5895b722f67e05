"""A person sees what a checkpoint's model writes."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

from hetero.tools import generate_text
from hetero.tools.convert_checkpoint import main as convert
from megatron.hetero import generation
from megatron.hetero.checkpoint.index import INDEX_FILE, read_index
from megatron.hetero.checkpoint.reader import CheckpointReader
from megatron.hetero.generation import (
    CachedLogits,
    Sampling,
    generate,
    next_logits,
    sample_token,
    whole_model,
)
from tests.megatron.huggingface.tiny_huggingface import MODELS, save_tokenizer
from tests.tools.refusals import Refused

PROMPT = "The quick brown fox"
TOKENS = 257
NUMBERS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "256"]


@pytest.fixture(scope="module", params=sorted(MODELS))
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model as Hugging Face has it and as we do."""
    folder = tmp_path_factory.mktemp(request.param)
    MODELS[request.param](vocab_size=TOKENS).save_pretrained(folder / "theirs")
    save_tokenizer(folder / "theirs")
    assert convert(["hf-to-megatron", str(folder / "theirs"), str(folder / "ours")]) == 0
    return folder


def _say(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[str, str]:
    """What it writes, and what it remarks beside that."""
    capsys.readouterr()
    words = ["--load", str(folder), "--prompt", PROMPT, "--max-new-tokens", "8", *flags]
    assert generate_text.main(words) == 0
    said = capsys.readouterr()
    return said.out, said.err


def test_greedy_text_equals_that_of_transformers(
    converted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(converted / "theirs")
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted / "theirs")
    prompt = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(
        **prompt, max_new_tokens=8, do_sample=False, eos_token_id=tokenizer.eos_token_id
    )[0]
    if ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    assert _say(converted / "ours", capsys)[0] == tokenizer.decode(ids) + "\n"


def test_keys_and_values_that_are_kept_give_the_logits_of_a_whole_pass(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for few tokens at first, so that the cache also grows; one to three at a time."""
    monkeypatch.setattr(generation, "_MIN_CACHE_TOKENS", 4)
    text = torch.randint(0, TOKENS, (40,), generator=torch.Generator().manual_seed(5)).tolist()
    with CheckpointReader.open(converted / "ours") as reader, whole_model(reader) as model:
        expected = next_logits(model, text)
        cached = CachedLogits(model)
        for length in (3, 4, 6, 9, 10, 11, 12, 15, 30, 31, 33, 40):
            found = cached.logits_after(text[:length])
            torch.testing.assert_close(found, expected[length - 1], rtol=1e-4, atol=1e-5)


def test_a_token_costs_no_second_pass_over_the_text(converted: Path) -> None:
    with (
        CheckpointReader.open(converted / "ours") as reader,
        whole_model(reader) as model,
        mock.patch.object(model, "forward", wraps=model.forward) as forward,
    ):
        stream = generate(model, [1, 2, 3], Sampling(), max_context=7, vocab_size=TOKENS)
        assert len([next(stream) for _ in range(7)]) == 7
    passed = [call.args[0].shape[1] for call in forward.call_args_list]
    assert passed == [3, 1, 1, 1, 1, 7, 7]


def test_a_checkpoint_that_was_moved_finds_its_tokenizer(
    converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(converted / "ours", tmp_path / "moved")
    index = tmp_path / "moved" / "release" / "index.json"
    assert str(converted) not in index.read_text()
    shutil.move(converted / "ours", tmp_path / "away")
    try:
        moved, _ = _say(tmp_path / "moved", capsys)
    finally:
        shutil.move(tmp_path / "away", converted / "ours")
    assert moved == _say(converted / "ours", capsys)[0]


def test_an_older_checkpoint_is_used_with_the_reason_said(
    converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(converted / "ours", tmp_path / "ours")
    damaged = tmp_path / "ours" / "iter_0000010"
    shutil.copytree(tmp_path / "ours" / "release", damaged)
    (damaged / "weights_00000.safetensors").write_bytes(b"x")
    (tmp_path / "ours" / "latest_checkpointed_iteration.txt").write_text("10")
    said = _say(tmp_path / "ours", capsys)[1].splitlines()
    assert said[0].startswith(f"checkpoint {damaged} is not used: weights_00000.safetensors has 1 ")
    assert said[1] == f"checkpoint {tmp_path / 'ours' / 'release'}"


def test_a_prompt_of_which_the_model_sees_the_end_alone_is_said(
    converted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, remarks = _say(converted / "ours", capsys, "--prompt", PROMPT * 60)
    said = "tokens and the model only sees the last 256," in remarks
    with CheckpointReader.open(converted / "ours") as reader:
        assert said == (reader.args["max_position_embeddings"] == 256)


@pytest.mark.parametrize("flags", [[], ["--make-vocab-size-divisible-by", "128"]])
def test_a_vocabulary_with_more_rows_than_tokens_needs_no_flag(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Qwen2's own, and as a conversion pads it: the rows are those of the checkpoint."""
    MODELS["qwen2"](vocab_size=TOKENS + 43).save_pretrained(tmp_path / "theirs")
    save_tokenizer(tmp_path / "theirs")
    assert (
        convert(["hf-to-megatron", str(tmp_path / "theirs"), str(tmp_path / "ours"), *flags]) == 0
    )
    assert _say(tmp_path / "ours", capsys)[0].startswith(PROMPT)


def test_a_seed_gives_the_same_text_again_and_another_seed_another(
    converted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = ("--temperature", "1.0", "--top-k", "50", "--top-p", "0.95")
    first, again, other = (
        _say(converted / "ours", capsys, *sampled, "--seed", seed)[0] for seed in "112"
    )
    assert first.startswith(PROMPT)
    assert first == again != other


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prompt", ""], "--prompt is empty"),
        (["--top-k", "5"], "need --temperature"),
        (["--seed", f"{2**64}"], "--seed: must be a whole number of at least 0 and at most"),
        (["--ckpt-step", "7"], "iter_0000007"),
        (
            ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"],
            "name the same one with --tokenizer-type",
        ),
        ([*NUMBERS, "--prompt", "fox"], "--prompt cannot be tokenized"),
        ([*NUMBERS, "--prompt", "1 257"], "--prompt holds token 257"),
    ],
)
def test_bad_input_is_one_sentence(
    flags: list[str], said: str, converted: Path, refused: Refused
) -> None:
    words = ["--load", converted / "ours", "--prompt", PROMPT, *flags]
    assert said in refused(generate_text.main, words)


def test_a_model_of_hugging_faces_format_is_refused_with_what_converts_it(
    tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "config.json").write_text("{}")
    said = refused(generate_text.main, ["--load", tmp_path, "--prompt", PROMPT])
    assert "which hetero convert hf-to-megatron converts" in said


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(), {0}),
        (Sampling(temperature=1.0), {0, 1, 2, 3}),
        (Sampling(temperature=1.0, top_k=1), {0}),
        (Sampling(temperature=1.0, top_k=3), {0, 1, 2}),
        (Sampling(temperature=1.0, top_k=9), {0, 1, 2, 3}),
        (Sampling(temperature=1.0, top_p=0.4), {0}),
        (Sampling(temperature=1.0, top_p=0.7), {0, 1}),
        (Sampling(temperature=1.0, top_k=2, top_p=0.9), {0, 1}),
        (Sampling(temperature=0.01), {0}),
    ],
)
def test_which_tokens_can_be_drawn(sampling: Sampling, possible: set[int]) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = {sample_token(logits.clone(), sampling, generator) for _ in range(400)}
    assert drawn == possible


@pytest.mark.parametrize("name", ["num_layers", "swiglu"])
def test_a_checkpoint_that_leaves_a_shape_open_is_refused(
    name: str, converted: Path, tmp_path: Path, refused: Refused
) -> None:
    shutil.copytree(converted / "ours", tmp_path / "ours")
    release = tmp_path / "ours" / "release"
    index = read_index(release)
    known = {key: value for key, value in index.args.items() if key != name}
    (release / INDEX_FILE).write_text(dataclasses.replace(index, args=known).to_json())
    said = refused(generate_text.main, ["--load", tmp_path / "ours", "--prompt", PROMPT])
    assert f"does not say --{name.replace('_', '-')}" in said
