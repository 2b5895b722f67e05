"""A checkpoint has a copy of its tokenizer's files, which is made once and never changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.hetero.tokenizer.files import ARGUMENT, own_tokenizer, store_tokenizer


def _gpt2(folder: Path, merges: str = "a b") -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "v.json").write_text("{}")
    (folder / "m.txt").write_text(merges)
    files = {"vocab_file": str(folder / "v.json"), "merge_file": str(folder / "m.txt")}
    return {"tokenizer_type": "GPT2BPETokenizer", "tokenizer_model": None, **files}


def test_a_copy_is_made_once_and_another_tokenizer_gets_another(tmp_path: Path) -> None:
    args, save = _gpt2(tmp_path / "there"), tmp_path / "saved"
    name = store_tokenizer(args, save)
    assert name is not None
    assert sorted(path.name for path in (save / name).iterdir()) == ["merges.txt", "vocab.json"]
    before = (save / name).stat().st_mtime_ns
    assert store_tokenizer(args, save) == name
    assert (save / name).stat().st_mtime_ns == before
    other = store_tokenizer(_gpt2(tmp_path / "there", "c d"), save)
    assert other != name
    assert sorted(path.name for path in save.iterdir()) == sorted([name, str(other)])


def test_flags_name_the_copy_wherever_the_checkpoint_is(tmp_path: Path) -> None:
    args = _gpt2(tmp_path / "there")
    stored = {**args, ARGUMENT: store_tokenizer(args, tmp_path / "saved")}
    (tmp_path / "saved").rename(tmp_path / "moved")
    found = own_tokenizer(stored, tmp_path / "moved" / "iter_0000010")
    copy = tmp_path / "moved" / str(stored[ARGUMENT])
    assert found == {"vocab_file": f"{copy}/vocab.json", "merge_file": f"{copy}/merges.txt"}
    assert own_tokenizer(stored, tmp_path / "elsewhere" / "iter_0000010") == {}


def test_what_a_killed_run_left_of_a_copy_is_replaced(tmp_path: Path) -> None:
    args, save = _gpt2(tmp_path / "there"), tmp_path / "saved"
    name = str(store_tokenizer(args, save))
    (save / name).rename(save / f"{name}.copying")
    (save / f"{name}.copying" / "merges.txt").unlink()
    assert store_tokenizer(args, save) == name
    assert sorted(path.name for path in (save / name).iterdir()) == ["merges.txt", "vocab.json"]
    assert [path.name for path in save.iterdir()] == [name]


def test_only_the_tokenizers_files_of_a_models_folder_are_copied(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    kept = ["tokenizer.json", "config.json", "chat_template.jinja", "tokenization_own.py"]
    for name in [*kept, "model.safetensors", "pytorch_model.bin", "README.md"]:
        (folder / name).write_text(name)
    args = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    name = store_tokenizer(args, tmp_path / "saved")
    assert sorted(p.name for p in (tmp_path / "saved" / str(name)).iterdir()) == sorted(kept)


def test_a_tokenizer_without_files_has_no_copy(tmp_path: Path) -> None:
    assert store_tokenizer({"tokenizer_type": "NullTokenizer"}, tmp_path / "saved") is None
    assert store_tokenizer({}, tmp_path / "saved") is None
    assert not (tmp_path / "saved").exists()
