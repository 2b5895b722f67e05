"""The report of `hetero verify`: a table for the terminal, JSON, and one self-contained page.

It names nobody: hosts, users, addresses and paths become words of their kind.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetero.tools.reports import page
from hetero.tools.reports.text_table import aligned
from hetero.tools.verification.job import Job, NodeFacts
from hetero.tools.verification.verdict import Difference, Outcome, Verdict

JSON_FILE, HTML_FILE = "verify.json", "verify.html"
_MOST_ROWS = 60


@dataclass(frozen=True)
class Report:
    """Everything that is told."""

    job: Job
    verdicts: Sequence[Verdict]
    differences: Sequence[Difference]
    seconds: float
    stopped: str = ""
    """Why the steps that are missing were not run."""

    @property
    def passed(self) -> bool:
        """Whether every step was run and has passed."""
        return not self.stopped and all(verdict.passed for verdict in self.verdicts)

    @property
    def nature(self) -> str:
        """What of it is not real, in front of everything else."""
        words = ["simulated"] * self.job.simulated + ["emulated nodes"] * self.job.emulated
        return ", ".join(words)

    def as_mapping(self) -> dict[str, Any]:
        """What verify.json holds, without names unless they were asked for."""
        job, options = self.job, self.job.options
        record = {
            "format": 1,
            "passed": self.passed,
            "simulated": job.simulated,
            "emulated": job.emulated,
            "stopped": self.stopped,
            "seconds": round(self.seconds, 1),
            "nodes": [_node_mapping(number, facts) for number, facts in enumerate(job.facts)],
            "nodes_and_processes": [options.nnodes, options.nproc_per_node],
            "steps": [verdict.as_dict() for verdict in self.verdicts],
            "differs_from_simulated": [asdict(difference) for difference in self.differences],
        }
        record = json.loads(json.dumps(record))
        if options.names:
            return dict(record)
        redaction = Redaction(job.facts, others=[options.master_addr])
        return dict(redaction.of(record))


def _node_mapping(number: int, facts: Any) -> dict[str, Any]:
    return {
        "node": number,
        "host": facts.host,
        "vendor": facts.actual_vendor,
        "plays": list(dict.fromkeys(facts.vendors)) if facts.simulated else [],
        "gpus": list(facts.gpus),
        "processes": len(facts.vendors),
        "processor": facts.processor,
        "kernel": facts.kernel,
        "interfaces": len(facts.addresses),
        "rdma_devices": len(facts.rdma),
        "software": dict(facts.software),
    }


def write_report(report: Report, out: Path) -> dict[str, Any]:
    """Both files, whole or not at all; returns what they say."""
    record = report.as_mapping()
    html = page.render(_page(record, report.nature))
    contents = {out / JSON_FILE: json.dumps(record, indent=1) + "\n", out / HTML_FILE: html}
    page.write_all(contents)
    return record


def table(record: Mapping[str, Any]) -> Iterator[str]:
    """For the terminal: a row a step, then every failure with what to do."""
    rows = [["step", "verdict", "time", "differs", ""]]
    differs = [difference["step"] for difference in record["differs_from_simulated"]]
    for step in record["steps"]:
        count, seconds = differs.count(step["step"]), f"{step['seconds']:.0f} s"
        rows.append([step["step"], step["outcome"], seconds, str(count or "-"), step["summary"]])
    yield from aligned(rows, text={0, 1, 4})
    for step in record["steps"]:
        for failure in step["failures"]:
            yield ""
            yield f"{step['step']}: {step['outcome']}"
            yield f"  expected: {failure['expected']}"
            yield f"  seen:     {failure['seen']}"
            yield f"  to do:    {failure['remedy']}"
    if record["stopped"]:
        yield ""
        yield f"stopped: {record['stopped']}"


def verdict_line(record: Mapping[str, Any], nature: str) -> str:
    bad = [step["step"] for step in record["steps"] if step["outcome"] != Outcome.PASSED]
    what = "every step passed" if record["passed"] else f"not passed: {', '.join(bad) or 'stopped'}"
    count = len(record["differs_from_simulated"])
    return f"{what}; {count} differ from simulated{f' ({nature})' if nature else ''}"


def _page(record: Mapping[str, Any], nature: str) -> page.Page:
    steps = record["steps"]
    parts: list[page.Part] = [
        page.Table(
            head=("step", "verdict", "time", "what came of it"),
            rows=[(s["step"], s["outcome"], f"{s['seconds']:.0f} s", s["summary"]) for s in steps],
            numbers=frozenset({2}),
        )
    ]
    failures = [(step["step"], failure) for step in steps for failure in step["failures"]]
    if failures:
        parts.append(page.Text("heading", "What failed, and what to do"))
    for name, failure in failures:
        pairs = [("expected", failure["expected"]), ("seen", failure["seen"])]
        parts.append(page.Text("subheading", name))
        parts.append(page.Named("facts", [*pairs, ("to do", failure["remedy"])]))
    parts.append(page.Text("heading", "What differs from simulated vendors"))
    parts += _difference_parts(record["differs_from_simulated"])
    parts.append(page.Text("heading", "The nodes"))
    for node in record["nodes"]:
        parts.append(page.Text("subheading", f"node {node['node']}"))
        parts.append(page.Named("facts", _node_pairs(node)))
    for step in steps:
        parts.append(page.Text("heading", step["step"]))
        parts += _step_parts(step)
    notes = [f"{nature}: one vendor or one machine plays another"] if nature else []
    return page.Page(
        title=f"hetero verify{f' ({nature})' if nature else ''}",
        parts=parts,
        verdict=page.Verdict("passed" if record["passed"] else "not passed", record["passed"]),
        lead=verdict_line(record, nature),
        notes=[*notes, *([f"stopped: {record['stopped']}"] if record["stopped"] else [])],
    )


def _difference_parts(found: Sequence[Mapping[str, str]]) -> list[page.Part]:
    if not found:
        return [page.Text("paragraph", "Nothing: everything came out as on simulated vendors.")]
    rows = [(d["step"], d["what"], d["seen"], d["simulated"]) for d in found]
    head = ("step", "what", "here", "simulated")
    return [page.Table(head=head, rows=[("differs from simulated: " + r[0], *r[1:]) for r in rows])]


def _node_pairs(node: Mapping[str, Any]) -> list[tuple[str, str]]:
    software = node["software"]
    plays = f", plays {', '.join(node['plays'])} (simulated)" if node["plays"] else ""
    return [
        ("vendor", f"{node['vendor']}{plays}"),
        ("GPUs", ", ".join(node["gpus"]) or "none"),
        ("PyTorch", f"{software['torch']} ({software['torch_build']})"),
        ("megatron-core", software["megatron_core"]),
        ("hetero-megatron", software["project"]),
        ("Python", software["python"]),
        ("kernel", f"{node['kernel']}, {node['processor']}"),
        ("network", f"{node['interfaces']} interfaces, {node['rdma_devices']} RDMA devices"),
    ]


def _step_parts(step: Mapping[str, Any]) -> list[page.Part]:
    parts: list[page.Part] = [page.Text("paragraph", step["summary"])]
    figures = [(name, f"{value:.4g}") for name, value in step["figures"].items()]
    if figures:
        head = ("figure", "value")
        parts.append(page.Table(head=head, rows=figures, numbers=frozenset({1})))
    by_result: dict[str, list[str]] = {}
    for what, result in step["results"].items():
        by_result.setdefault(result, []).append(what)
    for result, whats in by_result.items():
        more = [f"and {len(whats) - _MOST_ROWS} more"] if len(whats) > _MOST_ROWS else []
        parts.append(page.Text("caption", f"{result}: {'; '.join([*whats[:_MOST_ROWS], *more])}"))
    parts += [page.Text("caption", note) for note in step["notes"]]
    return parts


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
