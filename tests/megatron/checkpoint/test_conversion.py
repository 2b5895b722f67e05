"""A checkpoint that a tool wrote is one like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.hetero.checkpoint.conversion import write_release
from megatron.hetero.checkpoint.index import DamagedCheckpoint
from megatron.hetero.checkpoint.reader import CheckpointReader
from megatron.hetero.checkpoint.regions import Region
from megatron.hetero.checkpoint.safetensors_writer import WriteItem

ARGS = {"num_layers": 1, "untie_embeddings_and_output_weights": False}
NAMES = (
    "embedding.word_embeddings.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.final_layernorm.weight",
)


def test_weights_written_file_by_file_are_read_as_one_checkpoint(tmp_path: Path) -> None:
    """Other files go along once the weights are there."""
    seen: list[str] = []

    def add(folder: Path) -> None:
        seen.extend(entry.name for entry in folder.iterdir())
        (folder / "tokenizer.json").write_text("{}")

    weights = {name: torch.randn(3, 2) for name in NAMES}
    files = ([WriteItem.whole(name, tensor)] for name, tensor in weights.items())
    folder = write_release(tmp_path, files, args=ARGS, add_companions=add)
    assert folder == tmp_path / "release"
    assert sorted(seen) == [f"weights_0000{number}.safetensors" for number in range(3)]
    assert (folder / "tokenizer.json").read_text() == "{}"
    with CheckpointReader.open(tmp_path) as reader:
        assert reader.args == ARGS
        assert reader.names() == sorted(NAMES)
        for name, tensor in weights.items():
            assert torch.equal(reader.tensor(name), tensor)


@pytest.mark.parametrize(
    ("write_items", "problem"),
    [
        (
            [WriteItem("w", (4,), torch.float32, (Region((0,), (2,)),), lambda: torch.ones(2))],
            "tensor w is not whole",
        ),
        (
            [WriteItem.whole(name, torch.ones(2)) for name in NAMES[:-1]],
            "tensor decoder.final_layernorm.weight is missing",
        ),
    ],
    ids=["half a tensor", "a tensor too few"],
)
def test_what_is_no_whole_model_is_no_checkpoint(
    write_items: list[WriteItem], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(DamagedCheckpoint, match=problem):
        write_release(tmp_path, [write_items], args=ARGS)
    assert list(tmp_path.iterdir()) == []
