"""Reports name no machine."""

from __future__ import annotations

import pytest

from hetero.tools.verification.report import Redaction
from tests.tools.verification.jobs import facts

REDACTION = Redaction([facts(0), facts(1)], others=["head.example.org"])


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("rank 1 on gpu-host-1.example.org (stage 1)", "rank 1 on node1 (stage 1)"),
        ("node 0 (gpu-host-0): timed out", "node 0 (node0): timed out"),
        ("over ens0f1 - ens1f1", "over nic0 - nic1"),
        ("10.4.7.2:42445 from 10.4.7.1", "address0-of-node1:42445 from address0-of-node0"),
        ("nobody at 192.168.3.4:29500", "nobody at ADDRESS:29500"),
        ("gid fe80:0000:0000:0000:0202:c9ff:fe00:1234 is", "gid ADDRESS is"),
        ("at [fd00::9]:29500", "at [ADDRESS]:29500"),
        ("last heard at 12:34:56, 10 s ago", "last heard at 12:34:56, 10 s ago"),
        ("see /scratch/someone/verify/node0/log.txt", "see OUT/node0/log.txt"),
        ("in /opt/secret/place/file.py, line 3", "in PATH, line 3"),
        ("needs /dev/infiniband/uverbs0", "needs /dev/infiniband/uverbs0"),
        ("PyTorch 2.13.0, someone's, 127.0.0.1", "PyTorch 2.13.0, user's, 127.0.0.1"),
        ("meet at head.example.org", "meet at address-of-node0"),
    ],
)
def test_names_become_words_of_their_kind(said: str, told: str) -> None:
    assert REDACTION.text(said) == told


def test_keys_and_lists_are_redacted_too() -> None:
    record = {"gpu-host-0": [{"nic": "ens0f1"}, 3, None, True]}
    assert REDACTION.of(record) == {"node0": [{"nic": "nic0"}, 3, None, True]}
