"""A simulated step as a trace and as a picture."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from hetero.planner.prediction import simulate
from hetero.planner.schedule_picture import draw_schedule
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
    drawing = ElementTree.fromstring(draw_schedule(COSTS, PREDICTION))
    boxes = drawing.findall("{http://www.w3.org/2000/svg}rect")
    legend = 2 * 2 + 2
    updates = 2
    assert len(boxes) == legend + updates + 2 * 4 * 2
    texts = [text.text for text in drawing.findall("{http://www.w3.org/2000/svg}text")]
    assert "stage 1 on H100-SXM" in texts
