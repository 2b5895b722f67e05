"""The factor for a rank's loss that makes the mean over ranks the mean over the batch."""

from __future__ import annotations

import torch
import torch.distributed as dist


def loss_weight(
    count: int | torch.Tensor, *, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The number of ranks divided by the sum of `count` over them: a scalar in float64.

    `count` is how many terms this rank's loss has in this step, over all its micro-batches: its
    samples, or its tokens with a label. A tensor on the device that `group` communicates on avoids
    a copy. Multiply each **sum** of losses by the weight (a mean over n by n times the weight). DDP
    and FSDP2 average gradients over ranks, so the result is the gradient of the mean over the
    global batch. The average of the weighted losses over ranks is the loss of the global batch.

    Collective over `group`. Call it before the forward pass, so that it waits for no computation.
    If every count is 0, the loss and the gradients are zero.
    """
    if not isinstance(count, torch.Tensor):
        count = torch.tensor(count, device=_device_of(group))
    total = count.detach().to(torch.float64, copy=True)
    dist.all_reduce(total, group=group)
    return dist.get_world_size(group) / total.clamp(min=1)


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """A device whose tensors a group takes, preferably the CPU."""
    whole = group or dist.distributed_c10d._get_default_group()
    kinds = {device.type for device in whole._device_types}
    if "cpu" in kinds or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
