"""A simulated step as a trace and as a picture."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from hetero.planner.prediction import simulate
from hetero.planner.schedule_picture import colours_of, draw_schedule
from hetero.planner.schedule_timeline import chrome_trace
from hetero.planner.step_costs import step_costs
from tests.hetero.planner.placements import MODEL, cluster, mixed, profile

PLACEMENT = mixed(1, 1, batch=4)
COSTS = step_costs(PLACEMENT, model=MODEL, cluster=cluster(), profile=profile())
PREDICTION = simulate(COSTS, PLACEMENT, model=MODEL, cluster=cluster())


def test_the_trace_has_every_pass_and_transfer_inside_the_step() -> None:
    trace = json.loads(json.dumps(chrome_trace(COSTS, PREDICTION)))["traceEvents"]
    names = {event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert names == {
        "stage 0 on MI300X",
        "stage 1 on H100-SXM",
        "link 0 to 1",
        "link 1 to 0",
    }
    spans = [event for event in trace if event["ph"] == "X"]
    passes = [event for event in spans if event["cat"] in ("forward", "backward")]
    assert len(passes) == 2 * 4 * 2 + 2 * 4
    assert max(event["ts"] + event["dur"] for event in spans) <= PREDICTION.seconds * 1e6 + 1e-3


def test_the_picture_has_a_box_for_every_pass_and_is_valid_xml() -> None:
    drawing = ElementTree.fromstring(
        draw_schedule(COSTS, PREDICTION, {"MI300X": "#111111", "H100-SXM": "#222222"})
    )
    boxes = drawing.findall("{http://www.w3.org/2000/svg}rect")
    legend = 2 * 2 + 2
    updates = 2
    assert len(boxes) == legend + updates + 2 * 4 * 2
    texts = [text.text for text in drawing.findall("{http://www.w3.org/2000/svg}text")]
    assert "stage 1 on H100-SXM" in texts


def test_a_kind_of_node_has_the_colour_of_its_name_or_its_vendor_in_every_picture() -> None:
    found = colours_of({"red": "amd", "rack-Green": "nvidia", "MI300X": "amd", "H100": "nvidia"})
    alone = colours_of({"red": "nvidia", "green": "amd"})
    assert found["red"] == alone["red"] != alone["green"] == found["rack-Green"]
    assert len(set(found.values())) == 4
    by_vendor = colours_of({"MI300X": "amd", "H100": "nvidia"})
    assert by_vendor == {"H100": alone["green"], "MI300X": alone["red"]}
    many = {f"kind{number}": "nvidia" for number in range(20)}
    assert colours_of(many).keys() == many.keys()
