"""The strategies of TensorFlow, and which of them a job cannot have.

Each refusal comes before TensorFlow starts, which would fail later, hang, or train one model in
each process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..agent.session import Session
from ..base.errors import DistbootError, rendezvous_needed
from ..base.text import short_repr
from . import Options
from ._tf_cluster import CHIEF, EVALUATOR, PS, VARIABLE, WORKER, Cluster

MULTI_WORKER = "multi_worker_mirrored"
PARAMETER_SERVER = "parameter_server"
MIRRORED = "mirrored"
DEFAULT = "default"
STRATEGIES = (MULTI_WORKER, PARAMETER_SERVER, MIRRORED, DEFAULT)

# As in tf.distribute.experimental.CommunicationImplementation
_IMPLEMENTATIONS = ("auto", "ring", "nccl")

_HINT = "help(distboot.init) says what each of them does"


def refuse_options(options: Options, environ: Mapping[str, str]) -> None:
    """Refuse arguments that are wrong in every job with this environment."""
    strategy = options.strategy
    argument = f"strategy={short_repr(strategy)}"
    if strategy not in (None, *STRATEGIES):
        raise DistbootError(
            "usage",
            f"{argument} is not one of {', '.join(STRATEGIES)}",
            _HINT,
        )
    if (options.backend or "auto").lower() not in _IMPLEMENTATIONS:
        raise DistbootError(
            "usage",
            f"backend={short_repr(options.backend)} is not one of TensorFlow's: "
            f"{', '.join(_IMPLEMENTATIONS)}",
            _HINT,
        )
    if strategy not in (None, MULTI_WORKER) and _communicates(options):
        raise DistbootError(
            "usage",
            f"backend= and timeout= are for strategy={MULTI_WORKER!r}, not for {argument}",
            _HINT,
        )
    if strategy == PARAMETER_SERVER and VARIABLE not in environ:
        raise DistbootError(
            "usage",
            f"{argument} needs a TF_CONFIG with the tasks chief, worker and ps",
            "set TF_CONFIG for every process, as TFJob and Azure ML do; or leave strategy= out",
        )


def _communicates(options: Options) -> bool:
    """Whether an argument is for collective operations."""
    return (options.backend, options.timeout) != (None, None)


def refuse_job(cluster: Cluster, session: Session, options: Options) -> None:
    """Refuse a strategy that this job cannot have."""
    strategy = options.strategy
    if strategy in (MIRRORED, DEFAULT) and not cluster.is_alone:
        raise DistbootError(
            "usage",
            f"strategy={strategy!r} is for one process, and the job has {len(cluster.kinds)}: "
            "each would train its own model",
            f"leave strategy= out to have {MULTI_WORKER!r}, or start one process",
        )
    if strategy == PARAMETER_SERVER:
        _refuse_servers(cluster, session, options)
    elif cluster.has_servers:
        if strategy is not None:
            raise _unused_servers_error(f"strategy={short_repr(strategy)} does not use them")
        _refuse_servers(cluster, session, options)


def _refuse_servers(cluster: Cluster, session: Session, options: Options) -> None:
    """Refuse a job with parameter servers that cannot work."""
    if _communicates(options):
        raise _unused_servers_error(f"backend= and timeout= are for strategy={MULTI_WORKER!r}")
    if cluster.kind == EVALUATOR:
        return
    refuse_missing_tasks(cluster.kinds)
    if session.membership is None:
        raise rendezvous_needed("with parameter servers the chief tells the others when it ends")


def _unused_servers_error(why: str) -> DistbootError:
    return DistbootError(
        "usage",
        f"TF_CONFIG has parameter servers, and {why}",
        'init("tensorflow") without these arguments uses them',
    )


def refuse_missing_tasks(kinds: list[str]) -> None:
    """Refuse a cluster that has parameter servers but lacks another task that they need."""
    missing = [kind for kind in (CHIEF, WORKER, PS) if kind not in kinds]
    if missing:
        raise DistbootError(
            "broken-environment",
            f"TF_CONFIG has no {' and no '.join(missing)}, which ParameterServerStrategy needs",
            "it needs one chief, which runs the script (worker 0, if there are more), and at least "
            "one worker and one ps; on Azure ML worker_count: 2 and parameter_server_count: 1, "
            "or more",
        )


def refuse_used(tf: Any) -> None:
    """Refuse a TensorFlow that has started its runtime: it accepts a cluster only before that."""
    from tensorflow.python.eager import context as eager

    # TensorFlow itself tests this for "Collective ops must be configured at program startup"
    # (2.21, eager/context.py).
    if getattr(eager.context(), "_context_handle", None) is not None:
        raise DistbootError(
            "already-initialized",
            f"TensorFlow {tf.__version__} was used before init(), and accepts a cluster only at "
            "the start of a process",
            "make distboot.init() the first line of the script, before any tensor, dataset, model "
            "or strategy; after close() it cannot start again in the same process",
        )
