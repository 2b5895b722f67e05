"""Hugging Face's folders into checkpoints and back, whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero.tools import convert_checkpoint
from megatron.hetero.checkpoint.folder import folder_name, write_tracker
from megatron.hetero.checkpoint.index import INDEX_FILE, read_index
from megatron.hetero.checkpoint.lock import LOCK_FILE, SaveLock
from megatron.hetero.checkpoint.reader import CheckpointReader
from megatron.hetero.generation import next_logits, whole_model
from megatron.hetero.huggingface import convert
from megatron.hetero.huggingface.configuration import args_from_config
from megatron.hetero.huggingface.families import BY_TYPE
from megatron.hetero.huggingface.hub_folders import CONFIG, SINGLE, write_shard
from megatron.hetero.huggingface.mapping import ModelShape, rules
from megatron.hetero.huggingface.token_ids import read_token_ids
from tests import commands
from tests.megatron.huggingface.test_configuration import LLAMA_3_1_8B
from tests.megatron.huggingface.tiny_huggingface import (
    MODELS,
    VOCABULARY,
    qwen2,
    save_tokenizer,
    tiny_model,
)
from tests.tools.refusals import Refused


@pytest.fixture(params=sorted(MODELS))
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model's folder with several shards and a tokenizer."""
    return _save(MODELS[request.param](), tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return _save(qwen2(), tmp_path / "model")


@pytest.fixture
def ours(sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Its checkpoint; what was said of it is forgotten."""
    assert _there(sharded, tmp_path / "ours") == 0
    capsys.readouterr()
    return tmp_path / "ours"


def _save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder, max_shard_size="100KB")
    save_tokenizer(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def _there(source: Path, target: Path, *flags: str) -> int:
    return convert_checkpoint.main(["hf-to-megatron", str(source), str(target), *flags])


def _back(source: Path, target: Path, *flags: str) -> int:
    return convert_checkpoint.main(["megatron-to-hf", str(source), str(target), *flags])


def _assert_same_weights(one: Path, other: Path) -> None:
    ours, theirs = _weights(one), _weights(other)
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name


def test_a_round_trip_gives_identical_tensors_tokenizer_and_generation_settings(
    saved: Path, tmp_path: Path
) -> None:
    assert _there(saved, tmp_path / "ours") == 0
    beside = tmp_path / "ours" / "release" / "huggingface"
    with CheckpointReader.open(tmp_path / "ours") as reader:
        assert reader.args["tokenizer_type"] == "HuggingFaceTokenizer"
        assert reader.args["tokenizer_model"] == "release/huggingface"
    assert (beside / "tokenizer.json").is_file()
    assert _back(tmp_path / "ours", tmp_path / "back") == 0
    _assert_same_weights(tmp_path / "back", saved)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (saved / name).read_bytes()
    # An end that config.json leaves open is the tokenizer's.
    end = read_token_ids(saved).special["eos_token_id"]
    before, after = _config(saved), _config(tmp_path / "back")
    assert after["bos_token_id"] == before["bos_token_id"]
    assert after["eos_token_id"] in (before["eos_token_id"], end)
    assert after["eos_token_id"] is not None


def test_several_shards_have_an_index_that_transformers_reads(saved: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    convert.to_megatron(saved, tmp_path / "ours", shard_bytes=60_000)
    assert len(list((tmp_path / "ours" / "release").glob("weights_*.safetensors"))) > 2
    convert.to_huggingface(tmp_path / "ours", tmp_path / "back", shard_bytes=60_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    _assert_same_weights(tmp_path / "back", saved)

    first = transformers.AutoModelForCausalLM.from_pretrained(saved)
    second = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    ids = torch.arange(60)[None]
    with torch.no_grad():
        assert torch.equal(second(ids).logits, first(ids).logits)


def test_padding_and_half_precision_survive_the_way_out(tmp_path: Path) -> None:
    source = _save(qwen2(vocab_size=300).to(torch.bfloat16), tmp_path / "model")
    assert _there(source, tmp_path / "ours", "--make-vocab-size-divisible-by", "128") == 0
    with CheckpointReader.open(tmp_path / "ours") as reader:
        embedding = reader.tensor("embedding.word_embeddings.weight")
        assert reader.args["bf16"]
    assert embedding.shape[0] == 384
    assert not embedding[300:].any()
    assert _back(tmp_path / "ours", tmp_path / "back") == 0
    _assert_same_weights(tmp_path / "back", source)
    assert _config(tmp_path / "back")["vocab_size"] == 300


def test_logits_equal_those_of_transformers(saved: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    assert _there(saved, tmp_path / "ours") == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(saved).eval()
    ids = torch.randint(0, VOCABULARY, (200,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    with CheckpointReader.open(tmp_path / "ours") as reader, whole_model(reader) as model:
        found = next_logits(model, ids.tolist())
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_linear_scaling_of_rope_gives_the_same_logits_and_comes_back(
    factor: float, tmp_path: Path
) -> None:
    theirs = MODELS["llama"](rope_scaling={"rope_type": "linear", "factor": factor})
    theirs.save_pretrained(tmp_path / "theirs")
    assert _there(tmp_path / "theirs", tmp_path / "ours") == 0
    ids = torch.randint(0, VOCABULARY, (60,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    with CheckpointReader.open(tmp_path / "ours") as reader, whole_model(reader) as model:
        assert reader.args["rotary_seq_len_interpolation_factor"] == factor
        torch.testing.assert_close(next_logits(model, ids.tolist()), expected, atol=1e-4, rtol=0)
    assert _back(tmp_path / "ours", tmp_path / "back") == 0
    back = type(theirs).from_pretrained(tmp_path / "back")
    with torch.no_grad():
        assert torch.equal(back(ids[None]).logits[0], expected)


def test_a_tied_model_with_an_output_layer_of_its_own_is_refused(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers may use it or not, from release to release."""
    embedding = _weights(sharded)["model.embed_tokens.weight"]
    _add_output_layer(sharded, embedding.clone())
    assert _there(sharded, tmp_path / "equal") == 0
    _add_output_layer(sharded, embedding + 1)
    assert _there(sharded, tmp_path / "other") == 2
    assert "says tie_word_embeddings" in capsys.readouterr().err


def _add_output_layer(folder: Path, weight: torch.Tensor) -> None:
    save_file({"lm_head.weight": weight}, folder / "output.safetensors")
    index = folder / "model.safetensors.index.json"
    record = json.loads(index.read_text())
    record["weight_map"]["lm_head.weight"] = "output.safetensors"
    index.write_text(json.dumps(record))


@pytest.fixture
def deepseek(tmp_path: Path) -> Path:
    """With tensors of a layer after its four, which predicts further tokens."""
    folder = _save(tiny_model("deepseek_v3"), tmp_path / "deepseek")
    further = {f"model.layers.4.{name}": torch.ones(2) for name in ("hnorm.weight", "eh_proj")}
    _add_tensors(folder, further)
    return folder


def _add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "more.safetensors")
    index = folder / "model.safetensors.index.json"
    record = json.loads(index.read_text())
    record["weight_map"] |= dict.fromkeys(tensors, "more.safetensors")
    index.write_text(json.dumps(record))


def test_a_layer_that_predicts_further_tokens_is_left_out_with_a_note(
    deepseek: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _there(deepseek, tmp_path / "ours") == 0
    said = capsys.readouterr().err
    assert "note: model.layers.4: left out, because it predicts further tokens only" in said
    assert _back(tmp_path / "ours", tmp_path / "back") == 0
    assert _config(tmp_path / "back")["num_nextn_predict_layers"] == 0
    names = set(_weights(deepseek))
    assert set(_weights(tmp_path / "back")) == {n for n in names if "layers.4." not in n}


@pytest.mark.parametrize(
    "name",
    ["model.layers.5.hnorm.weight", "model.layers.3.mlp.experts.6.down_proj.weight"],
)
def test_other_tensors_than_those_of_the_model_are_refused(
    name: str, deepseek: Path, tmp_path: Path, refused: Refused
) -> None:
    _add_tensors(deepseek, {name: torch.ones(2), **load_file(deepseek / "more.safetensors")})
    error = refused(convert_checkpoint.main, ["hf-to-megatron", deepseek, tmp_path / "ours"])
    assert f"holds the tensor {name}, which its config.json does not account for" in error


def test_routers_in_float32_and_biases_in_half_precision_keep_their_values(tmp_path: Path) -> None:
    """transformers keeps the router's weight in float32, and we the bias of its scores."""
    model = tiny_model("deepseek_v3").to(torch.bfloat16)
    for name, tensor in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            tensor.data = tensor.data.float() * 1.001
    _save(model, tmp_path / "model")
    assert _there(tmp_path / "model", tmp_path / "ours") == 0
    assert _back(tmp_path / "ours", tmp_path / "back") == 0
    before, after = _weights(tmp_path / "model"), _weights(tmp_path / "back")
    assert set(before) == set(after)
    for name, tensor in before.items():
        is_bias = name.endswith("e_score_correction_bias")
        assert after[name].dtype == (torch.float32 if is_bias else tensor.dtype)
        assert torch.equal(after[name], tensor.to(after[name].dtype))
    assert before["model.layers.2.mlp.gate.weight"].dtype == torch.float32


def test_what_config_json_has_no_key_for_is_told(
    ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _change_flags(ours / "release", hidden_dropout=0.1, attention_dropout=0.2)
    assert _back(ours, tmp_path / "back") == 0
    assert "has no key for --hidden-dropout 0.1, which training used" in capsys.readouterr().out
    assert _config(tmp_path / "back")["attention_dropout"] == 0.2
    _change_flags(ours / "release", layernorm_zero_centered_gamma=True)
    assert _back(ours, tmp_path / "no") == 2
    assert "because of --apply-layernorm-1p (on)" in capsys.readouterr().err


def _change_flags(folder: Path, **changes: Any) -> None:
    index = read_index(folder)
    changed = dataclasses.replace(index, args={**index.args, **changes})
    (folder / INDEX_FILE).write_text(changed.to_json())


def _cut_shard(folder: Path) -> None:
    _second_shard(folder).write_bytes(_second_shard(folder).read_bytes()[:-10])


def _second_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin").touch()


def _quantised(folder: Path) -> None:
    tensors = load_file(_second_shard(folder))
    quantised = {name: tensor.to(torch.int8) for name, tensor in tensors.items()}
    save_file(quantised, _second_shard(folder))


def _config_of(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(_config(folder) | changes))

    return change


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: _second_shard(folder).unlink(), "lacks the shard model-00002-of-"),
        (_cut_shard, ".safetensors is damaged"),
        (_pickled, "pickled weights are not read"),
        (_quantised, "stored as I8"),
        (lambda folder: (folder / CONFIG).unlink(), "config.json is missing"),
        (lambda folder: (folder / CONFIG).write_text("{"), "config.json is truncated or not JSON"),
        (_config_of(intermediate_size=96), "shape [80, 48] and config.json says [96, 48]"),
        (_config_of(num_hidden_layers=3), "holds the tensor model.layers.3."),
        (_config_of(num_hidden_layers=5), "lacks the tensor model.layers.4."),
    ],
)
def test_what_cannot_be_converted_is_one_sentence_and_leaves_nothing(
    damage: Callable[[Path], None], said: str, sharded: Path, tmp_path: Path, refused: Refused
) -> None:
    damage(sharded)
    error = refused(
        convert_checkpoint.main, ["hf-to-megatron", sharded, tmp_path / "deep" / "ours"]
    )
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "deep").exists()


def test_a_folder_that_a_run_saves_to_is_not_written_to(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with SaveLock.take(tmp_path / "ours", say=print):
        assert _there(sharded, tmp_path / "ours") == 2
        assert f"writes to {tmp_path / 'ours'}; wait for its end" in capsys.readouterr().err
        assert [path.name for path in (tmp_path / "ours").iterdir()] == [LOCK_FILE]
    assert _there(sharded, tmp_path / "ours") == 0


def test_a_conversion_that_breaks_off_leaves_nothing(
    ours: Path, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert.hub_folders, "copy_companions", disk_full)
    assert _there(sharded, tmp_path / "second") == 2
    assert _back(ours, tmp_path / "back") == 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "ours"]


def _trained(ours: Path, *iterations: int) -> None:
    """Iterations beside the converted weights, as a run that trained on would leave them."""
    index = read_index(ours / "release")
    for iteration in iterations:
        folder = ours / folder_name(iteration)
        shutil.copytree(ours / "release", folder)
        trained = dataclasses.replace(index, run={**index.run, "iteration": iteration})
        (folder / INDEX_FILE).write_text(trained.to_json())
    write_tracker(ours, str(iterations[-1]))


def test_an_export_names_its_iteration_and_never_takes_an_older_one_by_itself(
    ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _trained(ours, 5, 10, 20)
    newest = ours / "iter_0000020"
    assert _back(ours, tmp_path / "newest") == 0
    assert f"parameters of {newest}, iteration 20" in capsys.readouterr().out
    weights = newest / "weights_00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert _back(ours, tmp_path / "back") == 2
    said = capsys.readouterr().err
    assert f"the newest checkpoint, {newest}, cannot be used: weights_00000.safetensors has" in said
    assert "name an older one instead: --ckpt-step 10 or --ckpt-step 5" in said
    assert not (tmp_path / "back").exists()
    assert _back(ours, tmp_path / "back", "--ckpt-step", "10") == 0
    assert "iteration 10 written to" in capsys.readouterr().out


def test_an_export_says_that_the_tracker_passes_over_newer_ones(
    ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _trained(ours, 20, 10)
    assert _back(ours, tmp_path / "back") == 0
    shown = capsys.readouterr()
    assert "iteration 10 written to" in shown.out
    assert shown.err.startswith("note: iter_0000020 in ")


def test_a_folder_with_anything_in_it_is_not_written_to(
    ours: Path, sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for convert_again in (lambda: _there(sharded, ours), lambda: _back(ours, sharded)):
        assert convert_again() == 2
        assert "is not empty" in capsys.readouterr().err
    assert _back(ours, tmp_path / "back", "--vocab-size", "513") == 2
    assert "has 512 rows of vocabulary, not 513" in capsys.readouterr().err


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Both ways of a model of 600 MiB, whose largest tensor has 16 MiB."""
    source = tmp_path / "model"
    _large_llama(source, layers=100)
    for direction, start, end in (
        ("hf-to-megatron", source, tmp_path / "ours"),
        ("megatron-to-hf", tmp_path / "ours", tmp_path / "back"),
    ):
        code = (
            "import resource, runpy, sys; import torch, megatron.hetero.huggingface.convert\n"
            "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "from hetero.tools.convert_checkpoint import main\n"
            f"assert main([{direction!r}, {str(start)!r}, {str(end)!r}]) == 0\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)"
        )
        assert int(commands.printed("-c", code).split()[-1]) < 200 * 1024


def _large_llama(folder: Path, *, layers: int) -> None:
    """A model of zeros in one file."""
    folder.mkdir()
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 16384}
    own = {"max_position_embeddings": 64, "rope_scaling": None, "tie_word_embeddings": True}
    config = LLAMA_3_1_8B | sizes | own
    (folder / CONFIG).write_text(json.dumps(config))
    shape = ModelShape.from_args(
        args_from_config(config, source="it"),
        family=BY_TYPE["llama"],
        vocabulary=16384,
        rows=16384,
    )
    parts = [part for rule in rules(shape) for part in rule.parts]
    zeros = ((part.name, torch.zeros(part.shape, dtype=torch.bfloat16)) for part in parts)
    write_shard(folder / SINGLE, [(part, torch.bfloat16) for part in parts], zeros)
