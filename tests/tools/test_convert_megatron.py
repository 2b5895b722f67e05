"""Megatron-LM's own checkpoints into ours and back, whole or not at all."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.tools.convert_checkpoint import main
from megatron.hetero.checkpoint.index import read_index
from megatron.hetero.checkpoint.regions import Region
from megatron.hetero.megatron_lm import torch_dist_writer
from megatron.hetero.megatron_lm.torch_dist_reader import TorchDistReader
from megatron.hetero.megatron_lm.torch_dist_writer import TensorChunk
from tests.megatron.megatron_lm.legacy_checkpoint import RankLayout, write_legacy
from tests.megatron.megatron_lm.test_pickles import Malicious
from tests.megatron.megatron_lm.tiny_megatron import (
    GPT2,
    LLAMA,
    MODELS,
    QWEN,
    assert_same,
    read,
    save_training,
    save_weights,
    weights,
)
from tests.tools.refusals import Refused

LAYOUTS = [(1, 1, None), (2, 1, None), (1, 2, None), (4, 2, None), (2, 2, 1), (2, 4, None)]
TRACKER = "latest_checkpointed_iteration.txt"


def _import(source: Path, target: Path, *flags: str) -> int:
    return main(["import-megatron", str(source), str(target), *flags])


def _export(source: Path, target: Path, *flags: str) -> int:
    return main(["export-megatron", str(source), str(target), *flags])


def _there_and_back(folder: Path, *flags: str) -> dict[str, torch.Tensor]:
    """The tensors of `ours`, exported as Megatron-LM's `theirs` and imported again as `back`."""
    assert _export(folder / "ours", folder / "theirs", *flags) == 0
    return _back(folder)


def _back(folder: Path) -> dict[str, torch.Tensor]:
    assert _import(folder / "theirs", folder / "back") == 0
    return read(folder / "back")


@pytest.mark.parametrize(
    ("name", "layout"),
    [*(("llama", layout) for layout in LAYOUTS), ("qwen", LAYOUTS[3]), ("gpt2", LAYOUTS[4])],
)
def test_the_legacy_layout_of_any_size_is_read(
    name: str, layout: tuple[int, int, int | None], tmp_path: Path
) -> None:
    expected = weights(MODELS[name], torch.bfloat16)
    save_weights(tmp_path / "ours", MODELS[name], expected)
    sizes = RankLayout(*layout)
    write_legacy(tmp_path / "ours", tmp_path / "theirs", sizes, local_names=layout[0] == 2)
    assert_same(_back(tmp_path), expected)
    args = read_index(tmp_path / "back" / "release").args
    assert {key: args[key] for key in MODELS[name]} == dict(MODELS[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "distributed"), [("llama", True), ("llama", False), ("qwen", True), ("gpt2", False)]
)
def test_weights_and_optimizer_go_through_torch_dist(
    name: str, dtype: torch.dtype, distributed: bool, tmp_path: Path
) -> None:
    expected = save_training(tmp_path / "ours", MODELS[name], dtype=dtype)
    kind = "--use-distributed-optimizer" if distributed else "--no-use-distributed-optimizer"
    assert_same(_there_and_back(tmp_path, kind), expected)
    assert (tmp_path / "theirs" / TRACKER).read_text() == "3"
    there, back = (read_index(tmp_path / n / "iter_0000003") for n in ("ours", "back"))
    for fact in ("iteration", "consumed_train_samples", "scheduler", "optimizer_step", "holds"):
        assert back.run[fact] == there.run[fact]
    assert back.args["use_distributed_optimizer"] is distributed


def test_the_optimizer_can_stay_behind_either_way(tmp_path: Path) -> None:
    expected = save_training(tmp_path / "ours", LLAMA, dtype=torch.bfloat16)
    alone = {n: t for n, t in expected.items() if not n.startswith("optimizer.")}
    assert _export(tmp_path / "ours", tmp_path / "theirs") == 0
    assert _import(tmp_path / "theirs", tmp_path / "one", "--weights-only") == 0
    assert_same(read(tmp_path / "one"), alone)
    assert _export(tmp_path / "ours", tmp_path / "release", "--weights-only") == 0
    assert (tmp_path / "release" / TRACKER).read_text() == "release"
    assert _import(tmp_path / "release", tmp_path / "two") == 0
    assert_same(read(tmp_path / "two"), alone)


def test_the_vocabulary_is_padded_as_asked(tmp_path: Path) -> None:
    expected = weights(LLAMA)
    save_weights(tmp_path / "ours", {**LLAMA, "vocab_size": 27}, expected)
    flags = ["--make-vocab-size-divisible-by", "20", "--tensor-model-parallel-size", "2"]
    found = _there_and_back(tmp_path, *flags)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert len(found[name]) == 40
        assert torch.equal(found[name][:32], expected[name])
        assert not found[name][32:].any()


def _rank_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/mp_rank_*/model_optim_rng.pt"))


def _edit(path: Path, change: Any) -> None:
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


_OLD_NAMES = {
    "embedding.": "language_model.embedding.",
    "decoder.final_layernorm.": "language_model.encoder.final_norm.",
    "decoder.": "language_model.encoder.",
    "self_attention.linear_qkv.": "self_attention.query_key_value.",
    "self_attention.linear_proj.": "self_attention.dense.",
    "pre_mlp_layernorm.": "post_attention_norm.",
    "input_layernorm.": "input_norm.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
}


def _with_old_names(state: dict[str, Any]) -> None:
    """Nested as the models before megatron-core were saved, with what is no parameter."""
    nested: dict[str, Any] = {}
    for name, value in state["model"].items():
        for new, old in _OLD_NAMES.items():
            name = name.replace(new, old)
        if name == "output_layer.weight":
            nested["word_embeddings_for_head"] = {"weight": value}
            continue
        _, part, rest = name.split(".", 2)
        within = nested.setdefault("language_model", {}).setdefault(part, {})
        if part == "embedding":
            kind, leaf = rest.split(".")
            within.setdefault(kind, {})[leaf] = value
        else:
            within[rest] = value
    nested["language_model"].setdefault("encoder", {})["layers.0.rotary_emb.inv_freq"] = (
        torch.zeros(2)
    )
    state["model"] = nested


def _in_old_order(version: float, heads: int) -> Any:
    def change(state: dict[str, Any]) -> None:
        state["checkpoint_version"] = version
        for name, value in state["model"].items():
            if ".linear_qkv." not in name:
                continue
            inner = value.shape[1:]
            grouped = value.view(heads, 3, -1, *inner)
            order = (0, 1) if version == 0 else (1, 2)
            state["model"][name] = grouped.transpose(*order).reshape(value.shape).clone()

    return change


@pytest.mark.parametrize("version", [0, 1.0, 3.0])
def test_names_and_order_from_before_megatron_core_are_known(
    version: float, tmp_path: Path
) -> None:
    model = {**GPT2, "qk_layernorm": False}
    expected = weights(model)
    save_weights(tmp_path / "ours", model, expected)
    write_legacy(tmp_path / "ours", tmp_path / "theirs", RankLayout(2, 2), local_names=True)
    for path in _rank_files(tmp_path / "theirs"):
        if version < 2:
            _edit(path, _in_old_order(version, heads=2))
        _edit(path, _with_old_names)
    assert_same(_back(tmp_path), expected)


def test_flat_parts_of_older_versions_are_put_together(tmp_path: Path) -> None:
    """`fully_sharded_model_space`: [pieces of each dimension ..., elements of a piece], cut
    anywhere, here at a third of every piece."""
    expected = save_training(tmp_path / "ours", LLAMA, dtype=torch.float32)
    assert _export(tmp_path / "ours", tmp_path / "theirs") == 0
    _flatten_optimizer(tmp_path / "theirs" / "iter_0000003")
    assert_same(_back(tmp_path), expected)


def _flatten_optimizer(folder: Path) -> None:
    reader = TorchDistReader(folder)
    common = torch.load(folder / "common.pt", weights_only=False)
    parts = []
    for key, stored in reader.tensors.items():
        whole = reader.read_region(key, Region.whole(stored.size), whole=stored.size)
        if not key.startswith("optimizer.state."):
            parts.append(_part(key, stored.size, Region.whole(stored.size), whole))
            continue
        key = key.replace("optimizer.state.param.", "optimizer.state.fp32_param.")
        numbered = enumerate(stored.size)
        fragments = [2 if n > 4 and n % 2 == 0 else n if d == 0 else 1 for d, n in numbered]
        local = [n // f for n, f in zip(stored.size, fragments, strict=True)]
        size = (*fragments, torch.Size(local).numel())
        for numbers in itertools.product(*map(range, fragments)):
            piece = whole
            for dim, (number, length) in enumerate(zip(numbers, local, strict=True)):
                piece = piece.narrow(dim, number * length, length)
            flat, cut = piece.reshape(-1), piece.numel() // 3
            for begin, end in ((0, cut), (cut, flat.numel())):
                if begin < end:
                    region = Region((*numbers, begin), (*(1 for _ in numbers), end - begin))
                    parts.append(_part(key, size, region, flat[begin:end]))
    common["content_metadata"] = {"distrib_optim_sharding_type": "fully_sharded_model_space"}
    shutil.rmtree(folder)
    folder.mkdir()
    torch_dist_writer.write_torch_dist(folder, parts, empty_objects=[], common=common)


def _part(key: str, size: tuple[int, ...], region: Region, values: torch.Tensor) -> TensorChunk:
    return TensorChunk(key, tuple(size), values.dtype, region, values.clone)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LLaMA in the older layout, of two tensor-parallel ranks and two stages."""
    folder = tmp_path_factory.mktemp("exported")
    save_weights(folder / "ours", LLAMA, weights(LLAMA))
    write_legacy(folder / "ours", folder / "theirs", RankLayout(2, 2))
    return folder


@pytest.fixture
def legacy(exported: Path, tmp_path: Path) -> Path:
    shutil.copytree(exported, tmp_path, dirs_exist_ok=True)
    return tmp_path / "theirs"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_training(tmp_path / "training", QWEN, dtype=torch.bfloat16)
    assert _export(tmp_path / "training", tmp_path / "sharded") == 0
    return tmp_path / "sharded"


@pytest.fixture
def refused_import(tmp_path: Path, refused: Refused) -> Refused:
    """The one sentence of an import that leaves nothing."""

    def refused_of(source: Path, *flags: str) -> str:
        target = tmp_path / "back"
        error = refused(main, ["import-megatron", source, target, *flags], silent=False)
        assert not target.exists()
        assert error.count("\n") == 1
        return error

    return refused_of


def test_ranks_that_are_missing_or_damaged_are_named(legacy: Path, refused_import: Refused) -> None:
    path = _rank_files(legacy)[2]
    path.write_bytes(path.read_bytes()[:-2000])
    assert "mp_rank_01_000" in refused_import(legacy)
    shutil.rmtree(legacy / "release" / "mp_rank_01_001")
    error = refused_import(legacy)
    assert "tensor-parallel rank 1 in pipeline stage 1" in error
    shutil.rmtree(legacy / "release" / "mp_rank_01_000")
    error = refused_import(legacy)
    assert "holds 1 tensor-parallel ranks and its arguments say 2" in error


def test_tensors_that_the_arguments_do_not_account_for_are_named(
    legacy: Path, refused_import: Refused
) -> None:
    def change(state: Mapping[str, Any]) -> None:
        state["model"]["decoder.layers.0.mlp.router.weight"] = torch.zeros(2)
        state["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.zeros(2)

    for path in _rank_files(legacy):
        _edit(path, change)
    error = refused_import(legacy)
    assert "decoder.layers.0.mlp.router.weight is no tensor of this model" in error
    assert "_extra_state" not in error
    for path in _rank_files(legacy):
        _edit(path, lambda state: setattr(state["args"], "num_experts", 8))
    assert "--num-experts 8" in refused_import(legacy)


def test_a_pickle_that_runs_something_is_refused(
    legacy: Path, sharded: Path, tmp_path: Path, refused_import: Refused
) -> None:
    marker = tmp_path / "ran"
    common = sharded / "iter_0000003" / "common.pt"
    malicious = Malicious(f"touch {marker}")
    torch.save({"args": Namespace(), "more": malicious}, common)
    _edit(_rank_files(legacy)[3], lambda state: state.update(more=malicious))
    for source in (sharded, legacy):
        assert "posix.system" in refused_import(source)
    assert not marker.exists()


def test_shards_that_are_missing_or_cut_short_are_named(
    sharded: Path, refused_import: Refused
) -> None:
    path = sharded / "iter_0000003" / "__0_0.distcp"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert "__0_0.distcp is cut short" in refused_import(sharded)
    path.unlink()
    assert "__0_0.distcp is missing" in refused_import(sharded)
    (sharded / "iter_0000003" / ".metadata").write_bytes(b"nothing")
    assert ".metadata is damaged" in refused_import(sharded)
    (sharded / "iter_0000003" / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    assert "format zarr" in refused_import(sharded)


def test_another_number_of_layers_than_the_arguments_say_is_refused(
    legacy: Path, sharded: Path, refused_import: Refused
) -> None:
    for path in [sharded / "iter_0000003" / "common.pt", *_rank_files(legacy)]:
        _edit(path, lambda state: setattr(state["args"], "num_layers", 3))
    assert "is of 4 layers instead of 3" in refused_import(sharded)
    error = refused_import(legacy)
    assert "decoder.layers.3.input_layernorm.weight is no tensor of this model" in error


def test_copies_that_are_not_of_these_weights_are_refused(
    tmp_path: Path, refused_import: Refused
) -> None:
    name = "decoder.layers.2.mlp.linear_fc2.weight"
    other = weights(LLAMA)[name].flip(0)
    save_training(
        tmp_path / "ours", LLAMA, dtype=torch.bfloat16, changed={f"optimizer.main.{name}": other}
    )
    assert _export(tmp_path / "ours", tmp_path / "theirs") == 0
    error = refused_import(tmp_path / "theirs")
    assert f"copy of {name}" in error
    assert "--weights-only" in error


def test_targets_and_sources_that_cannot_be_are_refused(
    legacy: Path, tmp_path: Path, refused: Refused, refused_import: Refused
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    assert "is not empty" in refused(main, ["import-megatron", legacy, full])
    assert "is not empty" in refused(main, ["export-megatron", tmp_path / "ours", full])
    for flag in ("--format torch", "--pipeline-model-parallel-size 2", "--transformer-impl local"):
        words = ["export-megatron", tmp_path / "ours", tmp_path / "legacy", *flag.split()]
        error = refused(main, words)
        assert f"{flag.split()[0]}: the format torch is read and not written" in error
        assert "--ckpt-convert-format torch" in error
    assert not (tmp_path / "legacy").exists()
    assert "is not a folder" in refused_import(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert TRACKER in refused_import(tmp_path / "empty")
    error = refused_import(legacy, "--ckpt-step", "7")
    assert "holds no iter_0000007" in error
    assert "--load takes as they are" in refused_import(tmp_path / "ours")


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_weights(tmp_path / "ours", LLAMA, weights(LLAMA))
    capsys.readouterr()

    def full(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert _export(tmp_path / "ours", tmp_path / "theirs") == 2
    assert "No space left" in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ours"]
