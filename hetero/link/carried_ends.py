"""The two ends of a link whose rings are connected by carriers: memory, words and closing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from hetero.device.device import Device
from hetero.link.carrier import Carrier, RingMemory
from hetero.link.control import Control
from hetero.link.failover import RailMonitor
from hetero.link.handshake import Rendezvous
from hetero.link.ring import CONTROL_BYTES, Direction, EndState
from hetero.link.ring_options import RingOptions
from hetero.link.ring_transfer import RingEnds
from hetero.link.shared_memory import SharedMemory, make_memory, pin

_CREDIT_SECONDS = 5.0


def host_memory(nbytes: int, device: Device, stack: ExitStack) -> tuple[SharedMemory, int]:
    """Pinned host memory and the device's address of it, freed when the stack unwinds."""
    memory = SharedMemory(make_memory(nbytes), nbytes)
    return memory, pin(memory, device, stack)


def host_rings(options: RingOptions, stack: ExitStack, *, reads_back: bool = False) -> RingMemory:
    """Both rings in host memory."""
    control, control_on_device = host_memory(CONTROL_BYTES, options.device, stack)
    rings, on_device = host_memory(2 * options.ring_bytes, options.device, stack)
    return RingMemory(control, control_on_device, rings.address, on_device, reads_back)


def make_ends(
    rendezvous: Rendezvous,
    options: RingOptions,
    memory: RingMemory,
    carrier: Carrier,
    control: Control,
    *,
    rails: Sequence[str],
    stack: ExitStack,
) -> RingEnds:
    """The ends of a link, which own what is on the stack from here on. Start the carrier first."""
    side, description = rendezvous.side, rendezvous.description
    local = EndState(memory.control, side)
    # What is here of the peer's end is a copy; the carrier brings it the entries.
    remote = EndState(memory.control, 1 - side, wake=carrier.wake)
    monitor = RailMonitor(
        carrier,
        control,
        rails=rails,
        local=local,
        remote=remote,
        name=f"{options.transport} {description.rank}-{description.peer}",
        peer=description.peer,
    )
    stack.callback(monitor.close)
    monitor.start()
    local.tell_peer = monitor.send_fault
    stack.callback(_flush_credits, carrier, monitor, local, remote)
    return RingEnds(
        outgoing=Direction(memory.control, side, memory.control_on_device),
        incoming=Direction(memory.control, 1 - side, memory.control_on_device),
        local=local,
        peer=remote,
        outgoing_ring=memory.rings_on_device,
        incoming_ring=memory.rings_on_device + options.ring_bytes,
        peer_has_ended=monitor.peer_has_ended,
        close=stack.pop_all().close,
    )


def _flush_credits(
    carrier: Carrier, monitor: RailMonitor, local: EndState, remote: EndState
) -> None:
    """Send the last credits before this end closes: the peer's sends wait for them."""
    if not (local.has_failed or remote.has_failed or monitor.peer_has_ended()):
        carrier.flush_credits(_CREDIT_SECONDS)
