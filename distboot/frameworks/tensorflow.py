"""`init("tensorflow")`: a strategy of TensorFlow, on the given `TF_CONFIG` or on one that is made from the ranks.

The strategy is created here, as TensorFlow takes a cluster only before anything has used its runtime. The tasks of a
parameter server strategy that only serve never return from here.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from ..context import Context
from ..deadline import deadline
from ..errors import DistbootError
from ..exports import Exported
from ..lifeline import last_words
from ..rollcall.meeting import Meeting
from ..rollcall.ready import Ready
from ._joined import Gated, Meets, at_end, context, export, imported
from ._options import Options
from ._tf_checks import (
    DEFAULT,
    MIRRORED,
    MULTI_WORKER,
    in_our_words,
    refuse_job,
    refuse_nccl,
    refuse_options,
    refuse_used,
)
from ._tf_cluster import EVALUATOR, PARAMETER_SERVER, Plan
from ._tf_devices import own_gpus
from ._tf_keras import name_its_limits
from ._tf_serving import Chief, serve

_LARGEST_ACTION = 512  # bytes; struct sigaction has 152 (glibc on x86-64)


def on_cpu(options: Options) -> bool:
    """Whether no rank uses an accelerator, as far as is known: of parameter servers' ranks only the workers do."""
    refuse_options(options)  # here already, before the ranks meet
    return options.strategy == PARAMETER_SERVER


def exports(meeting: Meeting, environ: Mapping[str, str]) -> dict[str, str]:
    """What a script reads that creates its MultiWorkerMirroredStrategy itself; a given TF_CONFIG stays."""
    if meeting.placement.world_size == 1:
        return {}

    def step() -> tuple[Plan, Ready]:
        plan = Plan(meeting, environ, Options("tensorflow"))
        port = None if plan.is_given else plan.hold()
        if port is not None:
            port.detach()  # ours for as long as this process lives, and so for as long as the script does
        return plan, Ready(offer=plan.offer)

    return meeting.ready(step).completed().exports(environ)


def start(meeting: Meeting, exported: Exported, options: Options) -> Context:
    """Create the strategy; or serve, and end with the chief."""
    refuse_options(options)
    before = exported.environ_before()
    with ExitStack() as ports:

        def step() -> tuple[tuple[Any, Plan, list[int]], Ready]:
            plan = Plan(meeting, before, options)
            refuse_job(plan, meeting, options)
            port = plan.hold()
            if port is not None:
                ports.enter_context(port)
            tf = imported("tensorflow", "tensorflow", "pip install tensorflow")
            if not plan.is_alone:
                refuse_used(tf)
            gpus = own_gpus(tf, meeting, plan, options, before)
            refuse_nccl(options, gpus)
            return (tf, plan, gpus), Ready(offer=plan.offer)

        tf, plan, gpus = meeting.ready(step)
        cluster = plan.completed()
        export(meeting, exported, cluster.exports(before))
        adds: dict[str, Any] = {"task_type": cluster.task.kind, "task_id": cluster.task.index}
        meets: Meets = _Apart()
        if cluster.task.kind == EVALUATOR:
            adds["strategy"] = tf.distribute.get_strategy()
        elif options.strategy == PARAMETER_SERVER:
            if cluster.task.kind != "chief":
                serve(tf, meeting, cluster, gpus)
            chief = Chief(meeting)
            adds |= {"leave": chief.dismiss, "strategy": _of_servers(tf, meeting, chief)}
        else:
            adds["strategy"] = _of_equals(tf, meeting, options, len(gpus))
            meets = Gated(meeting, options)
        return context(meeting, exported, options, meets, **adds)


class _Apart:
    """A task whose script no other rank runs waits for nobody."""

    def barrier(self) -> None: ...

    def wait_for(
        self, what: str, limit: float, *, opens: bool, node: int | None = None, failure: str | None = None
    ) -> None: ...

    def close(self) -> None: ...


def _of_servers(tf: Any, meeting: Meeting, chief: Chief) -> Any:
    """The strategy of the chief."""
    try:
        with in_our_words("ParameterServerStrategy"), _in_time(meeting):
            strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    except BaseException:
        chief.close()
        raise
    at_end(well=chief.dismiss)  # of an exception the lifeline tells the other tasks
    name_its_limits(meeting.placement.who, "ParameterServerStrategy")
    return strategy


def _of_equals(tf: Any, meeting: Meeting, options: Options, gpus: int) -> Any:
    """A strategy of which every rank runs the script; with one process the one that suits the number of its GPUs."""
    is_alone = meeting.placement.world_size == 1
    chosen = options.strategy or (MULTI_WORKER if not is_alone else MIRRORED if gpus > 1 else DEFAULT)
    if chosen == DEFAULT:
        return tf.distribute.get_strategy()
    if chosen == MIRRORED:
        with in_our_words("MirroredStrategy"):
            return tf.distribute.MirroredStrategy()
    experimental = tf.distribute.experimental
    implementation = (options.backend or "auto").upper()
    communication = experimental.CommunicationOptions(
        timeout_seconds=options.timeout,
        implementation=getattr(experimental.CommunicationImplementation, implementation),
    )
    with in_our_words("MultiWorkerMirroredStrategy"), _in_time(meeting), _term_kept():
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=communication)
    if not is_alone:
        name_its_limits(meeting.placement.who, "MultiWorkerMirroredStrategy")
    return strategy


@contextmanager
def _in_time(meeting: Meeting) -> Iterator[None]:
    """A limit for TensorFlow's tasks to find each other, for which it would wait an hour, or for ever."""
    limit = meeting.join_timeout
    too_late = DistbootError(
        "join-timeout",
        f"TensorFlow's tasks did not find each other within {limit:g} s",
        "look at the output of the other ranks, at the addresses in TF_CONFIG, or for a firewall between the hosts",
    ).of(meeting.placement.who)
    with last_words.by_a_fork() as say, deadline(limit, too_late, say=say):
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
