"""`init`, once it is known which rank this is: refuse, warn, let all meet, start the framework.

All of it or nothing: the environment is changed only if the framework starts.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from .. import frameworks
from ..agent.session import Session
from ..base import settings
from ..base.errors import DistbootError
from ..base.text import log_line
from ..context import Context, who_of
from ..detection import inherited, surroundings
from ..detection.export import EnvTransaction, thread_variables
from ..rendezvous.events import GROUP
from ..script import crash_hooks
from ..script.mentions import mentions_preempted
from . import bound_cpus
from .exit_report import report_exception_at_exit
from .meeting import AgentAround, Call, meet
from .refusals import refuse_process


class Current(NamedTuple):
    """The context of a process, and the arguments of its `init`."""

    process: int
    context: Context
    session: Session
    options: frameworks.Options
    local_rank: str  # as exported; with torchrun --virtual-local-rank 0 on all ranks
    launcher: str | None  # that the script named


def start(call: Call) -> Current:
    """Start the framework, once all ranks have met."""
    call, is_met = _checked(call)
    crash_hooks.note_context(is_closed=False)  # from now on, peers can make this process fail
    around = None
    if is_met:
        around = _agent_around(call)
    if around is None:
        _warn_without_wrapper(call)
    with EnvTransaction() as exported:
        with meet(call, exported, around) as session:
            exported.write(session.shared_variables(call.environ))
            if not is_met:  # else the wrapper has, and may have bound this process
                exported.write(thread_variables(session.placement, call.environ))
            context = frameworks.start(session, exported, call.options)
            session.mark(GROUP)
        if call.placement.world_size == 1:
            report_exception_at_exit()
        _listen(context, call)
    return Current(
        os.getpid(),
        context,
        session,
        call.options,
        call.environ["LOCAL_RANK"],
        call.launcher,
    )


def _checked(call: Call) -> tuple[Call, bool]:
    """Refuse and warn of what is wrong; return also whether a wrapper's ranks have met already."""
    placement = call.placement
    outer = inherited.about(placement, call.environ)
    refuse_process(placement, outer)
    settings.warn_of_unknown(call.environ, placement.rank, placement.who)
    settings.warn_of_ineffective(call.environ, placement.rank, placement.who)
    if not outer.fields:  # otherwise the wrapper has warned
        call = _warned_of_unused(call)
        bound_cpus.warn_of_rank(placement, call.environ)
        if not placement.has_launcher:
            # Here, as most processes have a launcher
            from .launcher_above import warn_of_launcher_above

            warn_of_launcher_above(placement, call.environ, call.launcher)
    return call, bool(outer.met)


def _warned_of_unused(call: Call) -> Call:
    """Warn of tasks and hosts that the job leaves unused. The job's summary names them, too."""
    unused = surroundings.find_possible_peers(call.placement, call.environ, call.launcher)
    if unused is None:
        return call
    surroundings.warn_of_possible_peers(call.placement, unused)
    return call._replace(supervision=call.supervision._replace(unused=unused.found))


def _agent_around(call: Call) -> AgentAround | None:
    """The agent of the wrapper around this process; None if it is gone."""
    from ..agent.link import attached  # here, as a process that is alone has no agent

    found = attached(call.environ)
    if found is None:
        return None
    return AgentAround(*found)


def _warn_without_wrapper(call: Call) -> None:
    """Warn of settings that have no effect, or not their whole effect, without the wrapper."""
    placement = call.placement
    if placement.rank == 0 and settings.value_of("DISTBOOT_BIND", call.environ) != "none":
        log_line(
            placement.who,
            "warning: DISTBOOT_BIND has no effect: init() does not start its process; start the "
            "script with python -m distboot",
        )
    if call.supervision.stop_signals:
        from ..agent.launcher_signals import warn_of_signals  # here, as few jobs need it

        warn_of_signals(placement, call.supervision.stop_signals)
    if placement.rank == 0 and settings.restart_settings(call.environ).most:
        log_line(
            placement.who,
            "warning: DISTBOOT_MAX_RESTARTS has no effect: init() cannot start its own process "
            "again; start the script with python -m distboot",
        )


def _listen(context: Context, call: Call) -> None:
    """Let the events that the settings name ask the job to stop."""
    preemption = context._preemption  # noqa: SLF001 - of this package
    supervision = call.supervision
    preemption.listen(supervision.stop_signals)
    if mentions_preempted():  # handle a stop before the script's first read
        preemption.expect_reads()
    if preemption.has_agent:  # which does both
        return
    if supervision.stop_at is not None:
        preemption.request_at(supervision.stop_at, supervision.stop_reason)
    if supervision.stop_notice:
        preemption.request_at_notice(supervision.stop_notice, supervision.notice_address)


def refuse_different(held: Current, options: frameworks.Options, launcher: str | None) -> None:
    """Refuse a different framework, and warn of arguments that have no effect any more."""
    if held.options.framework != options.framework:
        raise DistbootError(
            "already-initialized",
            f"init({options.framework!r}) after init({held.options.framework!r}) in the same "
            "process",
            "close() the first context, or use one framework a process",
        )
    differences = options.differences(held.options)
    if launcher not in (None, held.launcher, held.context.launcher):
        differences.append(f"launcher={launcher!r} after launcher={held.context.launcher!r}")
    if differences:
        log_line(
            who_of(held.context),
            f"warning: init() was called again: {', '.join(differences)} has no effect; the first "
            "context stays",
        )
