"""What the watch of operators tells, and what it leaves alone."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hetero.observe.collect import Collector
from hetero.observe.operators.case import Case
from hetero.observe.operators.operator_list import Operator
from hetero.observe.operators.tolerance import Rounding
from hetero.observe.record import recorder
from hetero.observe.server import MetricsServer
from hetero.observe.state import RunDescription
from megatron.hetero.operator_watch import OperatorWatch
from megatron.hetero.rows_tape import RowsTape
from tests.live_views import state_of
from tests.megatron.launches import parsed

ENDS = ("embedding", "final_layernorm", "output_layer", "cross_entropy")


class NoOperation(TorchDispatchMode):
    """No tensor is touched, and so no device waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


def linear(name: str = "layers.2.linear_fc1", *, factor: float = 1.0) -> Case:
    hidden, weight = torch.randn(96, 64), torch.randn(128, 64)
    return Case(
        operator=name,
        kind="linear",
        rounding=Rounding(roundings=2, terms=128),
        settings={},
        inputs={"hidden": hidden},
        parameters={"weight": weight},
        outputs={"output": factor * F.linear(hidden, weight)},
    )


def unknown(name: str = "layers.2.activation") -> Case:
    """Of a kind that has no formula, so that to compare it is an error."""
    return Case(
        operator=name,
        kind="no kind",
        rounding=Rounding(roundings=2),
        settings={},
        inputs={"hidden": torch.ones(2, 2)},
        outputs={"output": torch.ones(2, 2)},
    )


class Watched:
    """A rank's watch, and what it has told."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.gathered: list[list[float]] = []
        self.begun = len(recorder().incidents())
        block = SimpleNamespace(ranks=(0,), replicas=range(1))
        identity = SimpleNamespace(
            vendor="amd", simulated=True, host="a", device="cpu", torch_version="2"
        )
        args = parsed(f"--hetero-check-operators 100 --hetero-operator-cases {folder}")
        args.padded_vocab_size = 128  # as the tokenizer has it
        job = SimpleNamespace(
            args=args,
            coordinate=SimpleNamespace(data=0, context=0, mesh=0, tensor=0),
            plan=SimpleNamespace(blocks=[block], meshes=[SimpleNamespace(tensor=1)]),
            rank=0,
            identities=[identity],
            statistics=SimpleNamespace(gather=self._gather),
        )
        console = SimpleNamespace(line=lambda _: None, warning=self.said.append)
        model = SimpleNamespace(chunks=[], first_layers=())
        self.watch = OperatorWatch(job, model, console)  # type: ignore[arg-type]

    def _gather(self, numbers: list[float]) -> list[list[float]]:
        self.gathered.append(numbers)
        return [numbers]

    def compare(self, *cases: Case, errors: dict[str, Exception] | None = None) -> None:
        tape: Any = SimpleNamespace(cases=list(cases), errors=errors or {})
        self.watch._tape = tape
        self.watch.compare()

    def incidents(self) -> list[Any]:
        return recorder().incidents()[self.begun :]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "cases")


@pytest.mark.parametrize("name", [*ENDS, "layers.2.linear_fc1"])
def test_a_wrong_operator_is_told_once_whether_or_not_it_has_a_layer(
    watched: Watched, name: str
) -> None:
    watched.compare(linear(name, factor=1.5))
    watched.compare(linear(name, factor=1.5))
    (told,) = watched.said
    short = name.rpartition(".")[2]
    assert told.startswith(f"warning: operator {short} ")
    assert "is wrong on rank 0 (amd, simulated, a)" in told
    (incident,) = watched.incidents()
    assert (incident["kind"], incident["operator"]) == ("operator", short)
    assert incident["layer"] == (2 if "layers" in name else None)
    assert Path(incident["case"]).is_file()


@pytest.mark.parametrize("factor", [1.5, torch.nan])
def test_the_live_view_shows_a_wrong_operator(watched: Watched, factor: float) -> None:
    watched.compare(linear(factor=factor))
    description = RunDescription(world_size=1)
    server = MetricsServer(Collector(recorder()), describe=lambda: description)
    try:
        shown = state_of(server.port)["incidents"][-1]
    finally:
        server.close()
    assert shown == watched.incidents()[-1]
    assert (shown["operator"], shown["vendor"], shown["exceeded"]) == ("linear_fc1", "amd", "error")


def test_each_layer_is_an_incident_and_the_operator_told_once(watched: Watched) -> None:
    watched.compare(*(linear(f"layers.{layer}.linear_fc1", factor=1.5) for layer in (2, 3)))
    assert [one["layer"] for one in watched.incidents()] == [2, 3]
    assert len(watched.said) == 1


def test_a_case_that_cannot_be_written_is_an_incident_all_the_same(
    watched: Watched, tmp_path: Path
) -> None:
    (tmp_path / "cases").write_text("no folder")
    watched.compare(linear(factor=1.5), linear("layers.3.linear_fc1", factor=1.5))
    assert [one["case"] for one in watched.incidents()] == [None, None]
    unwritten = [line for line in watched.said if "cannot write" in line]
    assert len(unwritten) == 1
    assert "rank 0 (amd, simulated, a)" in unwritten[0]
    assert "--hetero-operator-cases" in unwritten[0]


def test_an_operator_that_cannot_be_compared_hides_no_other(watched: Watched) -> None:
    for _ in range(2):
        watched.compare(unknown(), linear(factor=1.5))
    failed, wrong = watched.said
    assert failed.startswith("warning: operator activation of layer 2 cannot be compared on rank 0")
    assert "(ValueError: no formula for operators of kind 'no kind')" in failed
    assert "linear_fc1 of layer 2 is wrong" in wrong
    kinds = [one["kind"] for one in watched.incidents()]
    assert kinds == ["operator not compared", "operator"]


def test_an_operator_that_cannot_be_recorded_is_told_with_its_reason(watched: Watched) -> None:
    watched.compare(linear(), errors={"embedding": MemoryError("all\nof it")})
    (told,) = watched.said
    assert "operator embedding cannot be compared" in told
    assert "(MemoryError: all)" in told


def test_a_tape_forgets_the_one_operator_that_it_cannot_record() -> None:
    listed = {name: Operator(name, "linear", Rounding(roundings=2)) for name in ENDS[1:3]}
    tape = RowsTape(parsed(), listed, number=0, left_out={}, tensor=(0, 1))
    no_tensor: Any = "no tensor"
    for name, hidden in zip(listed, (no_tensor, torch.ones(4, 1, 8)), strict=True):
        tape.inputs(name, hidden=hidden)
        tape.outputs(name, {"output": torch.ones(4, 1, 8)}, {"weight": torch.ones(8, 8)})
    assert list(tape.errors) == [ENDS[1]]
    assert [case.operator for case in tape.cases] == [ENDS[2]]


@pytest.mark.parametrize("iteration", [1, 99, 101])
def test_a_step_that_is_not_checked_computes_and_exchanges_nothing(
    watched: Watched, iteration: int
) -> None:
    with NoOperation():
        body = watched.watch.during(iteration)
        assert isinstance(body, nullcontext)
        with body:
            pass
        watched.watch.compare()
        watched.watch.tell(iteration)
    assert watched.gathered == []


def test_a_checked_step_exchanges_its_errors_once(watched: Watched) -> None:
    with watched.watch.during(100):
        pass
    watched.watch.compare()
    watched.watch.tell(100)
    watched.watch.tell(100)
    assert len(watched.gathered) == 1
