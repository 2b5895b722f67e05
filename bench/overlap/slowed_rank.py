"""A rank of pretrain_gpt.py whose links at boundaries are slowed, phase by phase."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.overlap.phases import MEASURED, Phase, from_variable, phase_of
from hetero.version import exit_if_other_megatron


def slow_links(phases: Sequence[Phase]) -> list[Any]:
    """Have every link that is opened from now on follow the phases. Returns their wires.

    A schedule says what it expects once an iteration, on every rank, before anything is sent.
    """
    from megatron.hetero.import_core import import_megatron_core

    import_megatron_core()
    from bench.overlap.slow_wire import slow_down
    from hetero.link.flow import Flow
    from hetero.pipeline.communicator import PipelineCommunicator

    wires: list[Any] = []
    make, expect, iterations = Flow.__init__, PipelineCommunicator.expect, iter(range(2**31))

    def make_slowed(flow: Flow, *values: Any, **options: Any) -> None:
        make(flow, *values, **options)
        if options["is_outgoing"]:
            wires.append(slow_down(flow))

    def expect_in_phase(
        communicator: PipelineCommunicator, *, activations: int, gradients: int
    ) -> None:
        phase = phases[phase_of(phases, next(iterations))]
        for wire in wires:
            wire.bytes_per_s = phase.bytes_per_s
        ahead = phase.receives_early
        expect(communicator, activations=activations * ahead, gradients=gradients * ahead)

    Flow.__init__ = make_slowed  # type: ignore[method-assign,assignment]
    PipelineCommunicator.expect = expect_in_phase  # type: ignore[method-assign,assignment]
    return wires


def main() -> None:
    exit_if_other_megatron()
    wires = slow_links(from_variable())
    from megatron.hetero import pretrain

    code = pretrain.main()
    file = Path(f"{os.environ[MEASURED]}.{os.environ['RANK']}")
    file.write_text(json.dumps([list(wire.seconds().items()) for wire in wires]))
    sys.exit(code)


if __name__ == "__main__":
    main()
