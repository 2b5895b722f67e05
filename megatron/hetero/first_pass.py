"""A context that is open during one forward pass of a module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch


class FirstPass:
    """Keeps a context open during the next forward pass of a module, and no other.

    What recomputation runs in the backward pass is not that module's forward.

    Args:
        opened: makes the context.
        failed: told why the context cannot be opened; the pass goes on without.
        undo: an exit stack; closing it removes the hooks.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        opened: Callable[[], AbstractContextManager[None]],
        *,
        failed: Callable[[Exception], None],
        undo: ExitStack,
    ) -> None:
        self._opened, self._failed, self._inner = opened, failed, ExitStack()
        self._handles = [
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end, always_call=True),
        ]
        undo.callback(self._close)

    def _begin(self, *_: Any) -> None:
        try:
            self._inner.enter_context(self._opened())
        except Exception as error:  # whatever it is, training goes on
            self._failed(error)

    def _end(self, *_: Any) -> None:
        self._close()

    def _close(self) -> None:
        self._inner.close()
        for handle in self._handles:
            handle.remove()
