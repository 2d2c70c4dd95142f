"""What `run` starts, and with which environment, words and output."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from ..base.errors import DistbootError, rendezvous_needed
from ..base.text import log_line
from ..detection import export, inherited, surroundings
from ..detection.placement import WRAPPER, Placement
from .nested_launcher import Nested, nested_launcher
from .script_text import missing_framework_option, missing_mpi
from .target import Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..agent.logs import Logs
    from ..detection.allocation import PossiblePeers
    from ..host.binding import Cpus


class Launch(NamedTuple):
    """The options of `run`, and its target."""

    options: SimpleNamespace
    target: Target
    nested: Nested | None  # a launcher that the command starts
    # The same if it is the command itself: it gets nothing that is about this process
    inner: Nested | None
    environ: Mapping[str, str]  # of this process

    def starts_ranks(self, placement: Placement) -> bool:
        """Whether the command or the wrapper starts ranks, so that this process need not be one."""
        wrapper_does = self.options.nproc_per_node is not None
        if self.inner is None:
            return wrapper_does
        is_one_node = placement.world_size == 1
        return any((wrapper_does, self.inner.spans_nodes, is_one_node))

    def apart(self, placement: Placement, ranks: int) -> str | None:
        """Why the processes may train apart, or None.

        `ranks`: how many are started on this node; 0 if this process is the rank.
        """
        per_node = self.options.nproc_per_node
        environ = dict(self.environ)
        if per_node:
            is_one_rank = ranks == placement.world_size == 1
            if is_one_rank:
                return None
            placement = placement._replace(launcher=WRAPPER)
            environ = export.base_environ(environ)
        if self.nested is not None:
            return self.nested.separate_jobs(placement, per_node)
        missing_option = missing_framework_option(
            self.target,
            self.options.framework,
            placement,
            environ,
            per_node,
        )
        is_alone = (per_node, placement.world_size) == (None, 1)
        if missing_option is not None or is_alone:
            return missing_option
        return missing_mpi(
            self.target,
            self.options.framework,
            placement,
            environ,
        )

    def unused(self, placement: Placement) -> PossiblePeers | None:
        """Tasks and hosts that the job leaves unused, if the command is not what uses them."""
        if self.nested is not None or self.target.is_shell:
            return None
        launcher = self.options.launcher
        return surroundings.find_possible_peers(placement, self.environ, launcher)

    def warn_of_unused(self, placement: Placement) -> None:
        """Warn of unused tasks and hosts, unless a wrapper around this one has."""
        is_inside_wrapper = bool(inherited.about(placement, self.environ).fields)
        if not is_inside_wrapper:
            unused = self.unused(placement)
            surroundings.warn_of_possible_peers(placement, unused)

    def logs(self, rank: int, who: str | None, round_: int = 0) -> Logs | None:
        """Where the output goes; None: to this process's stdout and stderr, as it is."""
        prefix = self.options.log_prefix
        folder = self.options.log_dir
        shares_stdout = self.options.nproc_per_node  # then each line has to come in one piece
        is_wanted = any((prefix, folder, shares_stdout))
        if not is_wanted:
            return None
        from ..agent.logs import Logs

        try:
            return Logs(rank, who, prefix=prefix, folder=folder)
        except DistbootError as error:
            if round_ == 0:
                raise
            # A job that continues is worth more than its log.
            where = "its output goes to this process's stdout and stderr"
            log_line(who, f"warning: {error.message}; {where}")
            return Logs(rank, who, prefix=prefix, folder=None)

    def exports(
        self, placement: Placement, environ: Mapping[str, str], **more: Any
    ) -> dict[str, str | None]:
        """The variables to set for the command, starting from `environ`."""
        if self.inner is not None:
            together = self.inner.spans_nodes
            return export.for_launcher(placement, environ, together=together)
        named = self.options.launcher
        if self.options.nproc_per_node:
            named = None
        return export.variables(placement, environ, named=named, **more)

    def bound(self, placement: Placement) -> Cpus:
        """The CPUs to which a rank is to be bound; empty: as this process is."""
        if self.options.bind == "none":
            return ()
        from ..host import cpus  # here, as few jobs bind their ranks

        if cpus.bound():  # by its launcher
            return ()
        local_rank = placement.local_rank
        ranks = placement.local_world_size
        if local_rank is None or ranks is None:
            raise rendezvous_needed(
                "one process alone cannot tell its local rank, which --bind needs"
            )
        return self.bound_here(ranks)[local_rank]

    def bound_here(self, ranks: int) -> list[Cpus]:
        """The CPUs to which each rank of this node is to be bound, where one agent starts `ranks`."""
        kind = self.options.bind
        if kind == "none":
            return [()] * ranks
        from ..host.binding import cpus_of_ranks  # here, as few jobs bind their ranks

        return cpus_of_ranks(kind, ranks, self.environ)

    def words(self, environ: Mapping[str, str]) -> list[str]:
        """The command in this environment, for example with the local rank."""
        if self.inner is not None:
            return self.inner.command(self.target.words)
        name = self.options.pass_local_rank
        if name is None:
            return self.target.words
        if "LOCAL_RANK" not in environ:
            raise rendezvous_needed(
                "one process alone cannot tell its local rank, which --pass-local-rank passes"
            )
        return self.target.with_local_rank(environ["LOCAL_RANK"], name)


def launch_of(options: SimpleNamespace, target: Target, environ: Mapping[str, str]) -> Launch:
    """The launch, with the launcher that its command starts."""
    nested = nested_launcher(target, environ)
    inner = nested
    if nested is not None and nested.is_in_shell:
        inner = None
    return Launch(options, target, nested, inner, environ)


def with_ranks(placement: Placement, ranks: int) -> Placement:
    """The placement where each node starts so many ranks; 0: the processes are the ranks."""
    if not ranks:
        return placement
    nodes = placement.world_size
    return placement._replace(launcher=WRAPPER, world_size=nodes * ranks, num_nodes=nodes)
