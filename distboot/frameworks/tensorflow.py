"""`init("tensorflow")`: a strategy of TensorFlow, on the given `TF_CONFIG` or on one that is made from the ranks.

The strategy is created here, as TensorFlow takes a cluster only before anything has used its runtime. The tasks of a
parameter server strategy that only serve never return from here: they serve until the chief ends. TensorFlow's server
cannot be told to end. So each of these tasks waits at a key, which the chief opens when it is done; if it exits
otherwise, failure detection knows whether that was a failure.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, NoReturn

from ..agent.session import Session
from ..base.deadline import deadline
from ..base.errors import DistbootError
from ..base.settings import supervision_settings
from ..base.text import log_line
from ..context import Context
from ..detection.export import EnvTransaction
from ..host.accelerators import own_index
from ..rendezvous.messages import (
    SERVE,
    Arrive,
    Key,
    Ready,
)
from ..script import crash_hooks
from . import Options
from ._base import (
    at_end,
    context,
    export,
    imported,
    in_our_words,
)
from ._tf_cluster import (
    DEFAULT,
    EVALUATOR,
    MIRRORED,
    MULTI_WORKER,
    PARAMETER_SERVER,
    Cluster,
    refuse_job,
    refuse_missing_tasks,
    refuse_options,
    refuse_used,
)

_LARGEST_ACTION = 512  # bytes; struct sigaction has 152 (glibc on x86-64)
_CHIEF = Key(SERVE)  # which opens when the chief is done
_AGAIN = 86400.0  # seconds until a task waits there once more
_MOMENT = 3.0  # seconds for our monitor process to end us, if the chief has failed


def on_cpu(options: Options) -> bool:
    """Whether no rank uses an accelerator, as far as is known: of parameter servers' ranks only the workers do."""
    refuse_options(options)  # here, before the ranks meet
    return options.strategy == PARAMETER_SERVER


def exports(job: Session, environ: Mapping[str, str]) -> dict[str, str]:
    """What a script reads that creates its MultiWorkerMirroredStrategy itself; a given TF_CONFIG stays."""
    if job.placement.world_size == 1:
        return {}

    def step() -> tuple[Cluster, Ready]:
        cluster = Cluster(job, environ, Options("tensorflow"))
        if "ps" in cluster.kinds:
            refuse_missing_tasks(cluster.kinds)
        port = None if cluster.is_given else cluster.hold_port()
        if port is not None:
            # Ours for as long as this process lives, and so for as long as the script does
            port.detach()
        return cluster, Ready(offer=cluster.offer)

    return job.ready(step).completed().exports(environ)


def start(job: Session, exported: EnvTransaction, options: Options) -> Context:
    """Create the strategy; or serve, and end with the chief."""
    before = exported.environ_before()
    with ExitStack() as ports:

        def step() -> tuple[tuple[Any, Cluster, list[int]], Ready]:
            cluster = Cluster(job, before, options)
            refuse_job(cluster, job, options)
            port = cluster.hold_port()
            if port is not None:
                ports.enter_context(port)
            tf = imported("tensorflow")
            if not cluster.is_alone:
                refuse_used(tf)
            gpus = own_gpus(tf, job, cluster, options, before)
            if (options.backend or "").lower() == "nccl" and not gpus:
                # TensorFlow takes something else for it, and says so in a line among many.
                problem = "backend='nccl', and TensorFlow sees no GPU in this process"
                hint = "leave backend= out to get the right one for the device, or install a build with CUDA"
                raise DistbootError("backend-not-available", problem, hint)
            return (tf, cluster, gpus), Ready(offer=cluster.offer)

        tf, cluster, gpus = job.ready(step)
        export(job, exported, cluster.completed().exports(before))
        adds: dict[str, Any] = {"task_type": cluster.kind, "task_id": cluster.index}
        if cluster.kind == EVALUATOR or options.strategy == PARAMETER_SERVER:
            job.arrive = lambda _: None  # no other rank runs the script
        if options.strategy == PARAMETER_SERVER and cluster.kind not in ("chief", EVALUATOR):
            _serve(tf, job, cluster, gpus)
        adds["strategy"] = _strategy(tf, job, cluster, options, len(gpus))
        if cluster.kind == "chief" and options.strategy == PARAMETER_SERVER:
            adds["leave"] = lambda: _dismiss(job)
            at_end(well=adds["leave"])  # of an exception failure detection tells the other tasks
        return context(job, exported, options, **adds)


def _strategy(tf: Any, job: Session, cluster: Cluster, options: Options, gpus: int) -> Any:
    """That of a rank that runs the script; with one process the one that suits the number of its GPUs."""
    chosen = options.strategy or (
        MULTI_WORKER if not cluster.is_alone else MIRRORED if gpus > 1 else DEFAULT
    )
    if chosen == DEFAULT or cluster.kind == EVALUATOR:
        return tf.distribute.get_strategy()
    if chosen == PARAMETER_SERVER:
        with _starting("ParameterServerStrategy"), _in_time(job):
            return tf.distribute.ParameterServerStrategy(
                tf.distribute.cluster_resolver.TFConfigClusterResolver()
            )
    if chosen == MIRRORED:
        with _starting("MirroredStrategy"):
            return tf.distribute.MirroredStrategy()
    experimental = tf.distribute.experimental
    implementation = (options.backend or "auto").upper()
    communication = experimental.CommunicationOptions(
        timeout_seconds=options.timeout,
        implementation=getattr(experimental.CommunicationImplementation, implementation),
    )
    with _starting("MultiWorkerMirroredStrategy"), _in_time(job), _term_kept():
        return tf.distribute.MultiWorkerMirroredStrategy(communication_options=communication)


@contextmanager
def _in_time(job: Session) -> Iterator[None]:
    """A limit for TensorFlow's tasks to find each other, for which it would wait an hour, or for ever."""
    limit = job.join_timeout
    too_late = DistbootError(
        "join-timeout",
        f"TensorFlow's tasks did not find each other within {limit:g} s",
        "look at the output of the other ranks, at the addresses in TF_CONFIG, or for a firewall between the hosts",
    ).of(job.placement.who)
    with deadline(limit, too_late, say=crash_hooks.emit_error_for_parent):
        yield


@contextmanager
def _term_kept() -> Iterator[None]:
    """After this block SIGTERM does what it did before, also in a thread that is not the main one.

    TensorFlow's coordination service takes it, to tell the other tasks of a preemption, and the process does not end of
    it any more (tsl, preemption_notifier.cc).
    """
    libc = ctypes.CDLL(None)
    action = ctypes.create_string_buffer(_LARGEST_ACTION)
    libc.sigaction(signal.SIGTERM, None, action)
    try:
        yield
    finally:
        libc.sigaction(signal.SIGTERM, action, None)


def _dismiss(job: Session) -> None:
    """Let the tasks end that serve this one, unless that was done."""
    assert job.link is not None
    with suppress(DistbootError):  # its agent has ended; or a task has waited for longer than a day
        job.link.arrive(Arrive(_CHIEF, 0.0, leads=True))


def _serve(tf: Any, job: Session, cluster: Cluster, gpus: list[int]) -> NoReturn:
    """Serve as a worker or a parameter server until the chief ends, and end this process."""
    config = tf.compat.v1.ConfigProto(device_count={} if gpus else {"GPU": 0})
    config.gpu_options.visible_device_list = ",".join(map(str, gpus))
    spec = tf.train.ClusterSpec(cluster.addresses)
    with _starting(f"the server of {cluster.kind} {cluster.index}"):
        server = tf.distribute.Server(
            spec, job_name=cluster.kind, task_index=cluster.index, config=config
        )
    try:
        _wait_for_chief(job)
    except DistbootError:
        problem = "rank 0, the chief, exited without reporting"
        if not supervision_settings(os.environ).detects:
            hint = "look at its output; failure detection, which is off, would know whether it has failed"
            raise DistbootError("rank-failed", problem, hint) from None
        time.sleep(_MOMENT)
        log_line(job.placement.who, f"{problem}, and so this task ends, too")
    del server  # which has served until here
    raise SystemExit(0)


def _wait_for_chief(job: Session) -> None:
    """`DistbootError`: it has ended, and not said so."""
    assert job.link is not None
    while True:
        begin = time.monotonic()
        try:
            return job.link.arrive(Arrive(_CHIEF, _AGAIN))
        except DistbootError:
            if time.monotonic() < begin + _AGAIN:
                raise


def _starting(what: str) -> AbstractContextManager[None]:
    """What TensorFlow raises in this block is an error of ours."""
    from tensorflow import errors

    problem = f"TensorFlow could not start {what}"
    hint = "look at what TensorFlow printed above, and at the addresses in TF_CONFIG"
    return in_our_words("strategy-failed", problem, hint, errors.OpError, RuntimeError, ValueError)


def own_gpus(
    tf: Any, job: Session, cluster: Cluster, options: Options, environ: Mapping[str, str]
) -> list[int]:
    """Leave this rank all GPUs of its node, or one of them if several of the ranks there use some; their indexes."""
    found = tf.config.list_physical_devices("GPU")
    own = list(range(len(found)))
    if not found or cluster.is_alone:
        return own
    # The chief of parameter servers does not compute, and variables are on the CPU of a ps.
    idle = ("chief", "ps") if options.strategy == PARAMETER_SERVER else ()
    users = [rank for rank in _here(job) if cluster.kinds[rank] not in idle]
    rank = job.placement.rank
    if rank not in users:
        own = []
    elif len(users) > 1:
        index = own_index(len(found), environ, users.index(rank))
        if index is None:
            raise DistbootError(
                "too-few-accelerators",
                f"{len(users)} ranks of this node use GPUs, and this one sees {len(found)}",
                "start fewer processes per node (TensorFlow uses all GPUs of one), or show them more devices; "
                "CUDA_VISIBLE_DEVICES= trains on the CPU",
            )
        own = [index]
    if len(own) < len(found):
        tf.config.set_visible_devices([found[index] for index in own], "GPU")
    return own


def _here(job: Session) -> list[int]:
    """The ranks of this node, in the order of local ranks."""
    placement, membership = job.placement, job.membership
    if membership is not None:
        return list(membership.nodes[membership.node_of()[placement.rank]])
    # The roll call is off, and these are the numbers of TF_CONFIG, or of a launcher that counts nodes one by one.
    first = 0 if placement.num_nodes == 1 else placement.rank - (placement.local_rank or 0)
    return list(range(first, first + (placement.local_world_size or 1)))
