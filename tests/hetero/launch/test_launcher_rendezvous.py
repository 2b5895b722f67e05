"""The rendezvous of a job's launchers, over torchelastic's own."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.utils import get_socket_with_port

from hetero.launch.launcher_rendezvous import BACKEND, LauncherRendezvous, RendezvousSettings


def launcher(endpoint: str) -> LauncherRendezvous:
    """One of a job that runs on one node or two."""
    settings = RendezvousSettings(
        backend="c10d",
        endpoint=endpoint,
        nodes=2,
        node_rank=0,
        processes=1,
        timeout=30.0,
    )
    limits = {"last_call_timeout": 1, "read_timeout": 10}
    parameters = RendezvousParameters(BACKEND, endpoint, "a job", 1, 2, "127.0.0.1", **limits)
    return LauncherRendezvous(settings, parameters, lambda info: None, check_abort=lambda: None)


def join_other(node: LauncherRendezvous) -> RendezvousInfo:
    """As torchelastic's agent does: anew while this node is alone and another waits.

    Each may be alone for a round, where the other has not looked before the last call has ended.
    """
    while (info := node.next_rendezvous()).world_size == 1:
        while not node.num_nodes_waiting():
            time.sleep(0.1)
    return info


@mock.patch.dict(os.environ)
def test_a_node_that_joins_a_running_job_learns_where_the_ranks_meet():
    with get_socket_with_port() as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    first = launcher(endpoint)
    assert first.next_rendezvous().world_size == 1
    second = launcher(endpoint)
    with ThreadPoolExecutor() as threads:
        joining = threads.submit(join_other, second)
        while not first.num_nodes_waiting():
            time.sleep(0.1)
        infos = [join_other(first), joining.result()]
    assert [info.world_size for info in infos] == [2, 2]
    meeting_points = {info.bootstrap_store_info.master_port for info in infos}
    assert len(meeting_points) == 1
    first.shutdown()
