"""The tasks of TensorFlow that only serve, workers and parameter servers: until the chief ends.

TensorFlow's server cannot be told to end. So each of these tasks has a connection to the socket of rank 0 where the
ranks have met, and waits for its end. The chief leaves it unaccepted, which costs it nothing, until it is done; if it
ends without a word, the kernel resets the connection, and the lifeline knows whether that was a failure.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from ..address import socket_said
from ..errors import DistbootError, tell
from ..lifeline.settings import settings
from ..rollcall.meeting import Meeting
from ._tf_checks import in_our_words
from ._tf_cluster import Cluster

_KEPT_ALIVE = 60  # seconds of silence; firewalls forget a connection after some minutes
_MOMENT = 3.0  # seconds for the lifeline to end us, if the chief has failed


class Chief:
    """Rank 0's end of the connections.

    Args:
        meeting: of all ranks; its listening socket is ours from now on.
    """

    def __init__(self, meeting: Meeting) -> None:
        file = meeting.take_listener()
        assert file is not None, "the chief is rank 0"
        self._listener = socket.socket(fileno=file)
        os.register_at_fork(after_in_child=self._listener.close)  # they end with the chief, not its last data loader

    def dismiss(self) -> None:
        """Let the tasks end, unless that was done."""
        with suppress(OSError), self._listener:
            self._listener.setblocking(False)
            while True:
                self._listener.accept()[0].close()

    def close(self) -> None:
        """Leave them without a word, as the script could not start."""
        self._listener.close()


def serve(tf: Any, meeting: Meeting, cluster: Cluster, gpus: list[int]) -> NoReturn:
    """Serve as a worker or a parameter server until the chief ends, and end this process.

    Args:
        tf: TensorFlow.
        meeting: of all ranks.
        cluster: with the task of this one.
        gpus: indexes of those that it uses.

    Raises:
        SystemExit: the chief has ended.
        DistbootError: the server did not start, or the chief is not there any more.
    """
    connection = _connected(meeting)
    config = tf.compat.v1.ConfigProto(device_count={} if gpus else {"GPU": 0})
    config.gpu_options.visible_device_list = ",".join(map(str, gpus))
    task, spec = cluster.task, tf.train.ClusterSpec(cluster.addresses)
    with in_our_words(f"the server of {task}"):
        server = tf.distribute.Server(spec, job_name=task.kind, task_index=task.index, config=config)
    try:
        connection.recv(1)
    except OSError:
        problem = "rank 0, the chief, has ended without a word"
        if settings(os.environ) is None:
            hint = "look at its output; the lifeline, which is off, would know whether it has failed"
            raise DistbootError("rank-failed", problem, hint) from None
        time.sleep(_MOMENT)
        tell(meeting.placement.who, f"{problem}, and so this task ends, too")
    del server  # which has served until here
    raise SystemExit(0)


def _connected(meeting: Meeting) -> socket.socket:
    """A task's end of its connection."""
    assert meeting.store_address is not None
    try:
        connection = socket.create_connection(meeting.store_address, timeout=meeting.join_timeout)
    except OSError as error:
        where = socket_said(*meeting.store_address)
        problem = f"rank 0, the chief, is not at {where} any more: {error}"
        raise DistbootError("rank-failed", problem, "look at its output") from None
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEPT_ALIVE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEPT_ALIVE // 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return connection
