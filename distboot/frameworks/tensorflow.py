"""`init("tensorflow")`: a strategy of TensorFlow, on a `TF_CONFIG`, given or made from the ranks.

The strategy is created here, because TensorFlow accepts a cluster only before anything has used its
runtime. Where `TF_CONFIG` has parameter servers, they and the workers do not return from `init`:
they serve until the chief ends. TensorFlow's server has no call that ends it. So each of these
tasks waits at a key, which the chief opens when it is done. If the chief exits otherwise, failure
detection knows whether it failed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn

from ..agent.session import Session
from ..base.deadline import deadline
from ..base.errors import DistbootError
from ..base.settings import supervision_settings
from ..base.table import first_that_holds
from ..base.text import log_line
from ..context import Context
from ..detection import inherited
from ..detection.export import EnvTransaction
from ..detection.launchers.tf_config import has_servers
from ..host.accelerators import own_index
from ..rendezvous.messages import SERVE, Arrive, Key, Ready
from ..script import crash_hooks
from ..script.sys_exit import at_end
from . import Options
from ._base import context, export, imported, raised_as
from ._tf_cluster import CHIEF, EVALUATOR, PS, Cluster
from ._tf_options import (
    DEFAULT,
    MIRRORED,
    MULTI_WORKER,
    PARAMETER_SERVER,
    refuse_job,
    refuse_missing_tasks,
    refuse_options,
    refuse_used,
)

_SIGACTION_SIZE = 512  # bytes, at least; struct sigaction has 152 (glibc on x86-64)
_CHIEF_DONE = Key(SERVE)  # opened by the chief when it is done
_WAIT = 86400.0  # seconds until a serving task waits for the chief once more
_VERDICT = 3.0  # seconds for the monitor process to end this one, if the chief has failed


class _Prepared(NamedTuple):
    """What a rank has when it is ready to start."""

    tf: Any
    cluster: Cluster
    gpus: list[int]  # the indexes of those that this rank uses


def on_cpu(options: Options) -> bool:
    """Whether no accelerator is used. With parameter servers only the workers use one."""
    bare, _ = inherited.restored(os.environ)
    refuse_options(options, bare)  # here, before the ranks meet
    return has_servers(bare)


def exports(session: Session, environ: Mapping[str, str]) -> dict[str, str]:
    """The TF_CONFIG for a script that creates a MultiWorkerMirroredStrategy; a given one stays."""
    if session.placement.world_size == 1:
        return {}

    def step() -> tuple[Cluster, Ready]:
        cluster = Cluster(session, environ)
        if cluster.has_servers:
            refuse_missing_tasks(cluster.kinds)
        if not cluster.is_given:
            port = cluster.hold_port()
            assert port is not None
            # Keep the port as long as this wrapper lives, and so as long as the script
            port.detach()
        return cluster, Ready(offer=cluster.offer)

    return session.ready(step).completed().exports(environ)


def start(session: Session, exported: EnvTransaction, options: Options) -> Context:
    """Create the strategy; or serve, and end with the chief."""
    before = exported.environ_before()
    with ExitStack() as ports:
        prepared = session.ready(partial(_prepare, session, options, before, ports))
        cluster = prepared.cluster
        export(session, exported, cluster.completed().exports(before))
        if cluster.kind == EVALUATOR or cluster.has_servers:
            session.arrive = lambda _: None  # other ranks do not run the script
        if cluster.has_servers and cluster.kind not in (CHIEF, EVALUATOR):
            _serve(prepared, session)
        fields: dict[str, Any] = {
            "task_type": cluster.kind,
            "task_id": cluster.index,
            "strategy": _strategy(prepared, session, options),
        }
        if cluster.has_servers and cluster.kind == CHIEF:
            dismiss = partial(_dismiss, session)
            fields["leave"] = dismiss
            at_end(well=dismiss)  # after an exception failure detection ends the other tasks
        return context(session, exported, options, **fields)


def _prepare(
    session: Session, options: Options, environ: Mapping[str, str], ports: ExitStack
) -> tuple[_Prepared, Ready]:
    """Import TensorFlow, choose this rank's GPUs, and hold its port in `ports`."""
    refuse_options(options, inherited.restored(environ)[0])
    cluster = Cluster(session, environ)
    refuse_job(cluster, session, options)
    port = cluster.hold_port()
    if port is not None:
        ports.enter_context(port)
    tf = imported("tensorflow")
    if not cluster.is_alone:
        refuse_used(tf)
    gpus = own_gpus(tf, session, cluster, environ)
    if (options.backend or "").lower() == "nccl" and not gpus:
        # TensorFlow uses something else, and says so in one line of many
        raise DistbootError(
            "backend-not-available",
            "backend='nccl', but TensorFlow sees no GPU in this process",
            "leave backend= out to get the right one for the device, or install a build with CUDA",
        )
    return _Prepared(tf, cluster, gpus), Ready(offer=cluster.offer)


def _strategy(prepared: _Prepared, session: Session, options: Options) -> Any:
    """The strategy of a rank that runs the script."""
    distribute = prepared.tf.distribute
    chosen = options.strategy or _suitable(prepared)
    if chosen == DEFAULT or prepared.cluster.kind == EVALUATOR:
        return distribute.get_strategy()
    if chosen == PARAMETER_SERVER:
        resolver = distribute.cluster_resolver.TFConfigClusterResolver()
        with _starting("ParameterServerStrategy"), _in_time(session):
            return distribute.ParameterServerStrategy(resolver)
    if chosen == MIRRORED:
        with _starting("MirroredStrategy"):
            return distribute.MirroredStrategy()
    implementation = (options.backend or "auto").upper()
    communication = distribute.experimental.CommunicationOptions(
        timeout_seconds=options.timeout,
        implementation=distribute.experimental.CommunicationImplementation[implementation],
    )
    with _starting("MultiWorkerMirroredStrategy"), _in_time(session), _sigterm_restored():
        return distribute.MultiWorkerMirroredStrategy(communication_options=communication)


def _suitable(prepared: _Prepared) -> str:
    """The default strategy of a job."""
    return first_that_holds(
        (prepared.cluster.has_servers, PARAMETER_SERVER),
        (not prepared.cluster.is_alone, MULTI_WORKER),
        (len(prepared.gpus) > 1, MIRRORED),
        (True, DEFAULT),
    )


@contextmanager
def _in_time(session: Session) -> Iterator[None]:
    """Limit the time for TensorFlow's tasks to connect: it would wait an hour, or for ever."""
    limit = session.join_timeout
    too_late = DistbootError(
        "join-timeout",
        f"TensorFlow's tasks did not find each other within {limit:g} s",
        "look at the output of the other ranks, at the addresses in TF_CONFIG, or for a firewall "
        "between the hosts",
    ).of(session.placement.who)
    with deadline(limit, too_late, say=crash_hooks.emit_error_for_parent):
        yield


@contextmanager
def _sigterm_restored() -> Iterator[None]:
    """Restore the action of SIGTERM after this block, in whichever thread it runs.

    TensorFlow's coordination service handles SIGTERM to tell the other tasks of a preemption, and
    the signal no longer ends the process (tsl, preemption_notifier.cc).
    """
    libc = ctypes.CDLL(None)
    action = ctypes.create_string_buffer(_SIGACTION_SIZE)
    libc.sigaction(signal.SIGTERM, None, action)
    try:
        yield
    finally:
        libc.sigaction(signal.SIGTERM, action, None)


def _dismiss(session: Session) -> None:
    """Let the tasks end that serve the chief, unless that was done."""
    assert session.link is not None
    with suppress(DistbootError):  # the agent has ended, or a task has waited longer than a day
        session.link.arrive(Arrive(_CHIEF_DONE, 0.0, leads=True))


def _serve(prepared: _Prepared, session: Session) -> NoReturn:
    """Serve as a worker or a parameter server until the chief ends, then end this process."""
    tf, cluster, gpus = prepared
    devices = {}
    if not gpus:
        devices["GPU"] = 0
    config = tf.compat.v1.ConfigProto(device_count=devices)
    config.gpu_options.visible_device_list = ",".join(map(str, gpus))
    spec = tf.train.ClusterSpec(cluster.addresses)
    with _starting(f"the server of {cluster.kind} {cluster.index}"):
        server = tf.distribute.Server(
            spec, job_name=cluster.kind, task_index=cluster.index, config=config
        )
    try:
        _wait_for_chief(session)
    except DistbootError:
        _chief_is_lost(session)
    del server  # it served until here
    raise SystemExit(0)


def _chief_is_lost(session: Session) -> None:
    """The chief has ended without dismissing this task: failure detection says why."""
    problem = "rank 0, the chief, exited without reporting"
    if not supervision_settings(os.environ).detects:
        raise DistbootError(
            "rank-failed",
            problem,
            "look at its output; failure detection, which is off, would know whether it has failed",
        ) from None
    time.sleep(_VERDICT)
    log_line(session.placement.who, f"{problem}, and so this task ends, too")


def _wait_for_chief(session: Session) -> None:
    """Wait until the chief dismisses this task; `DistbootError`: it has ended without that."""
    assert session.link is not None
    while True:
        start = time.monotonic()
        try:
            return session.link.arrive(Arrive(_CHIEF_DONE, _WAIT))
        except DistbootError:
            if time.monotonic() < start + _WAIT:
                raise


def _starting(what: str) -> AbstractContextManager[None]:
    """Turn what TensorFlow raises in this block into `strategy-failed`."""
    from tensorflow import errors

    problem = f"TensorFlow could not start {what}"
    hint = "look at what TensorFlow printed above, and at the addresses in TF_CONFIG"
    return raised_as("strategy-failed", problem, hint, errors.OpError, RuntimeError, ValueError)


def own_gpus(tf: Any, session: Session, cluster: Cluster, environ: Mapping[str, str]) -> list[int]:
    """Choose and show this rank's GPUs: all of its node, or one if several ranks there use some."""
    found = tf.config.list_physical_devices("GPU")
    if not found or cluster.is_alone:
        return list(range(len(found)))
    own = _gpus_among(len(found), session, cluster, environ)
    if len(own) < len(found):
        tf.config.set_visible_devices([found[index] for index in own], "GPU")
    return own


def _gpus_among(
    count: int, session: Session, cluster: Cluster, environ: Mapping[str, str]
) -> list[int]:
    """The indexes of this rank's GPUs among the visible ones of its node."""
    idle: tuple[str, ...] = ()
    if cluster.has_servers:
        # A chief of parameter servers does not compute, and a ps has its variables on the CPU
        idle = (CHIEF, PS)
    users = [rank for rank in _ranks_of_node(session) if cluster.kinds[rank] not in idle]
    rank = session.placement.rank
    if rank not in users:
        return []
    if len(users) == 1:
        return list(range(count))
    index = own_index(count, environ, users.index(rank))
    if index is None:
        raise DistbootError(
            "too-few-accelerators",
            f"{len(users)} ranks of this node use GPUs, and this one sees {count}",
            "start fewer processes per node (TensorFlow uses all GPUs of one), or show them more "
            "devices; CUDA_VISIBLE_DEVICES= trains on the CPU",
        )
    return [index]


def _ranks_of_node(session: Session) -> list[int]:
    """The ranks of this node, in the order of local ranks."""
    placement = session.placement
    membership = session.membership
    if membership is not None:
        return list(membership.nodes[membership.node_of()[placement.rank]])
    # The rendezvous is off. The numbers are those of TF_CONFIG, or of a launcher that numbers
    # the ranks node by node.
    first = 0
    if placement.num_nodes != 1:
        first = placement.rank - (placement.local_rank or 0)
    return list(range(first, first + (placement.local_world_size or 1)))
