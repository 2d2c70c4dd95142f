"""Whether this process trains a model of its own, as nothing connects it with the other ranks.

A script that starts no process group, or that wraps its model in nothing, runs well on all ranks, and
trains as many models as there are ranks. So a thread that looks at the process every other second
(`progress`) asks here, from the first look on at which the script trains:

    what connects it                                    | reported, since the first of these looks
    ----------------------------------------------------+---------------------------------------
    nothing that is known, or a world of one process    | after 10 s
    process groups of torch of several processes, none  | after 60 s: gradients may be accumulated
    of whose collective operations was called since     |
    collective operations, or several processes of      | not; and what was reported is taken back
    Horovod, MPI, JAX or TensorFlow, or a library that  |
    is not looked into                                  |

A rank that stays at one instruction is not reported: it may wait for a rank that hangs, in a collective
operation that has begun before. Any later collective operation ends the looks, even one at the end of
each epoch of a script that does not wrap its model. Where a private name of a framework is missing,
nothing is reported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from .training import can_see_gradients_of_jax, has_gradient_of_jax, is_of_torch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CONNECTED = ""  # what is reported where it is no separate model, or not any more
NO_GROUP = "no group"
NO_COLLECTIVE = "no collective"
HOROVOD = "horovod"
MPI = "mpi"
TENSORFLOW = "tensorflow"
JAX = "jax"
# What may be meant: stages that send to each other, or gradients that train nothing
DOUBTFUL = (NO_COLLECTIVE, JAX, TENSORFLOW)

_LEAST_LOOKS = 3  # at which the script trained
_WITHOUT_WORLD = 10.0  # seconds
_WITHOUT_COLLECTIVE = 60.0  # seconds
# What the scripts of Horovod import for each framework
_HOROVODS = ("horovod.torch.mpi_ops", "horovod.tensorflow.mpi_ops")
_OWN_NAME = "distributed"  # which scripts give to packages of their own, too
# Libraries by which ranks may share a model, and which are not looked into
UNKNOWN = (
    "bagua",
    "byteps",
    _OWN_NAME,  # of Dask
    "flwr",
    "hivemind",
    "ray",
    "torch_xla",
    "torchft",
    # Of torch: stages send to each other, which is no collective operation
    "torch.distributed.pipelining",
)


class SeparateModel:
    """What is known of the training of this process. Times are those of `time.monotonic`."""

    def __init__(self, counts: Mapping[str, int], now: float) -> None:
        self.is_over = False  # whether there is nothing more to look at
        self._counts = counts  # of collective operations, as the training began
        self._began = now
        self._looks = 0  # at which the script trained
        self._moves = 0  # looks at which the stack differed from the one before
        self._stack = ""
        self._is_of_torch = False  # whether torch was seen to train
        self._reported: str | None = None

    def look(
        self,
        counts: Mapping[str, int],
        now: float,
        *,
        trains: bool,
        stack: str,
        groups: int,
    ) -> str | None:
        """What to report; None: nothing new.

        Args:
            counts: of collective operations, by process group of torch of several processes.
            now: the time.
            trains: whether the script trains at this moment.
            stack: of the thread that trains, which shows whether it moves; empty: none trains.
            groups: how many of these groups there are.
        """
        self._looks += trains
        self._moves += stack != self._stack
        self._stack = stack
        self._is_of_torch |= is_of_torch(stack)
        has_groups = groups > 0
        sizes = {name: _size(read) for name, read in _WORLDS.items()}
        has_keras_on_jax = _keras_backend() == JAX
        ways = (
            self._are_used(counts),
            len(counts) < groups,  # a backend does not count
            max(sizes.values()) > 1,
            _is_left_alone(has_groups),
            has_keras_on_jax and not can_see_gradients_of_jax(),
        )
        if any(ways):
            self.is_over = True
            return self._report(CONNECTED)
        if has_keras_on_jax and not sizes[JAX]:  # its first batch is still being compiled
            return None
        reason = NO_COLLECTIVE
        seconds = _WITHOUT_COLLECTIVE
        looks = min(self._looks, self._moves)
        if not has_groups:
            if self._is_of_torch:  # it may have TensorFlow for its data or logs
                del sizes[TENSORFLOW]
            reason = _of_one(sizes)
            seconds = _WITHOUT_WORLD
            looks = self._looks
        has_lasted = now >= self._began + seconds
        if looks < _LEAST_LOOKS or not has_lasted:
            return None
        return self._report(reason)

    def _are_used(self, counts: Mapping[str, int]) -> bool:
        """Whether a collective operation was called since the training began."""
        before = self._counts
        return any(count > before.get(name, 0) for name, count in counts.items())

    def _report(self, reason: str) -> str | None:
        """A reason; None: that was reported last. CONNECTED, too: an earlier Python may have had one."""
        if reason == self._reported:
            return None
        self._reported = reason
        return reason


def _of_one(sizes: Mapping[str, int]) -> str:
    """The first framework that was started as in a job of one process, or that there is no group."""
    for name, size in sizes.items():
        if size == 1:
            return name
    return NO_GROUP


def _is_left_alone(has_groups: bool) -> bool:
    """Whether the script has another way to connect its ranks, or its user has chosen to have none."""
    has_distboot = "distboot" in sys.modules  # it has called `init("none")`, or will call it
    if has_distboot and not has_groups:
        return True
    if any(map(_is_library, UNKNOWN)):
        return True
    rpc: Any = sys.modules.get("torch.distributed.rpc.api")
    is_agent_set: Callable[[], bool] = getattr(rpc, "_is_current_rpc_agent_set", bool)
    return is_agent_set()


def _is_library(name: str) -> bool:
    """Whether a library was imported, and not a module of the script with its name: `distributed.py`."""
    module = sys.modules.get(name)
    if module is None:
        return False
    places = [*getattr(module, "__path__", ()), getattr(module, "__file__", None)]
    # One without a place is built in, for example; a package may be run from its own checkout
    is_package = len(places) > 1 and name != _OWN_NAME
    if is_package or not places[0]:
        return True
    folder = os.path.dirname(os.path.realpath(places[0]))
    own = [os.path.realpath(".")]
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is not None:
        own.append(os.path.dirname(os.path.realpath(script)))
    return folder not in own


def _size(read: Callable[[], int]) -> int:
    """How many processes a framework connects; 0: it was not started, or is not known."""
    with suppress(Exception):  # it was not imported, or is another version
        return read()
    return 0


def _size_of_horovod() -> int:
    """Of Horovod, whose module for each framework has the functions of its HorovodBasics.

    A script may import one of these modules, and start another one.
    """
    return max(_size(partial(_size_of_module, name)) for name in _HOROVODS)


def _size_of_module(name: str) -> int:
    """The world size by one of these modules.

    Raises:
        KeyError: it was not imported.
        ValueError: Horovod was not started for its framework.
    """
    module: Any = sys.modules[name]
    return int(module.size())


def _size_of_mpi() -> int:
    """Of mpi4py, which starts MPI as it is imported.

    MPI ends the process that asks for the size before that, or after its end.
    """
    mpi: Any = sys.modules["mpi4py.MPI"]
    is_running = mpi.Is_initialized() > mpi.Is_finalized()
    if not is_running:
        return 0
    return int(mpi.COMM_WORLD.Get_size())


def _size_of_jax() -> int:
    """Of JAX, where `jax.distributed.initialize` leaves what it was given, or has found.

    1 before that as well: then JAX counts as started if it is what the process trains with.
    """
    distributed: Any = sys.modules["jax._src.distributed"]
    size = int(distributed.global_state.num_processes)
    if size == 1:
        return int(has_gradient_of_jax())
    return size


def _size_of_tensorflow() -> int:
    """Of a process that trains with Keras, whose strategies leave their cluster in the context.

    A strategy of several workers sets the one of collective operations, one with parameter servers
    the other (TensorFlow 2.21, python/eager/context.py).
    """
    context: Any = sys.modules["tensorflow.python.eager.context"].context()
    server: Any = context._server_def or context._collective_ops_server_def  # noqa: SLF001
    if server is None:
        return int(_trains_with_tensorflow())
    tasks = [len(job.tasks) for job in server.cluster.job]
    return sum(tasks)


def _trains_with_tensorflow() -> bool:
    """Whether Keras does, as far as imports show; torch may have TensorFlow for its logs."""
    if "keras" in sys.modules:
        return _keras_backend() == TENSORFLOW
    return "torch" not in sys.modules


def _keras_backend() -> str:
    """The backend of Keras 3; empty if it was not imported, or is not known."""
    with suppress(Exception):
        keras: Any = sys.modules["keras"]
        return str(keras.backend.backend())
    return ""


# The first one that was started as in a job of one process is reported
_WORLDS: dict[str, Callable[[], int]] = {
    HOROVOD: _size_of_horovod,
    MPI: _size_of_mpi,
    JAX: _size_of_jax,  # before TensorFlow, which its scripts have for their data
    TENSORFLOW: _size_of_tensorflow,
}
