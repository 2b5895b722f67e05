"""Triton kernels that occupy a GPU's stream for a multiple of the time since a stamp."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

if torch.version.hip:
    from triton.language.extra.hip import memrealtime as device_time
else:
    from triton.language.extra.cuda import globaltimer as device_time


@triton.jit
def stamp(began: tl.tensor) -> None:
    """Write the device's time."""
    tl.store(began, device_time())


@triton.jit
def spin(began: tl.tensor, per_mille: tl.tensor) -> None:
    """Return once `per_mille` thousandths of the time since the stamp have passed again."""
    now = device_time()
    until = now + (now - tl.load(began)) * per_mille // 1000
    while now < until:
        now = device_time()
