"""`stacks`: print the Python stacks of all ranks, grouped by identical stack, those of fewest ranks
first.

Each agent on this host has a Unix socket with an abstract name, which has the job's id in it. The
command asks one of them, which asks the agents of all other ranks.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ..base.errors import DistbootError
from ..base.text import escape_control, log_line, short_repr
from ..cli.output import emit
from ..cli.parser import Parser
from .jobs_here import abstract_sockets, descriptions, jobs_listed

_TIMEOUT = 20.0  # seconds for an agent to answer, which asks all others
_WHERE = (
    "run it on a host of the job, in the container or the network namespace of a rank, "
    "as its user or root"
)


def stacks(arguments: list[str]) -> int:
    """The command `stacks`."""
    parser = Parser(
        "stacks",
        "Print where all ranks of a job are, on all its hosts: their Python stacks, folded. "
        "Run it on any host of the job.",
        detects=False,
    )
    parser.add_argument(
        "--pid", type=int, default=0, help="of a wrapper, an agent or a script of the job"
    )
    parser.add_argument(
        "--job",
        default="",
        help="where several jobs are here: the launcher's job id, or the id in the list of them",
    )
    options = parser.parse_args(arguments)
    agents = _agents_of(options.job, options.pid)
    if len(agents) > 1 and not options.pid:
        raise jobs_listed(agents)
    described: dict[str, str] = {}
    if not any((options.pid, options.job)):  # the only job here may be a colleague's
        described = descriptions(agents)
    lines = _first_answer(agents, options.pid)
    if lines is None:
        raise _unanswered(agents, options.pid)
    if not lines:
        raise DistbootError("usage", "no rank of this job runs now", "try again if it is starting")
    for job, description in described.items():  # on stderr, as stdout has the stacks alone
        log_line(None, f"job {job}: {description}")
    emit("\n".join(map(escape_control, lines)))
    return 0


def _first_answer(agents: Mapping[str, Sequence[str]], pid: int) -> Sequence[str] | None:
    """The lines of an agent, none if no rank of its job runs; None: no agent answers."""
    for names in agents.values():
        for name in names:
            lines = ask(name, pid)
            if lines is not None:
                return lines
    return None


def _unanswered(agents: Mapping[str, Sequence[str]], pid: int) -> DistbootError:
    problem = "no agent on this host answers"
    if not pid:
        return DistbootError("usage", problem, _WHERE)
    problem += f" for --pid {pid}"
    if os.path.exists(f"/proc/{pid}"):
        problem = f"process {pid} runs, but {problem}"
        hint = (
            "a job of one process has no agent, nor has one whose ranks have not met, or have not "
            f"met again after a restart; `py-spy dump --pid {pid}` shows one process"
        )
    else:
        problem += ", which is not a process here"
        hint = _WHERE
    if agents:
        return jobs_listed(agents, problem, hint)
    return DistbootError("usage", problem, hint)


def _agents_of(job: str, pid: int) -> dict[str, list[str]]:
    """The agents of a job, or of all; an error that lists the jobs where it is none of them."""
    agents = agents_here(job)
    if agents:
        return agents
    others = agents_here("")
    if others:
        raise jobs_listed(others, f"no job {short_repr(job)} is here")
    if pid:
        raise _unanswered({}, pid)
    raise DistbootError("usage", "no agent of a job runs on this host", _WHERE)


def agents_here(job: str) -> dict[str, list[str]]:
    """By job, the names of its agents' sockets in this network namespace; of one job, or of all if
    it is empty.
    """
    from ..agent.link_messages import PREFIX, socket_name

    wanted: tuple[str, ...] = ("",)
    if job:  # 4711 includes the steps of a job: 4711.0
        wanted = (f"{socket_name(job)}.", f"{socket_name(job)}-")
    found: dict[str, list[str]] = defaultdict(list)
    for name in abstract_sockets().values():
        match = re.fullmatch(rf"{PREFIX}([\w.-]+)-[0-9a-f]+", name)
        if match is None:
            continue
        of_job = match[1]
        if f"{of_job}-".startswith(wanted) and name not in found[of_job]:
            found[of_job].append(name)
    return dict(found)


def ask(name: str, pid: int) -> Sequence[str] | None:
    """The answer of an agent; None if it has ended, or if `pid` is not a process of its job."""
    import socket

    from ..agent.link import AgentLink
    from ..rendezvous.messages import AskStacks, ShowStacks

    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError, DistbootError):
        connection.settimeout(_TIMEOUT)
        connection.connect(f"\0{name}")
        answer: ShowStacks = AgentLink(connection).ask(AskStacks(pid), _TIMEOUT, ShowStacks)
        return answer.lines
    return None
