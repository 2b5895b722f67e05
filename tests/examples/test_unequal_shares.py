"""The example that trains with unequal shares, as its page says to start it."""

from __future__ import annotations

import json
import sys

import pytest

from examples.unequal_shares import train_with_shares
from tests.commands import ended, printed
from tests.sentences import all_said_of

pytestmark = pytest.mark.usefixtures("preloaded_ranks")


def test_it_compares_equal_with_unequal_shares(tmp_path):
    results = tmp_path / "shares.json"
    slow = {"HETERO_VENDOR": "nvidia,amd", "HETERO_SLOWDOWN": "amd=4", "GLOO_SOCKET_IFNAME": "lo"}
    script = "examples/unequal_shares/train_with_shares.py"
    size = "--layers 1 --hidden 32 --vocabulary 64 --seq-length 32 --steps 2 --micro-batches 2"
    words = (
        f"-m hetero.run --standalone --nproc-per-node 2 {script} --with fsdp2 {size} "
        f"--batch-size 40 --rounds 1 --efficiency {results}"
    )
    assert "simulated" in printed(*words.split(), **slow)
    (run,) = json.loads(results.read_text())
    (only,) = run["rounds"]
    assert run["vendors"] == ["nvidia", "amd"]
    assert sum(only["shares"]) == 40
    assert min(only["shares"]) >= 2
    assert only["samples_per_second"].keys() == {"nvidia alone", "amd alone", "equal", "unequal"}
    assert run["efficiency"] == only["efficiency"]


def test_it_leaves_times_and_losses(tmp_path):
    """Two vendors of two ranks each, and fewer heads of keys than of queries."""
    results = tmp_path / "steps.json"
    played = {"HETERO_VENDOR": "nvidia*2,amd*2", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    size = "--layers 1 --hidden 32 --kv-heads 2 --vocabulary 64 --seq-length 32 --steps 3"
    words = (
        "-m hetero.run --standalone --nproc-per-node 4 "
        "examples/unequal_shares/train_with_shares.py "
        f"{size} --batch-size 8 --shares equal --lr 0.01 --results {results}"
    )
    printed(*words.split(), **played)
    (run,) = json.loads(results.read_text())
    assert run["vendors"] == ["nvidia", "nvidia", "amd", "amd"]
    assert run["flags"]["backend"] == "hetero"
    assert len(run["losses"]) == len(run["seconds"]) == 3
    assert run["losses"][-1] < run["losses"][0]
    # Keys and values of two heads in place of four.
    qkv, rest = 32 * 8 * (4 + 2 + 2), 32 * 32 + 3 * 32 * 128 + 2 * 32
    assert run["parameters"] == qkv + rest + 2 * 64 * 32 + 32


def test_a_flag_that_it_cannot_read_is_said_in_one_sentence_by_all_ranks_together():
    script = "examples/unequal_shares/train_with_shares.py"
    words = f"-m hetero.run --standalone --nproc-per-node 2 {script} --layers two"
    done = ended(*words.split())
    assert done.returncode == 2
    (sentence,) = [line for line in done.stderr.splitlines() if "] hetero.run: " not in line]
    assert sentence.startswith("error: argument --layers: invalid int value: 'two'")


def test_all_that_is_wrong_with_its_flags_is_said_at_once(monkeypatch, tmp_path):
    (tmp_path / "others.json").write_text("{}")
    words = "train --layers 0 --hidden 30 --seq-length 1 --efficiency nowhere/x.json --kv-heads 3"
    words += f" --results {tmp_path}/others.json"
    monkeypatch.setattr(sys, "argv", words.split())
    said = all_said_of(train_with_shares.parse)
    for words in (
        "--layers 0",
        "--hidden 30",
        "--seq-length 1",
        "nowhere/x.json: its folder",
        "--kv-heads 3",
        "others.json has other contents",
    ):
        assert words in said
