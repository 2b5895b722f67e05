"""Keeps a report free of names: hosts, users, addresses and paths become words of their kind."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from hetero.tools.verification.job import NodeFacts

_PUBLIC = frozenset({"lo", "localhost", "root", "127.0.0.1", "::1", ""})
"""They say nothing of a machine."""
_SYSTEM = ("/dev", "/proc", "/sys", "/etc")
_ADDRESS = re.compile(
    r"(?<![\w.:])(?:(?:\d{1,3}\.){3}\d{1,3}|[0-9a-fA-F:]*:[0-9a-fA-F:]*:[0-9a-fA-F:.]*)"
)
_ABSOLUTE = re.compile(r"(?<![\w./~-])/[\w.+@-]+(?:/[\w.+@-]+)+/?")


class Redaction:
    """Replaces what the nodes said of themselves, and what looks like an address or a path."""

    def __init__(self, facts: Sequence[NodeFacts], *, others: Iterable[str] = ()) -> None:
        """`others` are further names of hosts, such as MASTER_ADDR."""
        words: dict[str, str] = {}
        nics = list(dict.fromkeys(nic for one in facts for nic in one.addresses))
        words |= {nic: f"nic{n}" for n, nic in enumerate(nic for nic in nics if nic != "lo")}
        for node, one in enumerate(facts):
            words |= {device: f"rdma{n}" for n, device in enumerate(one.rdma)}
            words |= {one.host: f"node{node}", one.host.partition(".")[0]: f"node{node}"}
            words[one.user] = "user"
            known = [a for each in one.addresses.values() for a in each if a not in _PUBLIC]
            for number, address in enumerate(known):
                words[address] = f"address{number}-of-node{node}"
        words |= {name: "address-of-node0" for name in others if name not in words}
        self._paths: dict[str, str] = {}
        for one in facts:
            # The longest first: one may lie in another.
            self._paths |= {path: place for place, path in one.places.items() if len(path) > 1}
        self._words = {w: stands for w, stands in words.items() if w not in _PUBLIC}
        longest = sorted(self._words, key=len, reverse=True)
        names = "|".join(map(re.escape, longest))
        self._names = re.compile(rf"(?<![\w.-])(?:{names})(?![\w-])" if names else r"(?!)")

    def text(self, text: str) -> str:
        for path in sorted(self._paths, key=len, reverse=True):
            text = text.replace(path, self._paths[path])
        text = self._names.sub(lambda found: self._words[found.group()], text)
        text = _ABSOLUTE.sub(lambda found: _path(found.group()), text)
        return _ADDRESS.sub(lambda found: _address(found.group()), text)

    def of(self, value: Any) -> Any:
        """A value of JSON, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(name): self.of(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(one) for one in value]
        return value


def _path(path: str) -> str:
    return path if path.startswith(_SYSTEM) else "PATH"


def _address(text: str) -> str:
    """What has the form of an address may be a time, or a list of numbers."""
    bare = text.rstrip(":.")
    with suppress(ValueError):
        ipaddress.ip_address(bare)
        return text if bare in _PUBLIC else f"ADDRESS{text[len(bare) :]}"
    return text
