"""All ranks meet once, with this very process as the agent; `sidecar_start` is the other way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..base.errors import DistbootError, with_too_few_files
from ..base.text import log_line
from ..detection.placement import Placement
from ..rendezvous.plan import plan_of
from .session import Session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..rendezvous.events import Event


def ignore(_: Event) -> None:
    """Record no event."""


@contextmanager
def join_here(
    placement: Placement,
    environ: Mapping[str, str],
    join_timeout: float,
    *,
    failed: Callable[[Session, BaseException], object] = lambda _, __: None,
    wanted: Callable[[], None] = lambda: None,
    met: Callable[[], None] = lambda: None,
    record: Callable[[Event], object] = ignore,
    **more: Any,
) -> Iterator[Session]:
    """Meet all other ranks, with this very process as the agent.

    The connections end with the block.

    If the ranks do not meet, `failed` is called with the session so far, and why. Before and while
    they meet, `wanted` is called again and again, and may raise; once they have, `met` is. On rank
    0, `record` is called with each event of the job when it happens. The rest is as for `plan_of`.
    """
    # Here, as a process with a sidecar does not join by itself
    from ..rendezvous.join import Joined

    plan, problem = plan_of(placement, environ, join_timeout, **more)
    job = Session(placement, join_timeout)
    job.joined = Joined(plan, wanted=wanted, record=record)
    try:
        with joining(job, problem, failed), with_too_few_files():
            wanted()
            result = job.joined.join()
            met()
            job.take(result)
        yield job
    finally:
        job.close()


@contextmanager
def joining(
    job: Session, problem: DistbootError | None, failed: Callable[[Session, BaseException], object]
) -> Iterator[None]:
    """If the ranks do not meet in this block, call `failed` with why, and raise that.

    The `problem` of this rank comes before what other ranks report.
    """
    try:
        yield
    except BaseException as error:
        failed(job, problem or error)
        _say_if_stopped(job, error)
        if problem is not None and isinstance(error, DistbootError):
            raise problem from None
        raise


def _say_if_stopped(job: Session, error: BaseException) -> None:
    try:
        from ..report.start_failure import stopped_by  # here, as most jobs start
    except OSError:  # no more file can be opened, which the error itself says
        return
    name = stopped_by(error)
    if name is not None:
        log_line(
            job.placement.who,
            f"stopped by an external {name} before all ranks had joined",
        )
