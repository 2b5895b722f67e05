"""Show a run while it runs, in a terminal: stages, ranks, links, who waits for whom, incidents.

    hetero top localhost:9400
    hetero top localhost:9400 --once

The address is the one that a run with --hetero-metrics-port prints; its page shows the same.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

if __name__ == "__main__":
    # As a script, only this file's folder would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero import cli

    sys.exit(cli.main(["top", *sys.argv[1:]]))

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hetero.errors import HeteroError
from hetero.text import counted, seconds
from hetero.tools.tool_command_line import Parser, run

_ANSWER_SECONDS = 30.0
_WATCHED_SECONDS = 5.0
_LARGEST = 1 << 28
_SHOWN_RANKS = 32
_SHOWN_LINKS = 16
_LONG_WAIT_SECONDS = 5.0
_STYLES = {"busy": "green", "waiting": "yellow", "data": "magenta", "rest": "bright_black"}


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("Show a run while it runs, in a terminal.")
    parser.add_argument(
        "address",
        type=_address,
        metavar="HOST:PORT",
        help="where it is shown: what a run with --hetero-metrics-port prints",
    )
    parser.add_argument("--once", action="store_true", help="print one state and end")
    parser.add_argument("--interval", type=seconds, default=2.0, help="seconds between two states")
    return parser


def _address(text: str) -> tuple[str, int]:
    """The host and the port of HOST:PORT, or of the page's URL."""
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no HOST:PORT; give what the run printed behind 'live view:'"
        )
    return host, port


class LiveView:
    """Asks a run for its state."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    def state(self) -> dict[str, Any]:
        """Raises HeteroError if nobody answers, or something else does."""
        where = f"{self._host}, port {self._port}"
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_ANSWER_SECONDS)
        try:
            connection.request("GET", "/state")
            answer = connection.getresponse()
            content = answer.read(_LARGEST)
        except TimeoutError as error:
            raise HeteroError(
                f"no answer from {where} within {_ANSWER_SECONDS:.0f} s; see whether rank 0 hangs"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise HeteroError(
                f"no run answers at {where} ({reason}); it may have ended, or not have "
                "--hetero-metrics-port; from another host it needs --hetero-metrics-address of "
                "training too"
            ) from error
        finally:
            connection.close()
        if answer.status != 200:
            text = content.decode(errors="replace").strip()[:300]
            raise HeteroError(f"{where} answered {answer.status}: {text}")
        try:
            state = json.loads(content)
            if not isinstance(state, dict) or not isinstance(state["ranks"], list):
                raise ValueError
        except (ValueError, KeyError) as error:
            raise HeteroError(f"what answers at {where} is no live view of a run") from error
        return state


def picture(state: Mapping[str, Any]) -> RenderableType:
    """A state for a terminal."""
    parts: list[RenderableType] = [_heading(state)]
    parts += [Text(text, style="red") for text in alarms(state)]
    if state["stages"]:
        parts.append(_stages(state))
    if any(edge["links"] for edge in state["edges"]):
        parts.append(_edges(state))
    parts.append(_ranks(state))
    if not state["stages"] and any(rank["links"] for rank in state["ranks"]):
        parts.append(_links(state))
    for incident in state["incidents"][-5:]:
        at = datetime.fromtimestamp(incident["time"]).strftime("%H:%M:%S")
        parts.append(Text(f"{at} rank {incident['rank']}, {incident['kind']}: {incident['text']}"))
    return Group(*parts)


def alarms(state: Mapping[str, Any]) -> list[str]:
    """What is wrong, a sentence each."""
    ranks = {rank["rank"]: rank for rank in state["ranks"]}
    lines = []
    for number in state["silent"][:8]:
        rank = ranks[number]
        lines.append(
            f"rank {number} on {rank['host']} is silent: its last record is {_time(rank['age'])} "
            f"old, in {rank['phase']}"
        )
    for each in state["stragglers"][:8]:
        played = " (simulated)" if ranks[each["rank"]]["is_simulated"] else ""
        lines.append(
            f"rank {each['rank']} on {each['host']} (stage {each['stage']}, {each['vendor']}"
            f"{played}) is slow: its passes take {each['factor']:.2f} times as long as its peers'"
        )
    for each in state["waiting_for"][:8]:
        if each["seconds"] < _LONG_WAIT_SECONDS:
            continue
        peer = ranks.get(each["rank"], {})
        does = (
            f", which is in {peer['phase']} since {_time(peer['phase_seconds'])}"
            if peer.get("phase")
            else ""
        )
        verb = "waits" if each["ranks_waiting"] == 1 else "wait"
        lines.append(
            f"{counted(each['ranks_waiting'], 'rank')} {verb} for rank {each['rank']} since "
            f"{_time(each['seconds'])}{does}"
        )
    return lines


def _heading(state: Mapping[str, Any]) -> Text:
    progress = state["progress"]
    of = f" of {progress['total_iterations']}" if progress["total_iterations"] else ""
    parts = [f"{state['ranks_seen']} of {counted(state['world_size'], 'rank')} report"]
    if progress["iteration"]:
        parts.append(f"iteration {progress['iteration']}{of}")
    if progress["is_evaluating"]:
        parts.append("evaluating")
    if (loss := progress["values"].get("loss")) is not None:
        parts.append(f"loss {loss:.4f}")
    if (goodput := progress["values"].get("goodput")) is not None:
        parts.append(f"goodput {goodput:.0%}")
    if progress["tokens_per_second"] is not None:
        parts.append(f"{progress['tokens_per_second']:,.0f} tokens/s")
    if (prediction := state["prediction"]) and prediction["reached"] is not None:
        parts.append(f"{prediction['reached']:.0%} of the predicted throughput")
    if progress["iteration_seconds"]:
        parts.append(f"{_time(progress['iteration_seconds'])} an iteration")
    played = [
        word
        for word, is_so in (
            ("vendors are simulated", state["is_simulated"]),
            ("hosts are emulated", state["is_emulated"]),
        )
        if is_so
    ]
    return Text(", ".join([*parts, *played]), style="bold")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True)
    table.add_column(columns[-1], overflow="ellipsis")  # the one that a narrow terminal cuts
    return table


def _bar(shares: Mapping[str, float] | None, width: int = 16) -> Text:
    bar = Text()
    for kind, style in _STYLES.items():
        cells = 0 if shares is None else round(shares[kind] * width)
        bar.append("█" * cells, style=style)
    return bar


def _stages(state: Mapping[str, Any]) -> Table:
    meshes = {mesh["mesh"]: mesh for mesh in state["meshes"]}
    slowest = state["bottleneck"] or {"stage": None, "mesh": None}
    table = _table("stage", "vendor", "ranks", "layers", "time", "busy", "waiting", "data", "")
    for stage in state["stages"]:
        mesh, shares = meshes[stage["mesh"]], stage["shares"]
        first, last = stage["ranks"]
        is_slowest = (stage["stage"], stage["mesh"]) == (slowest["stage"], slowest["mesh"])
        table.add_row(
            str(stage["stage"]),
            mesh["vendor"] + (" (simulated)" if mesh["is_simulated"] else ""),
            str(first) if first == last else f"{first}-{last}",
            str(stage["layers"]),
            _bar(shares),
            *(("–",) * 3 if shares is None else (f"{shares[k]:.0%}" for k in list(_STYLES)[:3])),
            "waits least" if is_slowest else "",
        )
    return table


def _edges(state: Mapping[str, Any]) -> Table:
    table = _table("stages", "transport", "forward", "backward", "rails", "queued", "oldest")
    for edge in state["edges"]:
        if not edge["links"]:
            continue
        between = f"{edge['source']} – {edge['target']}"
        if edge["source"] == edge["target"]:
            between = f"inside {edge['source']}"
        table.add_row(
            between,
            ", ".join(edge["transports"]) + (" (boundary)" if edge["is_boundary"] else ""),
            _rate(edge["forward_per_second"]),
            _rate(edge["backward_per_second"]),
            ", ".join(f"{count} {name}" for name, count in edge["rails"].items()),
            str(edge["queued"]),
            _time(edge["oldest_seconds"]) if edge["queued"] else "",
        )
    return table


def _ranks(state: Mapping[str, Any]) -> RenderableType:
    """All of a few ranks; of many, those that have been in their phase for longest."""
    ranks = [rank for rank in state["ranks"] if rank["phase"] is not None]
    shown = ranks
    if len(ranks) > _SHOWN_RANKS:
        shown = sorted(ranks, key=lambda rank: -rank["phase_seconds"])[:_SHOWN_RANKS]
    table = _table("rank", "host", "stage", "does", "since", "batch", "waits for, or last call")
    for rank in shown:
        call = rank["calls"][-1] if rank["calls"] else None
        does = rank["waits"][0]["what"] if rank["waits"] else ""
        if not does and call is not None:
            does = f"{call['operation']} {call['sequence']} of {call['group']}, {call['state']}"
        table.add_row(
            str(rank["rank"]),
            rank["host"],
            "" if rank["stage"] is None else str(rank["stage"]),
            rank["phase"],
            _time(rank["phase_seconds"]),
            str(rank["micro_batch"] or ""),
            Text(does, overflow="ellipsis", no_wrap=True),
        )
    if len(shown) < len(ranks):
        rest = f"{len(ranks) - len(shown)} more ranks, in their phases for a shorter time"
        return Group(table, Text(rest, style="bright_black"))
    return table


def _links(state: Mapping[str, Any]) -> Table:
    table = _table("from", "to", "transport", "sends", "receives", "queued", "rails")
    links = [(rank["rank"], link) for rank in state["ranks"] for link in rank["links"]]
    for rank, link in links[:_SHOWN_LINKS]:
        rails = (
            rail["name"] + ("" if rail["state"] == "up" else f" {rail['state']}")
            for rail in link["rails"]
        )
        table.add_row(
            str(rank),
            str(link["peer"]),
            link["transport"],
            _rate(link["sent_per_second"]),
            _rate(link["received_per_second"]),
            str(link["queued"]),
            ", ".join(rails),
        )
    return table


def _time(value: float) -> str:
    if value < 1:
        return f"{value * 1e3:.0f} ms"
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.0f} min"


def _rate(value: float | None) -> str:
    if value is None:
        return "–"
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B/s"


def show(args: argparse.Namespace) -> str:
    """Show states until the run or the user ends it. Raises HeteroError."""
    view, console = LiveView(*args.address), Console()
    state = view.state()
    if args.once:
        if not state["has_rates"]:
            time.sleep(_WATCHED_SECONDS)  # rates are differences between two records
            state = view.state()
        console.print(picture(state))
        return ""
    screen = console.is_terminal
    with Live(picture(state), console=console, auto_refresh=False, screen=screen) as on:
        while True:
            time.sleep(args.interval)
            on.update(picture(view.state()), refresh=True)


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run(lambda: show(args))
