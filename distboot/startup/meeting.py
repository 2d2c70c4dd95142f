"""How the ranks meet in `init`, and where the agent is.

| the agent is | when |
|---|---|
| in the wrapper around this process | the ranks have met already |
| a process beside this one, the sidecar | there are several ranks, or a report is to be written |
| a thread of this process | the sidecar did not start: failure detection is off |
| a part of `init` | no file can be opened for a sidecar: the ranks are told, and `init` fails |
| not there | the process is alone, or the rendezvous is off |
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

from .. import frameworks
from ..agent.joining import ignore, join_here, joining
from ..agent.session import Session, alone
from ..base import settings
from ..base.errors import DistbootError, too_few_files
from ..base.text import log_line
from ..detection.export import (
    EnvTransaction,
    require_master,
    thread_variables,
    wait_until_resolves,
)
from ..detection.placement import Placement
from ..rendezvous.events import ALL_CALLED, CALLED, clock_time, own_clock
from ..rendezvous.plan import plan_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..agent.link import AgentLink
    from ..agent.link_messages import StartEnded
    from ..agent.sidecar_start import Sidecar
    from ..rendezvous.events import Event
    from ..rendezvous.membership import JoinResult
    from .start_report import StartReport

_starts = itertools.count(1)  # numbers the framework starts of this process below a wrapper


class Call(NamedTuple):
    """One call of `init`."""

    placement: Placement
    options: frameworks.Options
    environ: Mapping[str, str]  # of this process; `exported` changes it
    called: float  # when, in seconds since the boot of this host
    join_timeout: float
    supervision: settings.SupervisionSettings
    launcher: str | None  # that the caller named


class Part(NamedTuple):
    """The part of this rank in the job: what `plan_of` needs besides its placement."""

    framework: str
    on_cpu: bool
    hosts: Sequence[str] = ()  # where rank 0 may be, if that is more than its address
    problem: DistbootError | None = None  # why this rank cannot take part


class AgentAround(NamedTuple):
    """The agent in the wrapper around this process."""

    link: AgentLink
    result: JoinResult


def meet(
    call: Call, exported: EnvTransaction, around: AgentAround | None
) -> AbstractContextManager[Session]:
    """Let the ranks meet. Without a rendezvous the session holds the placement alone."""
    if around is not None:
        return _with_wrapper(call, around)
    call, part = _planned(call)
    has_rendezvous = settings.rendezvous_setting(call.environ)
    path = call.supervision.report
    if has_rendezvous and call.placement.world_size == 1 and path is None:
        # A process that is alone needs no agent
        return join_here(call.placement, call.environ, call.join_timeout, **part._asdict())
    from .start_report import StartReport, warn_of_no_report

    tell = None
    if call.supervision.keeps_events:
        tell = _tell_agent
    report = StartReport(path, call.placement, tell)
    if not has_rendezvous:
        if path is not None:
            warn_of_no_report(call.placement, path)
        wait_until_resolves(call.placement, call.join_timeout)
        return nullcontext(alone(call.placement, call.join_timeout))
    from ..agent.sidecar_start import Sidecar

    unwritable = report.disable_if_unwritable()
    if unwritable is not None:  # there is neither a report nor a journal
        part = part._replace(problem=unwritable)
        call = call._replace(supervision=call.supervision._replace(report=None))
    try:
        sidecar = Sidecar()
    except OSError as error:
        return _without_sidecar(call, part, error, report)
    return _with_sidecar(call, part, sidecar, report, exported)


def _tell_agent(session: Session, ended: StartEnded) -> None:
    assert session.link is not None
    session.link.start_ended(ended)


def _planned(call: Call) -> tuple[Call, Part]:
    """The call with the address of rank 0, and the part of this rank."""
    placement = call.placement
    part = Part(call.options.describe(), frameworks.on_cpu(call.options))
    is_mpi = call.options.framework == "mpi"
    if placement.master_addr is None or is_mpi:
        from ..frameworks import mpi  # here, as most jobs know where rank 0 is

        placement, hosts = mpi.located(placement, call.join_timeout, used=is_mpi)
        part = part._replace(hosts=hosts)
    placement = require_master(placement, in_init=True)
    return call._replace(placement=placement), part


@contextmanager
def _with_wrapper(call: Call, around: AgentAround) -> Iterator[Session]:
    """All ranks together, as the wrappers' agents have let them meet."""
    from ..agent import sidecar_start

    session = _session(call, around.link)
    session.count = next(_starts)
    session.is_watched = call.supervision.detects
    session.take(around.result)
    session.steps[CALLED] = own_clock.at(call.called)
    session.steps[ALL_CALLED] = clock_time()
    yield session
    sidecar_start.tell_steps(session)


def _session(call: Call, link: AgentLink) -> Session:
    session = Session(call.placement, call.join_timeout)
    session.link = link
    session.framework = call.options.describe()
    return session


@contextmanager
def _with_sidecar(
    call: Call,
    part: Part,
    sidecar: Sidecar,
    report: StartReport,
    exported: EnvTransaction,
) -> Iterator[Session]:
    """All ranks together, with the agent in a process beside this one."""
    from ..agent.sidecar_start import tell_steps

    placement = call.placement
    try:
        plan, problem = plan_of(placement, call.environ, call.join_timeout, **part._asdict())
        session = _session(call, sidecar.link)
        session.when_ready = lambda: sidecar.take_over(session)
        with report.despite_signals(), joining(session, problem, report.ended):
            sidecar.begin(plan, call.supervision)
            if placement.local_world_size is not None and problem is None:
                # The import of torch reads these
                exported.write(thread_variables(placement, call.environ))
                frameworks.preload(call.options, session)
            session.take(sidecar.link.joined(plan.join_timeout))
        with report.until_watched(session):
            yield session
        tell_steps(session)
    except BaseException:
        if not sidecar.is_current:  # a current one reports how this process ends
            sidecar.close()
        raise


def _without_sidecar(
    call: Call, part: Part, why: OSError, report: StartReport
) -> AbstractContextManager[Session]:
    """All ranks together, with the agent in this process."""
    few = too_few_files(why)
    if few is None:
        return _with_thread(call, part, why, report)
    # The thread needs as many files as a sidecar. This process only tells the other ranks
    part = part._replace(problem=part.problem or few)
    return join_here(call.placement, call.environ, call.join_timeout, **part._asdict())


@contextmanager
def _with_thread(call: Call, part: Part, why: OSError, report: StartReport) -> Iterator[Session]:
    """All ranks together, with the agent in a thread, which cannot detect how the process ends."""
    from ..agent.wrapper_agent import ThreadAgent
    from ..script.sys_exit import at_end

    placement = call.placement
    log_line(
        placement.who,
        "warning: failure detection is off for this rank: the monitor process did not start: "
        f"{why}",
    )
    record: Callable[[Event], object] = ignore
    if part.problem is None:
        record = _write_here(call, report)
    supervision = call.supervision._replace(detects=False)
    meeting = join_here(
        placement,
        call.environ,
        call.join_timeout,
        failed=report.ended,
        record=record,
        **part._asdict(),
    )
    with meeting as session:
        with ThreadAgent(session, supervision, None) as agent:
            session.link = agent.link(placement.rank)
            session.framework = call.options.describe()
            # Otherwise the end of its connections would be a failure to the others
            at_end(well=agent.leave_job)
            with report.until_watched(session):
                yield session
        session.joined = None  # the thread has it until this process ends


def _write_here(call: Call, report: StartReport) -> Callable[[Event], object]:
    """Let this process write what rank 0's agent does, where that is wanted.

    Return the function that writes an event.
    """
    placement = call.placement
    if placement.rank != 0 or not call.supervision.keeps_events:
        return ignore
    from ..agent.event_files import EventFiles

    files = EventFiles(call.supervision, placement.who)

    def write(session: Session, ended: StartEnded) -> None:
        assert session.joined is not None
        files.start_ended(session.joined, ended)

    report.tell = write
    return files.record
