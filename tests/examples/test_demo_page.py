"""The demo's report: its numbers, and a page that says what they came to."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import Any

import pytest

from examples.quickstart import demo_page
from examples.quickstart.demo_page import command_text, render_page
from examples.quickstart.outcome import Outcome, Trained
from hetero.errors import UserError

VENDORS = ("amd", "nvidia")
# What the shapes of one iteration say must cross: 16 samples of 128 x 128 in fp32, twice.
CROSSES = 2 * 16 * 128 * 128 * 4


def link(rank: int, iterations: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "peer": 1 - rank,
        "stage": rank,
        "peer_stage": 1 - rank,
        "transport": "shm",
        "messages_sent": 3,
        "wait_seconds": 0.5,
        "is_boundary": True,
        "bytes_sent": iterations * CROSSES // 2,
    }


def run(
    title: str = "amd + nvidia",
    *,
    losses: tuple[float, ...] = (7.0, 6.5, 6.0),
    weights: str = "ab" * 32,
    simulated: bool = True,
    command: tuple[str, ...] = ("python", "pretrain_gpt.py", "--lr", "3e-3", "--text", "a b"),
) -> Trained:
    rows = [
        {"iteration": n, "loss": loss, "grad_norm": 1.0, "tokens_per_s": 100.0 * n}
        for n, loss in enumerate(losses, start=1)
    ]
    each = [
        {"stage": stage, "vendor": vendor, "simulated": simulated}
        for stage, vendor in enumerate(VENDORS)
    ]
    report = {
        "weights": {"sha256": weights},
        "simulated": simulated,
        "transport": "shm",
        "stages": [
            one | {"ranks": [n], "layers": [2], "parameters": 1000 + n}
            for n, one in enumerate(each)
        ],
        "ranks": [
            one | {"rank": n, "host": "host-a", "device": "x86_64 CPU"}
            for n, one in enumerate(each)
        ],
        "links": [link(0, len(losses)), link(1, len(losses)), {"is_boundary": False}],
    }
    return Trained(
        iterations=rows,
        report=report,
        title=title,
        seconds=12.0,
        command=command,
        environment=(("HETERO_VENDOR", "plan"),),
    )


def outcome(homogeneous: Trained | None = None, **changes: Any) -> Outcome:
    reached = Outcome(
        hetero=run(),
        homogeneous=homogeneous or run("homogeneous"),
        prompt="The value of",
        completion="The value of the",
        facts={"text": "pydoc"},
        seconds=30.0,
    )
    return replace(reached, **changes)


@pytest.fixture
def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which take a second each."""
    monkeypatch.setattr(demo_page, "curves", lambda _: [])


@pytest.mark.usefixtures("without_charts")
def test_equal_losses_and_weights_are_bit_identical() -> None:
    assert outcome().bit_identical
    assert 'class="verdict good"' in render_page(outcome())


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize(
    ("other", "losses", "weights"),
    [
        (run("homogeneous", losses=(7.0, 6.5, 6.0 + 1e-12)), False, True),
        (run("homogeneous", weights="cd" * 32), True, False),
    ],
)
def test_one_differing_bit_anywhere_is_not_identical(
    other: Trained, losses: bool, weights: bool
) -> None:
    mapping = outcome(other).as_mapping()
    assert (mapping["losses_identical"], mapping["weights_identical"]) == (losses, weights)
    assert mapping["bit_identical"] is False
    assert 'class="verdict bad"' in render_page(outcome(other))


def test_runs_of_different_lengths_are_refused() -> None:
    with pytest.raises(UserError, match="ends at iteration 3 and homogeneous at 2"):
        _ = outcome(run("homogeneous", losses=(7.0, 6.5))).bit_identical


def test_page_shows_the_numbers() -> None:
    page = render_page(outcome())
    for shown in (
        "bit-identical: <strong>yes</strong>",
        "7.000 → 6.000",
        f"{3 * CROSSES:,} were counted, the same",
        "Simulated.",
        "nvidia (simulated)",
        "host-a",
        "1,001",
        "ab" * 32,
        "through shared host memory",
        "--lr 3e-3",
        "The value of the",
    ):
        assert shown in page
    # Losses, their difference and gradient norms, each over iterations.
    charts = re.findall(r"<svg .*?</svg>", page, flags=re.DOTALL)
    for chart, label in zip(charts, ("loss", "difference, %", "gradient norm"), strict=True):
        assert f">{label}<" in chart
        assert chart.count(">iteration<") == 1


@pytest.mark.usefixtures("without_charts")
def test_page_names_simulation_and_unexpected_byte_counts() -> None:
    real = outcome(hetero=run(simulated=False), homogeneous=run("homogeneous", simulated=False))
    assert not real.simulated
    assert "imulated" not in (page := render_page(real))
    assert "they differ" not in page
    fewer = run()
    fewer.report["links"][0]["bytes_sent"] -= 1
    assert "they differ" in render_page(outcome(hetero=fewer))


def test_command_can_be_pasted_into_a_shell() -> None:
    many = tuple(word for n in range(40) for word in (f"--flag-{n}", f"value {n}"))
    record = run(command=("python", "pretrain_gpt.py", *many))
    text = command_text(record)
    assert shlex.split(text.replace("\\\n", "")) == ["HETERO_VENDOR=plan", *record.command]
    assert max(map(len, text.splitlines())) <= 105
    # No flag is parted from its value.
    assert all(line.startswith(("  --", "HETERO_VENDOR")) for line in text.splitlines())
