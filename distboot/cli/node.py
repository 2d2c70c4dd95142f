"""`run --nproc-per-node`: one process a node, pod or container becomes its ranks, by torchrun or mpirun."""

from __future__ import annotations

import os

from .. import child, nodes, supervise
from ..errors import DistbootError
from ..placement import Placement
from ..rendezvous import settled, wait_until_resolves
from ..rollcall.ports import Taken, listening
from .run_options import for_every_wrapper, of_a_rank, of_torchrun
from .target import Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace


def start_ranks(options: Namespace, placement: Placement, target: Target, join_timeout: float, grace: float) -> int:
    """Let an engine start the ranks of this node; its exit code.

    Raises:
        DistbootError: what is wrong, before anything was started.
    """
    nodes.refuse_several_here(placement, os.environ)
    problem = target.missing()  # the engine would say so with a traceback, once for each rank
    if problem is not None:
        raise problem
    placement = settled(placement)
    wait_until_resolves(placement, join_timeout)
    own, count, given = of_a_rank(options), options.nproc_per_node, of_torchrun(options)
    of_rank = [*target.python, "-m", "distboot", "run", *own, *for_every_wrapper(options), *target.given]
    nodes.warn_if_bound(placement)
    if nodes.has_torchrun():
        keeps_order = not nodes.agents_meet(given)
        if keeps_order:
            _refuse_taken_port(placement)
        engine = nodes.torchrun(placement, count, given)
        command = [*engine, *nodes.agent_target(["--", *of_rank] if own else target.given)]
        environ = nodes.agent_environ(os.environ, placement, count, keeps_order=keeps_order)
    else:
        command = [*nodes.mpirun(placement, count, os.environ, given), *of_rank]
        environ = nodes.mpirun_environ(os.environ, placement)
    if options.exec:
        child.become(command, environ)
    return supervise.run(command, environ, grace=grace)


def _refuse_taken_port(placement: Placement) -> None:
    """Refuse what torchrun's agent on the first node would end with a traceback for; unlike ranks it tries one port."""
    if placement.rank > 0:
        return
    port = placement.master_port or 0
    try:
        listening(port).close()
    except Taken as why:
        problem = f"torchrun's agents meet at MASTER_PORT={port} only, and this host cannot listen there: {why}"
        hint = "set MASTER_PORT to a free port on all nodes; ss -ltnp says who has this one"
        raise DistbootError("port-taken", problem, hint) from None
