"""The state of a run in Prometheus's text format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector as MetricSource

from hetero.observe.collect import Seen
from hetero.observe.state import seconds_by_kind

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_RANK = ("rank", "host", "vendor", "stage")
_LINK = ("rank", "peer", "transport", "boundary")


def exposition(
    state: Mapping[str, Any], seen: Mapping[int, Seen], incidents: Mapping[str, int]
) -> bytes:
    """All metrics. `seen`: the records of `state`; `incidents`: how many so far, by kind."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Source([*_run(state, incidents), *_ranks(state, seen), *_links(state)]))
    return generate_latest(registry)


class _Source(MetricSource):
    """Hands metrics that exist already to the library."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _run(state: Mapping[str, Any], incidents: Mapping[str, int]) -> Iterator[Metric]:
    progress = state["progress"]
    info = {
        "name": state["name"],
        "simulated": str(state["is_simulated"]).lower(),
        "emulated": str(state["is_emulated"]).lower(),
    }
    yield InfoMetricFamily("hetero_run", "What the run is.", value=info)
    yield _gauge("hetero_ranks", "Ranks of the job.", state["world_size"])
    yield _gauge("hetero_reporting_ranks", "Ranks that have sent a record.", state["ranks_seen"])
    yield _gauge("hetero_silent_ranks", "Ranks whose last record is too old.", len(state["silent"]))
    yield CounterMetricFamily(
        "hetero_iterations", "Iterations completed.", value=progress["completed_iterations"]
    )
    yield CounterMetricFamily("hetero_tokens", "Tokens trained on.", value=progress["tokens"])
    yield _gauge(
        "hetero_iteration_duration_seconds",
        "Duration of the last complete iteration.",
        progress["iteration_seconds"],
    )
    if (throughput := progress["tokens_per_second"]) is not None:
        yield _gauge(
            "hetero_throughput_tokens_per_second",
            "Tokens a second of the last complete iteration.",
            throughput,
        )
    if (prediction := state["prediction"]) is not None:
        yield _gauge(
            "hetero_predicted_throughput_tokens_per_second",
            "Tokens a second that the planner predicted for this plan.",
            prediction["tokens_per_second"],
        )
    for name, text in (
        ("loss", "Training loss of the last complete iteration."),
        ("grad_norm", "Gradient norm of the last complete iteration."),
        ("learning_rate", "Learning rate of the next iteration."),
        ("loss_scale", "Loss scale of the next iteration."),
        ("expert_load_max", "Largest load of an expert over the mean, mean over layers."),
        ("expert_load_max_of_any_layer", "Largest load of an expert over the mean of its layer."),
        ("dropped_token_fraction", "Share of tokens that experts dropped for lack of capacity."),
        ("fp8_products", "Products in fp8 of the last complete iteration, of all ranks."),
        ("fp8_clipped_tensors", "Tensors that a delayed fp8 scale did not reach."),
    ):
        if (value := progress["values"].get(name)) is not None:
            yield _gauge(f"hetero_{name}", text, value)
    if (goodput := progress["values"].get("goodput")) is not None:
        yield _gauge(
            "hetero_goodput_ratio",
            "Share of the wall time since the job's first start in steps that were kept.",
            goodput,
        )
    happened = CounterMetricFamily("hetero_incidents", "Incidents of all ranks.", labels=["kind"])
    for kind, count in sorted(incidents.items()):
        happened.add_metric([kind], count)
    yield happened
    shares = GaugeMetricFamily(
        "hetero_stage_time_ratio",
        "Share of the last seconds that the ranks of a stage spent so.",
        labels=["stage", "mesh", "kind"],
    )
    for stage in state["stages"]:
        for kind, value in (stage["shares"] or {}).items():
            shares.add_metric([str(stage["stage"]), str(stage["mesh"]), kind], value)
    yield shares
    slow = GaugeMetricFamily(
        "hetero_straggler_slowdown_ratio",
        "Time of a straggler's passes, relative to its peers of the same stage and vendor.",
        labels=["rank", "host", "stage"],
    )
    for each in state["stragglers"]:
        slow.add_metric([str(each["rank"]), each["host"], str(each["stage"])], each["factor"])
    yield slow


def _ranks(state: Mapping[str, Any], seen: Mapping[int, Seen]) -> Iterator[Metric]:
    def gauge(name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"hetero_rank_{name}", text, labels=_RANK)

    age = gauge("record_age_seconds", "Age of the last record of a rank.")
    iteration = gauge("iteration", "Iteration that is under way on a rank.")
    memory = gauge("device_memory_peak_bytes", "Peak of the device's allocations.")
    resident = gauge("resident_memory_bytes", "Resident memory of the process.")
    wait = gauge("wait_seconds", "How long a rank has been blocked by now.")
    in_phase = GaugeMetricFamily(
        "hetero_rank_phase_seconds",
        "How long a rank has been in its present phase.",
        labels=[*_RANK, "phase"],
    )
    spent = CounterMetricFamily(
        "hetero_rank_time_seconds",
        "Time of a rank by what it did: busy, waiting, data or rest.",
        labels=[*_RANK, "kind"],
    )
    data = CounterMetricFamily(
        "hetero_rank_data_wait_seconds", "Time blocked on the data loader.", labels=_RANK
    )
    for rank in state["ranks"]:
        one = seen.get(rank["rank"])
        if one is None:
            continue
        stage = "" if rank["stage"] is None else str(rank["stage"])
        labels = [str(rank["rank"]), rank["host"], rank["vendor"], stage]
        age.add_metric(labels, rank["age"])
        iteration.add_metric(labels, rank["iteration"])
        memory.add_metric(labels, rank["memory_bytes"])
        resident.add_metric(labels, rank["process"]["resident_bytes"])
        wait.add_metric(labels, max((each["seconds"] for each in rank["waits"]), default=0.0))
        in_phase.add_metric([*labels, rank["phase"]], rank["phase_seconds"])
        data.add_metric(labels, rank["data_wait_seconds"])
        for kind, seconds in seconds_by_kind(one.snapshot).items():
            spent.add_metric([*labels, kind], seconds)
    yield from (age, iteration, memory, resident, wait, in_phase, spent, data)


def _links(state: Mapping[str, Any]) -> Iterator[Metric]:
    def counter(name: str, text: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"hetero_link_{name}", text, labels=_LINK)

    counters = {
        "bytes_sent": counter("sent_bytes", "Bytes that a rank has sent over its links."),
        "bytes_received": counter("received_bytes", "Bytes that a rank has received."),
        "wait_seconds": counter("wait_seconds", "Time that a rank has waited for a link."),
        "retransmitted": counter("retransmissions", "Chunks sent once more over another rail."),
    }
    queued = GaugeMetricFamily(
        "hetero_link_queued_messages", "Messages posted and not completed.", labels=_LINK
    )
    rails = GaugeMetricFamily(
        "hetero_link_rails", "Rails of a rank's links.", labels=[*_LINK, "state"]
    )
    sums: dict[tuple[str, ...], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    by_state: dict[tuple[str, ...], float] = defaultdict(float)
    for rank in state["ranks"]:
        for link in rank["links"]:
            boundary = str(link["is_boundary"]).lower()
            key = (str(rank["rank"]), str(link["peer"]), link["transport"], boundary)
            for name in (*counters, "queued"):
                sums[key][name] += link[name]
            for rail in link["rails"]:
                by_state[*key, rail["state"]] += 1
    for labels, values in sums.items():
        for name, metric in counters.items():
            metric.add_metric(labels, values[name])
        queued.add_metric(labels, values["queued"])
    for labels, count in by_state.items():
        rails.add_metric(labels, count)
    yield from (*counters.values(), queued, rails)
