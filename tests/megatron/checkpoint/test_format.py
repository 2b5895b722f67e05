"""A checkpoint's files: written item by item, read in any cut, and refused when damaged."""

from __future__ import annotations

import errno
import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hetero.errors import UserError
from hetero.recover import stored_files
from hetero.recover.stored_files import StoredFile, checksum_problem
from megatron.hetero.checkpoint import safetensors_writer
from megatron.hetero.checkpoint.folder import folder_name, write_tracker
from megatron.hetero.checkpoint.index import (
    INDEX_FILE,
    DamagedCheckpoint,
    Index,
    StoredTensor,
    parse_index,
    read_index,
    require_complete_model,
)
from megatron.hetero.checkpoint.reader import (
    CheckpointReader,
    TensorRead,
    copy_regions,
    region_view,
)
from megatron.hetero.checkpoint.regions import Region, Shard
from megatron.hetero.checkpoint.safetensors_writer import (
    WriteCancelled,
    WriteItem,
    write_safetensors,
)
from tests.megatron.checkpoint.written_checkpoints import write

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64]


def piece_of(name: str, whole: torch.Tensor, regions: list[Region]) -> WriteItem:
    held = torch.cat([_cut(whole, region).reshape(-1) for region in regions])
    return WriteItem(name, tuple(whole.shape), whole.dtype, tuple(regions), lambda: held)


def _cut(whole: torch.Tensor, region: Region) -> torch.Tensor:
    return whole[tuple(slice(a, a + n) for a, n in zip(region.start, region.shape, strict=True))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_written_file_is_what_the_library_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": torch.arange(24).view(2, 3, 4).to(dtype), "b": torch.arange(5).to(dtype)}
    path = tmp_path / "x.safetensors"
    stored = write_safetensors(path, [WriteItem.whole(n, t) for n, t in tensors.items()])
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name].view(tensor.shape), tensor)
    assert stored.size == path.stat().st_size
    assert checksum_problem(path, stored) is None


def test_each_block_of_a_file_has_its_checksum_whatever_the_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (safetensors_writer, stored_files):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    tensors = {
        f"{number}": torch.arange(size, dtype=torch.uint8)
        for number, size in enumerate((1, 63, 64, 65, 0, 200, 3, 128))
    }
    path = tmp_path / "x.safetensors"
    stored = write_safetensors(path, [WriteItem.whole(n, t) for n, t in tensors.items()])
    data = path.read_bytes()
    assert data.endswith(b"".join(t.numpy().tobytes() for t in tensors.values()))
    blocks = [data[begin : begin + 64] for begin in range(0, len(data), 64)]
    assert stored == StoredFile(len(data), tuple(map(zlib.crc32, blocks)))


def test_a_block_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_writer, "BLOCK_BYTES", 64)
    write = os.pwrite

    def full(file: int, data: memoryview, position: int) -> int:
        if position >= 256:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, position)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write_safetensors(tmp_path / "x", [WriteItem.whole("x", torch.ones(1000))])


def test_a_tensor_larger_than_a_block_is_streamed(tmp_path: Path, monkeypatch) -> None:
    for module in (safetensors_writer, stored_files):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    values = torch.randn(1000)
    stored = write_safetensors(tmp_path / "x", [WriteItem.whole("x", values)])
    assert torch.equal(load_file(tmp_path / "x")["x"], values)
    assert checksum_problem(tmp_path / "x", stored) is None


def test_a_cancelled_writer_stops(tmp_path: Path) -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(WriteCancelled):
        write_safetensors(
            tmp_path / "x", [WriteItem.whole("x", torch.ones(3))], cancelled=cancelled
        )


@settings(max_examples=30)
@given(data=st.data(), rows=st.integers(1, 4), columns=st.integers(1, 4), gated=st.booleans())
def test_what_one_layout_wrote_another_reads(
    tmp_path_factory: pytest.TempPathFactory, data, rows, columns, gated
) -> None:
    """TP slices cut into flat ranges of data-parallel ranks, read back as other slices' ranges."""
    dim = 0 if gated else data.draw(st.integers(0, 1))
    stacked = 2 if gated else 1
    sizes = (rows * 12 * stacked, columns * 12)
    whole = torch.arange(sizes[0] * sizes[1], dtype=torch.int64).view(sizes)

    def shard(ranks: int, rank: int) -> Shard:
        local = tuple(n // ranks if d == dim else n for d, n in enumerate(sizes))
        return Shard.split(local, dim=dim, rank=rank, ranks=ranks, stacked=stacked)

    def ranges(size: int) -> list[tuple[int, int]]:
        cuts = data.draw(st.lists(st.integers(0, size), max_size=3).map(sorted))
        return [(a, b) for a, b in zip([0, *cuts], [*cuts, size], strict=True) if a < b]

    parts = {}
    ranks = data.draw(st.sampled_from([1, 2, 3, 4]))
    for rank in range(ranks):
        own = shard(ranks, rank)
        for begin, end in ranges(own.size):
            regions = own.regions(begin, end)
            parts[f"{rank}-{begin}.safetensors"] = [piece_of("w", whole, regions)]
    folder = tmp_path_factory.mktemp("relayout")
    write(folder, parts)

    with CheckpointReader(folder) as reader:
        assert torch.equal(reader.tensor("w"), whole)
        others = data.draw(st.sampled_from([1, 2, 3, 4]))
        wanted = shard(others, data.draw(st.integers(0, others - 1)))
        for begin, end in ranges(wanted.size):
            regions = wanted.regions(begin, end)
            expected = torch.cat([_cut(whole, region).reshape(-1) for region in regions])
            assert torch.equal(reader.regions("w", regions), expected)


def test_the_reader_gives_names_shapes_rows_and_flags(tmp_path: Path) -> None:
    values = torch.randn(6, 4)
    moments = WriteItem.whole("optimizer.exp_avg.w", values * 2)
    write(tmp_path, {"a": [WriteItem.whole("w", values.bfloat16()), moments]}, iteration=7)
    with CheckpointReader(tmp_path) as reader:
        assert reader.names() == ["w"]
        assert reader.names(optimizer=True) == ["optimizer.exp_avg.w", "w"]
        assert (reader.shape("w"), reader.dtype("w")) == ((6, 4), torch.bfloat16)
        assert torch.equal(reader.slice("w", 2, 5), values.bfloat16()[2:5])
        assert reader.args["num_layers"] == 1
        assert reader.run["iteration"] == 7
        with pytest.raises(DamagedCheckpoint, match="no tensor v"):
            reader.tensor("v")


def test_rows_that_the_checkpoint_lacks_keep_what_was_there(tmp_path: Path) -> None:
    """A vocabulary with more padding than the checkpoint's."""
    values = torch.randn(4, 3)
    index = write(tmp_path, {"a": [WriteItem.whole("w", values)]}, iteration=3)
    assert parse_index(index.to_json()) == index
    assert read_index(tmp_path).iteration == 3
    flat = torch.full((18,), 7.0)
    with CheckpointReader(tmp_path) as reader:
        reader.read_into([TensorRead(flat, "w", [Region((0, 0), (6, 3))])])
    assert torch.equal(flat.view(6, 3)[:4], values)
    assert flat.view(6, 3)[4:].eq(7.0).all()


def _damaged(folder: Path) -> str:
    with pytest.raises(DamagedCheckpoint) as error:
        CheckpointReader(folder).verify()
    return str(error.value)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write(tmp_path, {"a.safetensors": [WriteItem.whole("w", torch.randn(50, 4))]})
    return tmp_path


def flipped(position: int) -> Callable[[bytes], bytes]:
    def flip(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[position] ^= 1
        return bytes(changed)

    return flip


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(old, new)


PART = "a.safetensors"
NO_INDEX = "index.json is cut short or no index"


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (PART, None, "a.safetensors is missing"),
        (PART, lambda content: content[:-1], "a.safetensors has {less} bytes instead of {size}"),
        *((PART, flipped(at), "a.safetensors has other bytes than were written") for at in (0, 9)),
        (PART, flipped(-1), "a.safetensors has other bytes than were written"),
        (INDEX_FILE, replaced(b'"num_layers": 1', b'"num_layers": 2'), "index.json was changed"),
        (INDEX_FILE, replaced(b'"format": 1', b'"format": 99'), "format 99"),
        *((INDEX_FILE, lambda _, text=text: text, NO_INDEX) for text in (b"", b"[]", b"null")),
        (INDEX_FILE, lambda _: b'{"checkpoint": 3}', NO_INDEX),
        (INDEX_FILE, lambda _: b"\x00", NO_INDEX),
        (INDEX_FILE, lambda _: b'{"a": 1}', NO_INDEX),
    ],
)
def test_damage_is_told_by_the_file(
    checkpoint: Path, name: str, change: Callable[[bytes], bytes] | None, said: str
) -> None:
    path = checkpoint / name
    size = path.stat().st_size
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    assert said.format(less=size - 1, size=size) in _damaged(checkpoint)


def test_an_index_cut_anywhere_is_refused(checkpoint: Path) -> None:
    text = (checkpoint / INDEX_FILE).read_text()
    for end in range(0, len(text), 7):
        (checkpoint / INDEX_FILE).write_text(text[:end])
        assert "index.json" in _damaged(checkpoint)


def test_a_folder_without_an_index_says_whose_it_is(tmp_path: Path) -> None:
    assert _damaged(tmp_path / "nothing") == "it does not exist"
    assert _damaged(tmp_path) == "it has no index.json"
    (tmp_path / "mp_rank_00").mkdir()
    assert "written by Megatron-LM" in _damaged(tmp_path)
    assert f"hetero convert import-megatron {tmp_path.parent}" in _damaged(tmp_path)


NAMES = [
    "embedding.word_embeddings.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.1.mlp.linear_fc1.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
]


def _model(*more: str, without: str = "") -> Index:
    whole = {name: StoredTensor((1,), "float32", ()) for name in (*NAMES, *more)}
    state = {f"optimizer.exp_avg.{name}": tensor for name, tensor in whole.items()}
    tensors = {name: tensor for name, tensor in (whole | state).items() if name != without}
    return Index(args={}, run={}, tensors=tensors, files={})


@pytest.mark.parametrize("missing", [*NAMES, *(f"optimizer.exp_avg.{n}" for n in NAMES)])
def test_a_missing_tensor_is_named(missing: str) -> None:
    with pytest.raises(DamagedCheckpoint, match="is missing") as error:
        require_complete_model(_model(without=missing), num_layers=2, tied=False)
    assert missing.split(".")[-2] in str(error.value)


def test_a_missing_layer_is_named() -> None:
    require_complete_model(_model(), num_layers=2, tied=False)
    with pytest.raises(DamagedCheckpoint, match="of layer 2 is missing"):
        require_complete_model(_model(), num_layers=3, tied=False)


def test_layers_for_multi_token_prediction_are_compared_with_each_other() -> None:
    ahead = [f"mtp.layers.{layer}.{part}.weight" for layer in (0, 1) for part in ("enorm", "hnorm")]
    sizes = {"num_layers": 2, "tied": False, "mtp_layers": 2}
    require_complete_model(_model(*ahead), **sizes)
    with pytest.raises(DamagedCheckpoint, match="of layer 1"):
        require_complete_model(_model(*ahead[:-1]), **sizes)
    with pytest.raises(DamagedCheckpoint, match="multi-token prediction are missing"):
        require_complete_model(_model(), **sizes)


def _saved(save: Path, *iterations: int) -> None:
    for number in iterations:
        write_items = {"x.safetensors": [WriteItem.whole("a", torch.full((3,), float(number)))]}
        write(save / folder_name(number), write_items, iteration=number)
    write_tracker(save, str(iterations[-1]))


def test_a_checkpoint_s_own_folder_beside_another_step_is_refused(tmp_path: Path) -> None:
    _saved(tmp_path, 10, 20)
    with CheckpointReader.open(tmp_path / "iter_0000010", iteration=10) as reader:
        assert reader.index.iteration == 10
    with pytest.raises(UserError, match="not that of --ckpt-step 20"):
        CheckpointReader.open(tmp_path / "iter_0000010", iteration=20)


WHOLE = torch.arange(24).view(4, 6)


def test_what_regions_have_in_common_with_the_target_is_copied_and_counted() -> None:
    regions = [Region((0, 0), (2, 3)), Region((3, 0), (1, 6)), Region((2, 4), (1, 2))]
    flat = torch.cat([WHOLE[:2, :3].reshape(-1), WHOLE[3], WHOLE[2, 4:]])
    target = torch.full((3, 6), -1)
    assert copy_regions(target, Region((1, 0), (3, 6)), flat, regions) == 11
    expected = torch.full((4, 6), -1)
    for region in regions:
        whole = Region.whole((4, 6))
        region_view(expected, whole, region).copy_(region_view(WHOLE, whole, region))
    assert torch.equal(target, expected[1:])
