"""`run`, the wrapper: detect, export, start the script or command as a child, and end as it ends."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from .. import frameworks
from ..agent import supervisor
from ..agent.child import Command
from ..base.commands import become
from ..base.errors import DistbootError, rendezvous_needed, with_rank
from ..base.settings import (
    rendezvous_setting,
    supervision_settings,
    warn_of_ineffective,
    warn_of_unknown,
)
from ..base.text import escape_control, log_line
from ..detection import export
from ..detection.detect import refuse_unless_rank
from ..detection.here import detect_here
from ..detection.inherited import merged
from ..detection.order import LAUNCHERS
from ..detection.placement import OFF, Placement
from ..frameworks import _torch
from ..startup import bound_cpus
from . import torchrun_options
from .launch import Launch, launch_of, with_ranks
from .nested_launcher import Nested, nested_launcher
from .nproc_per_node import count_of
from .reported_errors import report_errors, report_option_errors
from .run_options import check_local_rank, complete, overriding, parse
from .run_warnings import warn_of_misplaced, warn_of_world_size
from .script_text import fit_to_script
from .target import target_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from types import SimpleNamespace

    from ..agent.logs import Logs
    from ..base.settings import SupervisionSettings

# What detection refuses where a launcher below the wrapper may number the ranks
_NO_RANK = ("not-alone", "node-level-launch")


def run(argv: list[str]) -> int:
    """`run`: the exit code of the child."""
    environ = os.environ  # which everything below is given
    with report_option_errors(argv, environ):
        options, given = parse(argv, environ)
    placement = _placement(options, given, environ)
    warn_of_unknown(environ, placement.rank, placement.who)
    with with_rank(placement.who):
        with report_errors(options, placement, environ):
            launch = _checked(options, given, placement, environ)
        if options.nproc_per_node:
            return _run_node(launch, placement)
        launch.warn_of_unused(placement)
        bound_cpus.warn_of_rank(placement, environ)
        return _run_rank(launch, export.require_master(placement))


def _checked(
    options: SimpleNamespace,
    given: list[str],
    placement: Placement,
    environ: MutableMapping[str, str],
) -> Launch:
    """The launch, with all options complete; refuses what does not fit together."""
    given_options = overriding(options)
    complete(options, environ, given_options)
    warn_of_ineffective(environ, placement.rank, placement.who, given_options)
    torchrun_options.refuse_different(options, placement)
    target = target_of(given)
    launch = launch_of(options, target, environ)
    check_local_rank(options, target, launch.nested, placement)
    if launch.nested is None:  # else these may be options of the launcher
        warn_of_misplaced(target, placement)
    warn_of_world_size(placement, environ)
    if not launch.starts_ranks(placement):
        refuse_unless_rank(placement)
    if launch.inner is None:
        fit_to_script(options, target, environ)
    else:
        _refuse_binding(launch.inner, options.bind)
        options.framework = "none"
    return launch


def _placement(
    options: SimpleNamespace, given: list[str], environ: MutableMapping[str, str]
) -> Placement:
    try:
        placement = detect_here(environ, launcher=options.launcher)
    except DistbootError as error:
        torchrun_options.refuse_unnumbered(options, error)
        if error.code not in _NO_RANK:
            raise
        nested = nested_launcher(target_of(given), environ)
        spans_nodes = nested is not None and nested.spans_nodes
        if not spans_nodes:
            raise torchrun_options.explained(options, error) from None
        # The launcher numbers the ranks, and this process is not one of them
        return detect_here(environ, launcher=OFF)
    if not placement.has_launcher:
        # Here, as most processes have a launcher
        from ..startup.launcher_above import warn_of_launcher_above

        warn_of_launcher_above(placement, environ, options.launcher)
    return placement


def _refuse_binding(inner: Nested, kind: str) -> None:
    if kind == "none":
        return
    raise DistbootError(
        "usage",
        f"--bind (or DISTBOOT_BIND) binds this process's rank to CPUs, and {inner.name} starts "
        "others",
        f"leave it out, or give it to a wrapper that {inner.name} starts",
    )


def _run_rank(launch: Launch, placement: Placement) -> int:
    """Run the command as the rank that this process is."""
    options = launch.options
    logs = None
    problem = None
    try:
        logs = launch.logs(placement.rank, placement.who)
    except DistbootError as error:  # the other ranks receive it, too
        problem = error
    if rendezvous_setting(launch.environ) and _needs_agent(launch, placement):
        return _run_in_job(launch, placement, launch.target.missing() or problem, logs)
    if options.report:
        from ..startup.start_report import warn_of_no_report  # here, as few jobs need it

        warn_of_no_report(placement, options.report)
    problem = launch.target.problem or problem
    if problem is not None:
        raise problem
    return _run_single(launch, placement, logs)


def _needs_agent(launch: Launch, placement: Placement) -> bool:
    """Whether the process has others to meet, or an option needs what an agent does.

    The variable DISTBOOT_REPORT alone does not count: it may be for the ranks that a process
    starts which is itself alone.
    """
    options = launch.options
    return placement.world_size > 1 or options.report or options.restarts.most


def _run_single(launch: Launch, placement: Placement, logs: Logs | None) -> int:
    """Run the command of a process without others, or with the rendezvous off."""
    options = launch.options
    export.wait_until_resolves(placement, options.join_timeout)
    others = _torch.exports_of(placement, launch.environ)
    # The start for torch does not pay for sockets, and its script may do without a local rank
    if options.framework != "torch" and launch.inner is None:
        from ..agent.session import alone

        session = alone(placement, options.join_timeout)
        others = frameworks.exports(options.framework, session, launch.environ)
    bound = launch.bound(placement)
    exports = launch.exports(placement, launch.environ, others=others, bound=bound)
    environ = merged(exports, launch.environ)
    if options.exec:
        become(launch.words(environ), environ, cpus=bound)
    command = Command(launch.words(environ), environ, logs=logs, cpus=bound)
    programs = LAUNCHERS[placement.launcher].programs
    if programs:
        from ..agent.launcher_process import end_if_left  # here, as most that are alone have none

        end_if_left(placement.who, programs)
    code = supervisor.run([command], grace=options.grace)
    if code:
        with suppress(OSError):  # no file left, also for the module
            from ..agent import platform_log  # here, as most end well

            platform_log.write(f"exit code {code}: the output of the script says why")
    return code


def _run_node(launch: Launch, placement: Placement) -> int:
    """Start the ranks of this node."""
    options = launch.options
    if launch.inner is not None:
        name = launch.inner.name
        raise DistbootError(
            "usage",
            "--nproc-per-node starts the ranks of this node, "
            f"and in each of them {name} would start others",
            f"leave {name} out: python -m distboot --nproc-per-node N script.py …; "
            "or leave --nproc-per-node out",
        )
    ranks = count_of(options, placement, launch.environ)
    if not rendezvous_setting(launch.environ):
        raise rendezvous_needed("the nodes number their ranks when they meet")
    placement = placement._replace(node_level=placement.node_level or "--nproc-per-node")
    with with_rank(placement.who):
        bound_cpus.warn_of_node(placement)
        launch.warn_of_unused(with_ranks(placement, ranks))
        problem = launch.target.missing() or _binding_error(launch, ranks)
        if problem is None and options.log_dir is not None:
            # The ranks, and so their log files, have no names yet
            from ..agent.logs import folder_problem

            problem = folder_problem(options.log_dir)
        return _run_in_job(launch, export.require_master(placement), problem, ranks=ranks)


def _binding_error(launch: Launch, ranks: int) -> DistbootError | None:
    """Why the ranks of this node cannot be bound to CPUs."""
    try:
        launch.bound_here(ranks)
    except DistbootError as error:
        return error
    return None


def _run_in_job(
    launch: Launch,
    placement: Placement,
    problem: DistbootError | None,
    logs: Logs | None = None,
    ranks: int = 0,
) -> int:
    """Run a rank among others, which receive its problem; or so many ranks, all started here."""
    # Here, so that a process that is alone does not pay for them
    from ..agent import launcher_process
    from ..agent.launcher_signals import warn_of_signals
    from ..agent.restarts import Restarts
    from ..agent.wrapper_signals import WAITED_FOR
    from .rounds import Rounds

    restart_settings = launch.options.restarts
    starts_again = ranks > 1 or restart_settings.most > 0
    if starts_again:
        from .pipe_words import pipe_error

        problem = problem or pipe_error(launch.target, ranks)
    settings = _supervision(launch, placement, ranks)
    warn_of_signals(placement, settings.stop_signals)
    restarts = Restarts(
        restart_settings,
        launch.environ,
        who=_agent_name(placement, ranks),
        of_launcher=launch.nested is not None,
    )
    launcher = launcher_process.find(os.getpid(), LAUNCHERS[placement.launcher].programs)
    if restart_settings.most:  # else they would end this process between two rounds
        restarts.handle_stop_signals(WAITED_FOR.intersection(settings.stop_signals))
        if settings.quit_shows:
            restarts.ignore_between_rounds({int(signal.SIGQUIT)})
        own = {int(signal.SIGUSR1), int(signal.SIGUSR2), int(signal.SIGXCPU)}  # of the script
        restarts.ignore_between_rounds(own - {*settings.stop_signals})
    rounds = Rounds(launch, placement, settings, restarts, ranks, launcher)
    return rounds.run_all(problem, logs)


def _supervision(launch: Launch, placement: Placement, ranks: int) -> SupervisionSettings:
    """The settings for the agent; warns of what makes it see less."""
    options = launch.options
    settings = supervision_settings(launch.environ, options.grace, options.report, options.check)
    apart = launch.apart(placement, ranks)
    if apart and placement.rank == 0:
        log_line(placement.who, escape_control(apart))
    _warn_of_hidden_hooks(launch, placement)
    if apart and launch.nested is not None:
        settings = settings._replace(apart=launch.nested.describe_end())
    unused = launch.unused(with_ranks(placement, ranks))
    if unused is not None:
        settings = settings._replace(unused=unused.found)
    if options.exec:
        settings = settings._replace(
            detects=False,
            report=None,
            check="off",
            metrics=None,
            kubeflow=(),
        )
    return settings


def _agent_name(placement: Placement, ranks: int) -> str:
    """What begins the lines of this agent in every round, also where the job has one node."""
    if ranks:
        return f"node {placement.rank}"
    return f"rank {placement.rank}"


def _warn_of_hidden_hooks(launch: Launch, placement: Placement) -> None:
    option = launch.target.hides_hooks
    if not option or placement.rank != 0:
        return
    runs = f"python {option} runs the script without distboot's hooks"
    effect = (
        "an uncaught exception is reported as exit code 1, unless the script calls distboot.init()"
    )
    log_line(placement.who, f"warning: {runs}: {effect}. Leave {option} out")
