"""Ranks that train a model each, as nothing connects them, as a service of the job.

Each rank reports why it trains a model of its own (`script/separate_model`), and takes that back once
something connects it. One rank alone may train while the others wait for it; of several, rank 0
warns once all ranks have reported, or `_FOR_OTHERS` seconds after the last one that has. The report and the
summary have it as well, if it is so to the end.
"""

from __future__ import annotations

from collections import Counter
from math import inf

from ..base.text import ranks_said
from ..script.separate_model import (
    DOUBTFUL,
    HOROVOD,
    JAX,
    MPI,
    NO_COLLECTIVE,
    NO_GROUP,
    TENSORFLOW,
)
from .effects import Record, Say
from .facts import Facts
from .messages import SeparateModel
from .root_cause import RankState
from .service import Emit, Service

_LEAST_RANKS = 2  # one may train while the others wait for it
# Seconds after the last one has reported: each looks every other second, and at some looks a script
# that trains is not seen to
_FOR_OTHERS = 30.0
# By reason, what is missing, and what to do
_TEXTS = {
    NO_GROUP: (
        "no process group of torch connects them; start one (distboot.init(), or "
        "torch.distributed.init_process_group), and wrap the model (DistributedDataParallel, …)"
    ),
    NO_COLLECTIVE: (
        "they have process groups of torch, and called no collective operation for a minute; if "
        "nothing wraps the model (DistributedDataParallel, …), each rank trains one of its own"
    ),
    HOROVOD: (
        "Horovod was started on each as in a job of one process; python -m distboot run "
        "--framework horovod sets its variables"
    ),
    MPI: (
        "MPI was started on each as in a job of one process; start the job with mpirun, or "
        "srun --mpi=… (see srun --mpi=list)"
    ),
    JAX: (
        "JAX was started on each as in a job of one process; call jax.distributed.initialize() "
        "first, and start with python -m distboot run --framework jax, which sets its variables"
    ),
    TENSORFLOW: (
        "no strategy of TensorFlow connects them; use MultiWorkerMirroredStrategy, and start "
        "with python -m distboot run --framework tensorflow, which sets its variables"
    ),
}


class SeparateModelsService(Service):
    """Warns of ranks that train a model each."""

    def __init__(self, facts: Facts, emit: Emit) -> None:
        super().__init__(facts, emit)
        self.handlers = {SeparateModel: self._reported}
        self._reasons: dict[int, str] = {}  # by rank
        self._warn_at = inf
        self._has_warned = False  # of what still holds

    def tick(self, now: float) -> None:
        """Warn, if others had their time to report."""
        if now >= self._warn_at:
            self._warn()

    def due(self) -> float:
        """When other ranks have had their time to report; `inf`: none is waited for."""
        return self._warn_at

    def settle(self, now: float) -> None:
        """Warn without delay once no other rank can report."""
        del now
        if self._warn_at < inf and not self._may_report():
            self._warn()

    def _may_report(self) -> bool:
        """Whether a rank that has not reported may do so."""
        others = self._facts.members.keys() - self._reasons
        return any(self._facts.members[rank].is_open for rank in others)

    def _reported(self, member: RankState, message: SeparateModel, now: float) -> None:
        """A rank trains a model of its own, or not any more, which has no text."""
        self._reasons.pop(member.rank, None)
        if message.reason in _TEXTS:
            self._reasons[member.rank] = message.reason
        if self._has_warned:
            self._record()
        elif len(self._reasons) < _LEAST_RANKS:
            self._warn_at = inf
        else:
            self._warn_at = now + _FOR_OTHERS

    def _warn(self) -> None:
        """Print which ranks train separately, and record it from now on."""
        self._warn_at = inf
        self._has_warned = True
        self._record()
        who = ranks_said(sorted(self._reasons))
        reason = self._most_frequent()
        what = "train separately"
        if reason in DOUBTFUL:
            what = "may train separately"
        warning = Say(
            f"warning: {who} {what}: {_TEXTS[reason]}",
            event="separate_models",
            details={"ranks": sorted(self._reasons)},
        )
        self._emit(warning)

    def _record(self) -> None:
        """Record which ranks do so now; one alone may train while the others wait for it."""
        if len(self._reasons) >= _LEAST_RANKS:
            ranks = sorted(self._reasons)
            details = {"ranks": ranks, "reason": self._most_frequent()}
            self._emit(Record("separate_models", None, details))
        else:
            self._has_warned = False
            self._emit(Record("separate_models_over", None, {}))
            over = Say(
                "the warning of separate training no longer holds: the ranks have a way to connect",
                event="separate_models_over",
            )
            self._emit(over)

    def _most_frequent(self) -> str:
        counts = Counter(self._reasons.values())
        ((reason, _),) = counts.most_common(1)
        return reason
