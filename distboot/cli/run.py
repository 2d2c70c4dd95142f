"""`run`, the wrapper: detect, export, start the script or command as a child, and end as it ends."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from .. import child, frameworks, nodes, supervise
from ..detection import detect
from ..errors import DistbootError, printable, said_by, tell
from ..exports import applied, variables
from ..lifeline.settings import grace_setting, report_setting, settings
from ..misspelled import warn_of_misspelled
from ..placement import Placement
from ..rendezvous import join_timeout_setting, roll_call_setting, settled, wait_until_resolves
from .run_options import parse
from .target import Target, target_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace

    from ..logs import Logs


def main(arguments: list[str]) -> int:
    """Run the command; the exit code of the child."""
    options, given = parse(arguments)
    placement = detect(launcher=options.launcher)
    warn_of_misspelled(os.environ, placement)
    with said_by(placement.who):
        join_timeout = join_timeout_setting(options.join_timeout, "--join-timeout")
        grace = grace_setting(os.environ, options.grace)
        target = target_of(given)
        if options.nproc_per_node:
            from .node import start_ranks

            return start_ranks(options, placement, target, join_timeout, grace)
        nodes.refuse_unless_rank(placement)
        placement = settled(placement)
        logs, problem = _logs(options, placement)
        started = _Started(options, target, grace, logs)
        # Of a process that is alone only on request: what DISTBOOT_REPORT says may be for the ranks that it starts.
        if roll_call_setting() and (placement.world_size > 1 or options.report):
            return _together(started, placement, join_timeout, target.missing() or problem)
        if options.report and placement.rank == 0:
            tell(placement.who, "warning: there will be no report: DISTBOOT_ROLL_CALL=0")
        if problem is not None:
            raise problem
        return _alone(started, placement, join_timeout)


class _Started(NamedTuple):
    """What is to be started, and how, once the ranks have met."""

    options: Namespace
    target: Target
    grace: float
    logs: Logs | None

    def run(
        self,
        environ: dict[str, str],
        watch: supervise.Watch | None = None,
        open_files: int | None = None,
    ) -> int:
        """Our exit code, when it has ended; or become the command."""
        words, name = self.target.words, self.options.pass_local_rank
        if name is not None:
            words = self.target.with_local_rank(_local_rank(environ), name)
        if self.options.exec:
            child.become(words, environ, open_files=open_files)
        if self.logs is not None:  # the output is a pipe, in which Python would else keep it back until it ends
            environ.setdefault("PYTHONUNBUFFERED", "1")
        return supervise.run(words, environ, grace=self.grace, open_files=open_files, watch=watch, logs=self.logs)


def _alone(started: _Started, placement: Placement, join_timeout: float) -> int:
    """For a process without others, or whose roll call is off."""
    wait_until_resolves(placement, join_timeout)
    framework, others = started.options.framework, {}
    if framework != "torch":  # whoever starts it does not pay for sockets
        from ..rollcall.meeting import alone

        others = frameworks.exports(framework, alone(placement, join_timeout), os.environ)
    exports = variables(placement, os.environ, named=started.options.launcher, others=others)
    return started.run(applied(exports, os.environ))


def _together(started: _Started, placement: Placement, join_timeout: float, problem: DistbootError | None) -> int:
    """For a rank among others, which should hear of its problem."""
    from .apart import warning  # here and below, so that a process that is alone does not pay for it

    options = started.options
    if placement.rank == 0 and (apart := warning(started.target, options.framework, placement, os.environ)):
        tell(placement.who, printable(apart))
    lifeline = None if options.exec else settings(os.environ, started.grace, options.report)
    from .. import interfaces
    from ..lifeline.keeper import Keeper
    from ..lifeline.unwatched import Unwatched
    from ..rollcall.attend import attend

    report = Unwatched(None if options.exec else report_setting(os.environ, options.report))
    problem = problem or report.problem(placement)
    name = options.framework
    with (
        report.despite_signals(placement),
        attend(placement, os.environ, join_timeout, framework=name, problem=problem, failed=report.failed) as meeting,
        report.until_watched(meeting),
    ):
        others = frameworks.exports(options.framework, meeting, os.environ)
        watched = lifeline is not None
        exports = variables(
            meeting.placement, os.environ, named=options.launcher, others=others, met=True, watched=watched
        )
        exports |= interfaces.variables(meeting.interface, os.environ)
        environ = applied(exports, os.environ)
        meeting.vacate()
        if lifeline is None:
            meeting.goodbye()
            if not options.exec:
                report.failed(meeting, None)
            return started.run(environ, open_files=meeting.open_files)
        watch = Keeper(meeting, lifeline, environ.get("DISTBOOT_SECRET", ""))
        return started.run(watch.environ(environ), watch, open_files=meeting.open_files)


def _local_rank(environ: Mapping[str, str]) -> str:
    """The local rank that was exported."""
    if "LOCAL_RANK" not in environ:
        raise DistbootError(
            "roll-call-needed",
            "DISTBOOT_ROLL_CALL=0, and one process alone cannot tell its local rank, which --pass-local-rank passes",
            "unset DISTBOOT_ROLL_CALL",
        )
    return environ["LOCAL_RANK"]


def _logs(options: Namespace, placement: Placement) -> tuple[Logs | None, DistbootError | None]:
    """Where the output goes, if not to where ours does; or why it cannot, which the other ranks should hear, too."""
    if not options.log_prefix and options.log_dir is None:
        return None, None
    from ..logs import Logs

    try:
        return Logs(placement.rank, placement.who, prefix=options.log_prefix, folder=options.log_dir), None
    except DistbootError as error:
        return None, error
