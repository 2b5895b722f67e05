"""A checkpoint that a tool wrote is one like any other; a run that is asked to stop notices."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from megatron.training.checkpoint.boxes import Box
from megatron.training.checkpoint.index import DamagedCheckpoint
from megatron.training.checkpoint.reader import CheckpointReader
from megatron.training.checkpoint.signals import StopSignal
from megatron.training.checkpoint.stream import Piece
from megatron.training.checkpoint.writer import write_release


def test_weights_written_file_by_file_are_read_as_one_checkpoint(tmp_path: Path) -> None:
    weights = {f"layer.{number}": torch.randn(3, 2) for number in range(3)}
    files = ([Piece.whole(name, tensor)] for name, tensor in weights.items())
    folder = write_release(tmp_path, files, args={"hidden_size": 2})
    assert folder == tmp_path / "release"
    with CheckpointReader.open(tmp_path) as reader:
        assert reader.args["hidden_size"] == 2
        for name, tensor in weights.items():
            assert torch.equal(reader.tensor(name), tensor)


def test_half_a_tensor_is_no_checkpoint(tmp_path: Path) -> None:
    half = Piece("w", (4,), torch.float32, (Box((0,), (2,)),), lambda: torch.ones(2))
    with pytest.raises(DamagedCheckpoint, match="tensor w is not whole"):
        write_release(tmp_path, [[half]], args={})
    assert list(tmp_path.iterdir()) == []


def test_a_signal_is_noticed_and_not_obeyed() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with StopSignal("SIGUSR1") as stop:
        assert not stop.seen
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.seen
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_forked_process_obeys_the_signal() -> None:
    with StopSignal("SIGUSR1"):
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGUSR1
