"""Recovery: state in memory that outlives a rank and a node, and what a restart resumes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetero.recover.script_state import ScriptState


def state() -> ScriptState:
    """This rank's state in memory, for a script under `hetero run --hetero-restarts N`.

        state = hetero.recover.state()
        step, saved = state.load() or (0, None)
        ...
        state.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    Collective, after `init_process_group`. See `ScriptState`.
    """
    # The launcher imports this package without torch.
    from hetero.recover.script_state import ScriptState

    return ScriptState()
