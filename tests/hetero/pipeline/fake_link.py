"""A link whose other end is the test: tensors arrive when their receive is waited for."""

from __future__ import annotations

from collections import deque

import torch

from hetero.link.base import Work


class FakeWork(Work):
    """One transfer, to be waited for once."""

    def __init__(self, content: torch.Tensor, target: torch.Tensor):
        self._content, self._target = content, target
        self.waited = False

    def wait(self) -> None:
        assert not self.waited, "waited for twice"
        self._target.data.copy_(self._content)
        self.waited = True

    def is_completed(self) -> bool:
        return self.waited


class FakeLink:
    """Keeps what is sent, and hands out what is ready."""

    transport = "fake"
    receives_ahead = True

    def __init__(
        self, sent: deque[torch.Tensor] | None = None, ready: deque[torch.Tensor] | None = None
    ) -> None:
        self.sent = deque[torch.Tensor]() if sent is None else sent
        self.ready = deque[torch.Tensor]() if ready is None else ready
        self.sends: list[FakeWork] = []
        self.recvs: list[FakeWork] = []

    def send(self, tensor: torch.Tensor) -> Work:
        self.sent.append(tensor.detach().clone())
        self.sends.append(FakeWork(tensor, tensor.clone()))
        return self.sends[-1]

    def recv(self, tensor: torch.Tensor) -> Work:
        assert tensor.is_contiguous()
        content = self.ready.popleft()
        assert content.shape == tensor.shape
        self.recvs.append(FakeWork(content, tensor))
        return self.recvs[-1]
