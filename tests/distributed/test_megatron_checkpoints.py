"""Checkpoints that megatron-core itself writes: converted, trained across two (simulated) vendors,
converted back, and loaded by megatron-core."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hetero.tools.convert_checkpoint import main as convert
from hetero.tools.runs import SIMULATED
from megatron.hetero.checkpoint.index import read_index
from megatron.hetero.checkpoint.reader import CheckpointReader
from megatron.hetero.megatron_lm.tensors import model_tensors
from megatron.hetero.weights import global_name
from tests.distributed.harness import MIXED, TINY_LLAMA, launch_well, steps_of_samples, train
from tests.megatron.megatron_lm.tiny_megatron import LLAMA, assert_same, read

# megatron-core spawns processes to write a checkpoint.
pytestmark = pytest.mark.usefixtures("preloaded_ranks")

SCRIPT = Path(__file__).with_name("core_training.py")
HETERO = [*MIXED, *"--hetero-pipeline-layers 1 3 --hetero-transport cpu-forward".split()]
BATCH, SAVED, RESAVED, STEPS = 4, 3, 5, 7
MODEL: Mapping[str, Any] = {
    **LLAMA,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_query_groups": 2,
    "kv_channels": 8,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "add_position_embedding": True,
    "padded_vocab_size": 512,
    "bf16": False,
    "fp16": False,
    "use_distributed_optimizer": True,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": None,
    "lr": 3e-3,
    "min_lr": 3e-4,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "clip_grad": 1.0,
    "train_iters": STEPS,
    "global_batch_size": BATCH,
    "micro_batch_size": 1,
    "lr_warmup_iters": 1,
    "lr_decay_style": "cosine",
}
# The same model and recipe in words, so that nothing has to be taken from a checkpoint.
FLAGS = [
    *TINY_LLAMA,
    *("--untie-embeddings-and-output-weights", "--adam-beta2", "0.95"),
    *("--global-batch-size", str(BATCH), "--train-iters", str(STEPS)),
]


def _core(
    folder: Path, name: str, model: Mapping[str, Any], *, ranks: int = 4, **plan: Any
) -> list[float]:
    """Train with megatron-core alone; its losses."""
    folder.mkdir(exist_ok=True)
    losses, written = folder / f"{name}.losses", folder / f"{name}.json"
    written.write_text(
        json.dumps({"args": dict(model), "losses": str(losses), **plan}, default=str)
    )
    scripts = dict.fromkeys(range(ranks), SCRIPT)
    launch_well([str(written)], ranks, seconds=240, scripts=scripts)
    found: list[float] = json.loads(losses.read_text())
    return found


def _save(folder: Path, ckpt_format: str, sharding: str = "") -> dict[str, str]:
    return {"folder": str(folder), "format": ckpt_format, "sharding": sharding}


def _random_batches(path: Path, steps: int) -> None:
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(0, 500, (BATCH, 33), generator=generator) for _ in range(steps)]
    torch.save([{"tokens": r[:, :-1].clone(), "labels": r[:, 1:].clone()} for r in rows], path)


def _read_batches(path: Path, flags: Sequence[str]) -> None:
    """What a run of ours with these flags reads, step by step."""
    steps = steps_of_samples(flags, steps=STEPS, batch=BATCH)
    torch.save(
        [
            {key: torch.stack([sample[key] for sample in step]) for key in ("tokens", "labels")}
            for step in steps
        ],
        path,
    )


def _assert_ranks_hold(dumped: Path, checkpoint: Path) -> None:
    """Every bit of what each of four ranks, TP2 and PP2, has, is what the checkpoint has."""
    compared = 0
    with CheckpointReader.open(checkpoint) as reader:
        tensors = {t.name: t for t in model_tensors(reader.args, rows=512)}
        for rank in range(4):
            stage, tensor_rank = divmod(rank, 2)
            for name, values in load_file(dumped / f"rank{rank}.safetensors").items():
                whole = global_name(name, 2 * stage)
                shard = tensors[whole].shard(tensor_rank, 2)
                expected = reader.regions(whole, shard.regions()).view(shard.local)
                assert torch.equal(values, expected), whole
                compared += values.numel()
    assert compared > sum(tensor.size for tensor in tensors.values())


def test_a_checkpoint_of_megatron_core_is_trained_mixed_and_goes_back(
    corpus, tmp_path: Path
) -> None:
    batches = tmp_path / "batches.pt"
    flags = [*FLAGS, *corpus.flags]
    _read_batches(batches, flags)
    saves = [
        _save(tmp_path / "sharded", "torch_dist", "dp_reshardable"),
        _save(tmp_path / "legacy", "torch"),
    ]
    first = _core(
        tmp_path / "core",
        "first",
        MODEL,
        batches=str(batches),
        first=0,
        last=RESAVED,
        save_before=SAVED,
        saves=saves,
        weights_before=SAVED,
        weights=str(tmp_path / "weights"),
        bucket_size=9000,
    )

    for kind in ("sharded", "legacy"):
        assert (
            convert(["import-megatron", str(tmp_path / kind), str(tmp_path / f"ours_{kind}")]) == 0
        )
        _assert_ranks_hold(tmp_path / "weights", tmp_path / f"ours_{kind}")

    resumed = ["--load", str(tmp_path / "ours_sharded"), "--no-load-rng"]
    resumed += ["--save", str(tmp_path / "mixed"), "--save-interval", str(RESAVED)]
    resumed += ["--exit-on-missing-checkpoint"]
    ours = train([*flags, *HETERO, *resumed], 2, tmp_path / "run", environ=SIMULATED)
    assert len(ours.losses) == STEPS - SAVED
    assert ours.losses[: RESAVED - SAVED] == pytest.approx(first[SAVED:], rel=1e-6)

    mixed, theirs = tmp_path / "mixed", tmp_path / "theirs"
    step = ["--ckpt-step", str(RESAVED)]
    export = ["export-megatron", str(mixed)]
    # The run had no distributed optimizer; megatron-core goes on with its own.
    kind = ["--use-distributed-optimizer"]
    assert convert([*export, str(theirs), *kind, *step]) == 0
    second = _core(
        tmp_path / "core",
        "second",
        MODEL,
        batches=str(batches),
        load=str(theirs),
        first=RESAVED,
        last=STEPS,
        weights_before=RESAVED,
        weights=str(tmp_path / "weights_back"),
    )
    _assert_ranks_hold(tmp_path / "weights_back", mixed / f"iter_{RESAVED:07d}")
    assert second == pytest.approx(ours.losses[RESAVED - SAVED :], rel=1e-6)


def test_half_precision_and_data_parallel_ranks_resume_as_if_nothing_had_been(
    tmp_path: Path,
) -> None:
    """Both ways in which the distributed optimizer is written, tied embeddings, biases."""
    model = {
        **MODEL,
        "bf16": True,
        "add_qkv_bias": True,
        "untie_embeddings_and_output_weights": False,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }
    _random_batches(tmp_path / "batches.pt", RESAVED)
    kinds = ("dp_reshardable", "fully_reshardable")
    shared = {"batches": str(tmp_path / "batches.pt"), "last": RESAVED, "ranks": 2}
    saves = [_save(tmp_path / kinds[0], "torch_dist", kinds[0])]
    first = _core(
        tmp_path / "core",
        "first",
        model,
        first=0,
        save_before=SAVED,
        saves=saves,
        bucket_size=20000,
        **shared,
    )
    assert convert(["import-megatron", str(tmp_path / kinds[0]), str(tmp_path / "ours")]) == 0
    index = read_index(tmp_path / "ours" / f"iter_{SAVED:07d}")
    assert index.tensors["embedding.word_embeddings.weight"].dtype == "bfloat16"
    assert index.tensors["optimizer.main.embedding.word_embeddings.weight"].dtype == "float32"

    assert convert(["export-megatron", str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0
    resaved = [_save(tmp_path / kinds[1], "torch_dist", kinds[1])]
    second = _core(
        tmp_path / "core",
        "second",
        model,
        load=str(tmp_path / "theirs"),
        first=SAVED,
        save_before=SAVED,
        saves=resaved,
        **shared,
    )
    assert second == first[SAVED:]
    assert convert(["import-megatron", str(tmp_path / kinds[1]), str(tmp_path / "again")]) == 0
    assert_same(read(tmp_path / "again"), read(tmp_path / "ours"))
    assert read_index(tmp_path / "again" / f"iter_{SAVED:07d}").run == index.run
