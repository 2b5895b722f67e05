"""A model of every family in and out: the same bits, and transformers' logits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hetero.tools.convert_checkpoint import main as convert
from megatron.hetero.arguments import build_parser
from megatron.hetero.checkpoint.model_flags import spellings
from megatron.hetero.checkpoint.reader import CheckpointReader
from megatron.hetero.checkpoint.tensor_names import stored_name
from megatron.hetero.generation import next_logits, whole_model
from megatron.hetero.weights import named_buffers, named_parameters
from tests.megatron.huggingface.tiny_huggingface import FAMILIES, VOCABULARY, tiny_model

TOKENS = torch.randint(0, VOCABULARY, (60,), generator=torch.Generator().manual_seed(2))
# Flags that a family has and a LLaMA has not.
_LATENT = (
    "--multi-latent-attention --qk-layernorm --kv-lora-rank 12 --qk-head-dim 10 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 14 --rope-type yarn --rotary-scaling-factor 8.0 "
    "--num-experts 6 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 24 "
    "--moe-router-num-groups 3 --moe-router-group-topk 2 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-router-dtype fp32"
)
OWN_FLAGS = {
    "llama": "",
    "qwen2": "--add-qkv-bias",
    "qwen3": "--qk-layernorm",
    "mistral": "",
    "olmo2": "--qk-layernorm --qk-layernorm-across-heads --reordered-norm",
    "phi3": "--rotary-percent 0.75",
    "granite": "--softmax-scale 0.2 --embedding-multiplier 12.0 --residual-multiplier 0.22 "
    "--logits-scaling 3.0",
    "qwen3_moe": "--qk-layernorm --num-experts 6 --moe-layer-freq [1]*1+[0]*1+[1]*2 "
    "--moe-ffn-hidden-size 24 --moe-router-topk 3",
    "mixtral": "--num-experts 5 --moe-ffn-hidden-size 80",
    "deepseek_v2": f"{_LATENT} --moe-layer-freq [0]*1+[1]*3 --moe-router-pre-softmax "
    "--mscale 0.707 --mscale-all-dim 0.707",
    "deepseek_v3": f"{_LATENT} --moe-layer-freq [0]*2+[1]*2 --moe-router-topk 4 --q-lora-rank 20 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-topk-scaling-factor 2.5 --mscale-all-dim 1.0",
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_goes_in_and_out_with_its_bits_and_logits(
    name: str, tied: bool, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = tiny_model(name, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path / "theirs")
    _convert("hf-to-megatron", tmp_path / "theirs", tmp_path / "ours")
    _convert("megatron-to-hf", tmp_path / "ours", tmp_path / "back")

    before, after = (_weights(tmp_path / folder) for folder in ("theirs", "back"))
    assert set(before) == set(after)
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(back) is type(theirs)
    expected = _logits(theirs)
    assert torch.equal(_logits(back), expected)
    with (
        # The compiler cannot trace what stands in for a GPU's functions.
        torch.compiler.set_stance("force_eager"),
        CheckpointReader.open(tmp_path / "ours") as reader,
        whole_model(reader) as model,
    ):
        found = next_logits(model, TOKENS.tolist())
        tensors = (*named_parameters([model], [0]), *named_buffers([model], [0]))
        assert sorted(stored_name(tensor) for tensor, _ in tensors) == sorted(reader.index.tensors)
        assert _own_flags(reader.args) == _words(OWN_FLAGS[name])
    assert float((found - expected).abs().max() / expected.abs().max()) < 2e-6


def _convert(direction: str, source: Path, target: Path) -> None:
    assert convert([direction, str(source), str(target)]) == 0


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS[None]).logits[0]
    return logits


def _own_flags(args: Mapping[str, Any]) -> set[str]:
    spelled = spellings(build_parser())
    named = [word for flags in OWN_FLAGS.values() for word in flags.split()]
    return {
        str(spelling.typed(args[name]))
        for name, spelling in spelled.items()
        if spelling.option in named and args.get(name, spelling.default) != spelling.default
    }


def _words(flags: str) -> set[str]:
    return {f"--{words}".strip() for words in flags.split("--") if words}
