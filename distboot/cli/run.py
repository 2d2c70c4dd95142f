"""`run`, the wrapper: detect, export, start the script or command as a child, and end as it ends."""

from __future__ import annotations

import os
import signal
from argparse import Namespace
from functools import partial
from typing import Any, NamedTuple

from .. import frameworks
from ..agent import supervisor
from ..base.errors import (
    DistbootError,
    rendezvous_needed,
    with_rank,
    with_too_few_files,
)
from ..base.process import at_once, become
from ..base.settings import (
    RANK,
    rendezvous_setting,
    supervision_settings,
    warn_of_unknown,
)
from ..base.text import escape_control, log_line
from ..detection import export, inherited, surroundings
from ..detection.detect import LAUNCHERS, detect, refuse_unless_rank
from ..detection.here import detect_here
from ..detection.launchers.tf_config import has_servers
from ..detection.placement import NUMBERS, Placement
from ..frameworks import _torch
from .run_options import (
    check_local_rank,
    complete,
    count_of,
    parse,
    warn_if_bound,
)
from .run_warnings import warn_of_misplaced, warn_of_world_size
from .target import (
    Nested,
    Target,
    fit_to_script,
    missing_framework_option,
    nested_launcher,
    target_of,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..agent.in_wrapper import WrapperAgent
    from ..agent.launcher_process import LauncherProcess
    from ..agent.logs import Logs
    from ..agent.session import Session
    from ..base.settings import SupervisionSettings
    from ..detection.allocation import Unused
    from ..job.restarts import Restarts
    from ..report.files import StartupReport


def run(words: list[str]) -> int:
    """`run`: the exit code of the child."""
    options, given = parse(words)
    placement = detect_here(launcher=options.launcher)
    warn_of_unknown(os.environ, placement.rank, placement.who)
    with with_rank(placement.who):
        complete(options, os.environ)
        target = target_of(given)
        nested = nested_launcher(target, os.environ)
        launch = _Launch(options, target, nested)
        check_local_rank(options, target, nested, placement)
        warn_of_misplaced(target, placement)
        warn_of_world_size(placement, os.environ)
        starts_ranks_here = options.nproc_per_node or (
            launch.inner is not None and launch.inner.is_told_of_nodes
        )
        if not starts_ranks_here:
            refuse_unless_rank(placement)
        if launch.inner is None:
            fit_to_script(options, target, os.environ)
        else:
            options.framework = "none"
        if options.nproc_per_node:
            return _of_node(launch, placement)
        launch.warn_of_unused(placement)
        placement = export.require_master(placement)
        logs, problem = None, None
        try:
            logs = launch.logs(placement.rank, placement.who)
        except DistbootError as error:  # which the other ranks should hear, too
            problem = error
        # Of a process that is alone only on request: what DISTBOOT_REPORT says may be for the ranks that it starts.
        if rendezvous_setting() and (
            placement.world_size > 1 or options.report or options.restarts.most
        ):
            return _together(launch, placement, target.missing() or problem, logs)
        if options.report and placement.rank == 0:
            log_line(placement.who, "warning: there will be no report: DISTBOOT_RENDEZVOUS=0")
        if problem is not None:
            raise problem
        return _alone(launch, placement, logs)


class _Launch(NamedTuple):
    """What is to be started, and how."""

    options: Namespace
    target: Target
    nested: Nested | None  # a launcher that the command starts

    @property
    def inner(self) -> Nested | None:
        """The launcher where it is the command itself, and so gets nothing that is about this process."""
        return self.nested if self.nested and not self.nested.is_in_shell else None

    def apart(self, placement: Placement, ranks: int) -> str | None:
        """Why the processes, or so many ranks that are started on this node, may train apart; None: they do not."""
        per_node, environ = self.options.nproc_per_node, dict(os.environ)
        if per_node:
            if ranks == placement.world_size == 1:
                return None
            placement, environ = (
                placement._replace(launcher="distboot"),
                export.base_environ(environ),
            )
        if self.nested is not None:
            return self.nested.separate_jobs(placement, per_node)
        return missing_framework_option(
            self.target, self.options.framework, placement, environ, per_node
        )

    def unused(self, placement: Placement) -> Unused | None:
        """Tasks and hosts that the job leaves unused, if the command is not what uses them."""
        if self.nested is not None or self.target.is_shell:
            return None
        return surroundings.unused(placement, os.environ, self.options.launcher)

    def warn_of_unused(self, placement: Placement) -> None:
        # A wrapper around this one has warned.
        if not inherited.about(placement, os.environ).fields:
            surroundings.warn_of_unused(placement, self.unused(placement))

    def logs(self, rank: int, who: str | None, round_: int = 0) -> Logs | None:
        """Where the output goes, if not to where ours does."""
        options = self.options
        # Of ranks line by line
        if not (options.log_prefix or options.nproc_per_node or options.log_dir is not None):
            return None
        from ..agent.logs import Logs

        try:
            return Logs(rank, who, prefix=options.log_prefix, folder=options.log_dir)
        except DistbootError as error:
            if not round_ or options.log_dir is None:
                raise
            # A job that goes on is worth more than its log.
            log_line(who, f"warning: {error.message}; its output goes to where ours does")
            return Logs(rank, who, prefix=options.log_prefix, folder=None)

    def exports(
        self, placement: Placement, environ: Mapping[str, str], **more: Any
    ) -> dict[str, str | None]:
        """The variables to set for the command, starting from `environ`."""
        if self.inner is not None:
            return export.for_launcher(placement, environ, together=self.inner.is_told_of_nodes)
        named = None if self.options.nproc_per_node else self.options.launcher
        return export.variables(placement, environ, named=named, **more)

    def words(self, environ: Mapping[str, str]) -> list[str]:
        words, name = self.target.words, self.options.pass_local_rank
        if name is not None:
            if "LOCAL_RANK" not in environ:
                raise rendezvous_needed(
                    "one process alone cannot tell its local rank, which --pass-local-rank passes"
                )
            words = self.target.with_local_rank(environ["LOCAL_RANK"], name)
        return words if self.inner is None else self.inner.command(words)


def _alone(launch: _Launch, placement: Placement, logs: Logs | None) -> int:
    """Run the command of a process without others, or with the rendezvous off."""
    export.wait_until_resolves(placement, launch.options.join_timeout)
    others = _torch.torchelastic_variables(placement, os.environ)
    # A start of it does not pay for sockets
    if launch.options.framework != "torch" and launch.inner is None:
        from ..agent.session import alone

        others = frameworks.exports(
            launch.options.framework, alone(placement, launch.options.join_timeout), os.environ
        )
    environ = export.merged(launch.exports(placement, os.environ, others=others), os.environ)
    if launch.options.exec:
        become(launch.words(environ), environ)
    command = supervisor.Command(launch.words(environ), environ, logs=logs)
    programs = LAUNCHERS[placement.launcher].programs
    if programs:
        from ..agent.launcher_process import end_if_left  # here, as most that are alone have none

        end_if_left(placement.who, programs)
    code = supervisor.run([command], grace=launch.options.grace)
    if code:
        from ..job.exit_status import leave  # here, as most end well

        leave(f"exit code {code}: the output of the script says why")
    return code


def _of_node(launch: _Launch, placement: Placement) -> int:
    """Start the ranks of this node."""
    if launch.inner is not None:
        name = launch.inner.name
        problem = f"--nproc-per-node starts the ranks of this node, and in each of them {name} would start others"
        hint = f"leave {name} out: python -m distboot --nproc-per-node N script.py …; or leave --nproc-per-node out"
        raise DistbootError("usage", problem, hint)
    ranks = count_of(launch.options.nproc_per_node, placement, os.environ)
    if not rendezvous_setting():
        raise rendezvous_needed("the nodes number their ranks when they meet")
    placement = placement._replace(node_level=placement.node_level or "--nproc-per-node")
    with with_rank(placement.who):
        warn_if_bound(placement)
        launch.warn_of_unused(_with_ranks(placement, ranks))
        missing = launch.target.missing()
        if launch.options.log_dir is not None:  # the ranks, and so their files, have no names yet
            from ..agent.logs import folder_problem

            missing = missing or folder_problem(launch.options.log_dir)
        return _together(launch, export.require_master(placement), missing, ranks=ranks)


class _Job(NamedTuple):
    """A job whose agents meet: what is the same in all of its rounds."""

    launch: _Launch
    placement: Placement
    settings: SupervisionSettings
    restarts: Restarts
    ranks: int  # that are started here; 0: the one that this is
    launcher: LauncherProcess | None  # above this process

    def round(self, report: StartupReport, problem: DistbootError | None, logs: Logs | None) -> int:
        """From the moment in which all agents meet to the end of the ranks: the exit code."""
        from ..agent.in_wrapper import WrapperAgent
        from ..agent.meet import join_here

        launch, options, restarts, settings = (
            self.launch,
            self.launch.options,
            self.restarts,
            self.settings,
        )
        told: dict[str, Any] = {
            "framework": options.framework,
            "problem": problem,
            "ranks": self.ranks,
        }
        told |= {"round": restarts.round, "max_restarts": options.restarts.most}
        told["earlier"] = restarts.earlier
        # In which another agent may still be ending its ranks of the round before
        told["ending"] = options.grace if restarts.round else 0.0
        join_timeout = options.join_timeout + told["ending"]
        with (
            report.despite_signals(),
            join_here(
                self.placement,
                os.environ,
                join_timeout,
                failed=report.failed,
                wanted=self.refuse_if_left,
                **told,
            ) as job,
            report.until_watched(job),
            with_too_few_files(),
            WrapperAgent(job, settings, restarts, self.launcher) as watch,
        ):
            assert job.joined is not None
            environs = at_once(partial(self._environ_of, job, watch), watch.ranks)
            job.joined.close_listener()
            files = job.joined.open_files
            if options.exec:
                watch.leave_job()
                become(launch.words(environs[0]), environs[0], open_files=files)
            if not settings.detects:
                report.failed(job, None)
            watch.only_serves_rank_0 = options.framework == "tensorflow" and has_servers(
                environs[0]
            )
            commands = []
            for rank, environ in zip(watch.ranks, environs, strict=True):
                own = launch.logs(rank, f"rank {rank}", restarts.round) if self.ranks else logs
                found, file = watch.environ(rank, environ), watch.files[rank]
                commands.append(supervisor.Command(launch.words(found), found, rank, file, own))
            code = supervisor.run(commands, grace=options.grace, open_files=files, watch=watch)
            cause = watch.next_round
        if cause is not None:
            restarts.ended(cause, watch.agents())
        return code

    def refuse_if_left(self) -> None:
        """Do not wait for other ranks once the launcher is gone."""
        if self.launcher is not None:
            self.launcher.refuse_if_gone()

    def _environ_of(self, job: Session, watch: WrapperAgent, rank: int) -> dict[str, str]:
        from ..host import network  # here, so that a process that is alone does not pay for it

        one, base = _of_rank(job, rank) if self.ranks else (job, dict(os.environ))
        one.link = watch.link(one.placement.rank)
        others = frameworks.exports(self.launch.options.framework, one, base)
        counts, is_torchruns = self.restarts.variables(base), one.placement.launcher == "torchrun"
        # Else one of them would show that torchrun has started the script
        others |= {} if is_torchruns else counts
        exports = self.launch.exports(one.placement, base, others=others, met=True) | counts
        if self.launch.options.restarts.most and is_torchruns:
            # The store of torchrun's agent has the keys of the first round. This one is the script's own.
            assert one.store_address is not None
            exports |= {
                "TORCHELASTIC_USE_AGENT_STORE": None,
                "MASTER_PORT": str(one.store_address[1]),
            }
        return export.merged(exports | network.variables(one.interface, base), base)


def _together(
    launch: _Launch,
    placement: Placement,
    problem: DistbootError | None,
    logs: Logs | None = None,
    ranks: int = 0,
) -> int:
    """Run a rank among others, which should hear of its problem; or so many ranks, which are started here."""
    options = launch.options
    apart = launch.apart(placement, ranks)
    if placement.rank == 0 and apart:
        log_line(placement.who, escape_control(apart))
    _warn_of_hidden_hooks(launch, placement)
    settings = supervision_settings(os.environ, launch.options.grace, options.report)
    unused = launch.unused(_with_ranks(placement, ranks))
    settings = settings._replace(
        unused="" if unused is None else unused.found,
        detects=settings.detects and not options.exec,
        apart=launch.nested.name if launch.nested and apart else "",
        report=None if options.exec else settings.report,
    )
    # Here, so that a process that is alone does not pay for them
    from ..agent import launcher_process

    # Here, so that a process that is alone does not pay for them
    from ..agent.launcher_signals import warn_of_signals
    from ..job.restarts import Restarts
    from ..report.files import StartupReport

    warn_of_signals(placement, settings.stop_signals)
    report = StartupReport(settings.report, placement)
    who = _agent_name(placement, ranks)
    restarts = Restarts(
        options.restarts, os.environ, who=who, of_launcher=launch.nested is not None
    )
    launcher = launcher_process.find(os.getpid(), LAUNCHERS[placement.launcher].programs)
    job = _Job(launch, placement, settings, restarts, ranks, launcher)
    if options.restarts.most:  # else they would end us between two rounds
        restarts.outlived({signal.SIGUSR1, signal.SIGUSR2})
    code = job.round(report, problem or report.problem(), logs)
    while restarts.cause is not None:
        logs = None if ranks else launch.logs(placement.rank, placement.who, restarts.round)
        code = job.round(StartupReport(settings.report, placement, restarts.rounds), None, logs)
    return code


def _agent_name(placement: Placement, ranks: int) -> str:
    """What begins the lines of this agent in every round, also where the job has one node."""
    if ranks:
        return f"node {placement.rank}"
    return f"rank {placement.rank}"


def _with_ranks(placement: Placement, ranks: int) -> Placement:
    """The placement of a job whose nodes start so many ranks each; 0: the processes are the ranks."""
    if not ranks:
        return placement
    nodes = placement.world_size
    return placement._replace(launcher="distboot", world_size=nodes * ranks, num_nodes=nodes)


def _warn_of_hidden_hooks(launch: _Launch, placement: Placement) -> None:
    option = launch.target.hides_hooks
    if option and placement.rank == 0:
        text = (
            f"warning: python {option} runs the script without distboot's hooks: an uncaught exception is reported as "
            f"exit code 1, unless the script calls distboot.init(). Leave {option} out"
        )
        log_line(placement.who, text)


def _of_rank(job: Session, rank: int) -> tuple[Session, dict[str, str]]:
    """What a rank of this node holds, once the nodes have met, and the environment with its numbers."""
    assert job.membership is not None
    numbers = {"rank": rank, "world_size": job.membership.world_size, **job.membership.place(rank)}
    own = {name: str(numbers[field]) for name, field in zip(RANK, NUMBERS, strict=True)}
    where = {
        "MASTER_ADDR": str(job.placement.master_addr),
        "MASTER_PORT": str(job.placement.master_port),
    }
    environ = {**export.base_environ(os.environ), **own}
    return job.of_rank(detect({**environ, **where}, launcher="distboot")), environ
