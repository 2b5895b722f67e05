"""Convert LLaMA-3.1-8B's sizes from Hugging Face's format and back; report memory and time.

    python bench/conversion_8b.py OUT

The weights are random: 16 GB of bfloat16 in shards of about 4 GB, as published. OUT needs 50 GB and
is left with `conversion.json` alone.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from multiprocessing import resource_tracker
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script()

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hetero.errors import HeteroError, UserError
from hetero.text import counted
from hetero.tools import tool_command_line

ROOT = Path(__file__).resolve().parents[1]
HIDDEN, FFN, KEYS, VOCABULARY, LAYERS, SHARDS = 4096, 14336, 1024, 128256, 32, 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, shape in {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KEYS, HIDDEN),
            "self_attn.v_proj": (KEYS, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }.items():
            found[f"{prefix}.{name}.weight"] = shape
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def write_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    names = list(shapes().items())
    weight_map: dict[str, str] = {}
    size = -(-len(names) // SHARDS)
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        part = names[shard * size : (shard + 1) * size]
        # Random bits below the exponent of 2: cheap to draw, and all different.
        tensors = {
            name: torch.randint(0x3C00, 0x3F00, shape, dtype=torch.int16).view(torch.bfloat16)
            for name, shape in part
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))


def fingerprints(folder: Path) -> dict[str, str]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                raw = opened.get_tensor(name).view(torch.int16).numpy()
                found[name] = hashlib.blake2b(raw.data).hexdigest()
    return found


def convert(direction: str, source: Path, target: Path) -> dict[str, float]:
    command = [sys.executable, str(ROOT / "tools" / "convert_checkpoint.py"), direction]
    began = time.monotonic()
    # Captured, because a child that Ctrl-C ends prints a traceback.
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([*command, str(source), str(target)], stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        errors.seek(0)
        if status:
            raise HeteroError(f"{direction} ended with status {status}: {errors.read().strip()}")
    return {
        "seconds": round(time.monotonic() - began, 1),
        "peak_resident_gib": round(usage.ru_maxrss / 2**20, 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder for the models and the record")
    out = parser.parse_args(argv).out
    return tool_command_line.run(lambda: measure(out))


def measure(out: Path) -> str:
    """Convert there and back, write conversion.json and return it."""
    tool_command_line.make_results_folder(out, "OUT")
    first, middle, last = folders = out / "hf", out / "megatron", out / "hf_again"
    if there := [folder for folder in folders if folder.exists()]:
        raise UserError(f"{there[0]} is there already; remove it, or name another OUT")
    # In a process of its own: a child's peak counts what its parent held when it was started.
    writer = multiprocessing.get_context("spawn").Process(
        target=write_model, args=(first,), daemon=True
    )
    # Ctrl-C is for this process: in its first moments the daemon would print a traceback. The
    # daemon inherits the mask; here a ctrl-C that comes meanwhile is answered after it.
    resource_tracker.ensure_running()  # which would unblock the signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    writer.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    writer.join()
    if writer.exitcode:
        raise HeteroError("the model could not be written; see above")
    record: dict[str, object] = {
        "date": date.today().isoformat(),
        "machine": f"{counted(os.cpu_count() or 1, 'core')}, {platform.machine()}",
        "hf-to-megatron": convert("hf-to-megatron", first, middle),
        "megatron-to-hf": convert("megatron-to-hf", middle, last),
    }
    shutil.rmtree(middle)
    before, after = fingerprints(first), fingerprints(last)
    record["tensors"] = len(before)
    record["tensors_identical"] = sum(after.get(name) == digest for name, digest in before.items())
    shutil.rmtree(first)
    shutil.rmtree(last)
    text = json.dumps(record, indent=1)
    (out / "conversion.json").write_text(text)
    print(text)
    if record["tensors_identical"] != len(shapes()) or len(after) != len(before):
        raise HeteroError("the round trip changed tensors")
    return ""


if __name__ == "__main__":
    sys.exit(main())
