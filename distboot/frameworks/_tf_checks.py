"""What is refused before TensorFlow starts: options, jobs and processes with which it could not, or not as it looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import DistbootError, first_line, quoted
from ..rollcall.meeting import Meeting
from ._options import Options
from ._tf_cluster import EVALUATOR, PARAMETER_SERVER, Plan

MULTI_WORKER, MIRRORED, DEFAULT = "multi_worker_mirrored", "mirrored", "default"
_STRATEGIES = (MULTI_WORKER, PARAMETER_SERVER, MIRRORED, DEFAULT)
_IMPLEMENTATIONS = ("auto", "ring", "nccl")  # tf.distribute.experimental.CommunicationImplementation


def refuse_options(options: Options) -> None:
    """Refuse what cannot be right in any job.

    Raises:
        DistbootError: `usage`.
    """
    strategy = options.strategy
    said, problem = f"strategy={quoted(strategy)}", ""
    if strategy not in (None, *_STRATEGIES):
        problem = f"{said} is none: {', '.join(_STRATEGIES)}"
    elif (options.backend or "auto").lower() not in _IMPLEMENTATIONS:
        problem = f"backend={quoted(options.backend)} is none of TensorFlow's: {', '.join(_IMPLEMENTATIONS)}"
    elif (options.ps or options.evaluator) and strategy != PARAMETER_SERVER:
        problem = f"ps= and evaluator= are for strategy={PARAMETER_SERVER!r}, and {said}"
    elif (options.backend or options.timeout) and strategy not in (None, MULTI_WORKER):
        problem = f"backend= and timeout= are for strategy={MULTI_WORKER!r}, and {said}"
    if problem:
        raise DistbootError("usage", problem, "help(distboot.init) says what each of them does")


def refuse_job(plan: Plan, meeting: Meeting, options: Options) -> None:
    """Refuse a strategy that this job cannot have.

    Raises:
        DistbootError: with what is missing, or too much.
    """
    kinds, strategy = plan.kinds, options.strategy
    if strategy == PARAMETER_SERVER:
        if plan.task.kind != EVALUATOR or not plan.is_given:
            _refuse_servers(kinds, meeting, options)
    elif strategy in (MIRRORED, DEFAULT) and not plan.is_alone:
        raise DistbootError(
            "usage",
            f"strategy={strategy!r} is for one process, and the job has {len(kinds)}: each would train its own model",
            f"leave strategy= out to have {MULTI_WORKER!r}, or start one process",
        )
    elif "ps" in kinds:
        raise DistbootError(
            "usage",
            f"TF_CONFIG has parameter servers, and strategy={quoted(strategy)} has no use for them",
            f'init("tensorflow", strategy="{PARAMETER_SERVER}")',
        )


def _refuse_servers(kinds: list[str], meeting: Meeting, options: Options) -> None:
    """Refuse a job that is none of parameter servers; without a TF_CONFIG, `kinds` are as in the options."""
    missing = [kind for kind in ("chief", "worker", "ps") if kind not in kinds]
    if missing:
        raise DistbootError(
            "broken-environment",
            f"strategy={PARAMETER_SERVER!r}, and TF_CONFIG has no {' and no '.join(missing)}",
            "it takes one chief, which runs the script, and at least one worker and one ps, which serve it",
        )
    if options.ps not in (0, kinds.count("ps")):
        raise DistbootError(
            "usage", f"ps={options.ps}, and TF_CONFIG has {kinds.count('ps')} ps", "leave ps= out: TF_CONFIG says it"
        )
    if meeting.roster is None:
        raise DistbootError(
            "roll-call-needed",
            f"DISTBOOT_ROLL_CALL=0, and with strategy={PARAMETER_SERVER!r} the chief tells the others when it ends",
            "unset DISTBOOT_ROLL_CALL",
        )


def refuse_nccl(options: Options, gpus: list[int]) -> None:
    """Refuse NCCL on the CPU, for which TensorFlow takes something else and says so in a line among many.

    Raises:
        DistbootError: `backend-not-available`.
    """
    if (options.backend or "").lower() == "nccl" and not gpus:
        raise DistbootError(
            "backend-not-available",
            "backend='nccl', and TensorFlow sees no GPU in this process",
            "leave backend= out to get the right one for the device, or install a build with CUDA",
        )


def refuse_used(tf: Any) -> None:
    """Refuse a TensorFlow whose runtime is up: it takes no cluster any more, or loses what was made before.

    Raises:
        DistbootError: `already-initialized`.
    """
    from tensorflow.python.eager import context as eager

    # What its own "Collective ops must be configured at program startup" goes by (TensorFlow 2.21, eager/context.py).
    if getattr(eager.context(), "_context_handle", None) is not None:
        raise DistbootError(
            "already-initialized",
            f"TensorFlow {tf.__version__} was used before init(), and takes a cluster only at the start of a process",
            "make distboot.init() the first line of the script, before any tensor, dataset, model or strategy; after "
            "close() there is no second time in the same process",
        )


@contextmanager
def in_our_words(what: str) -> Iterator[None]:
    """What TensorFlow raises in this block is an error of ours.

    Raises:
        DistbootError: `strategy-failed`.
    """
    from tensorflow import errors

    try:
        yield
    except (errors.OpError, RuntimeError, ValueError) as error:
        raise DistbootError(
            "strategy-failed",
            f"TensorFlow could not start {what}: {first_line(error)}",
            "look at what TensorFlow printed above, and at the addresses in TF_CONFIG",
        ) from None
