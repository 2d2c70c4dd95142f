"""The commands that only print: `show`, `env`, `launchers` and `stacks`."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress

from .. import surroundings
from ..detection import inherited
from ..detection.detect import INNERMOST_FIRST, LAUNCHERS, detect, refuse_unless_rank
from ..detection.export import require_master, variables, wait_until_resolves
from ..detection.launchers import Launcher
from ..detection.placement import FIELDS, PLATFORMS, Placement, Platform
from ..errors import DistbootError, with_rank
from ..settings import join_timeout_setting, warn_of_unknown
from ..text import counted, escape_control, ranks_said
from .main import Parser, emit

_LIMIT = 20.0  # seconds for an agent to answer, which asks all others
_SOCKETS = "/proc/net/unix"
_HERE = "run it on a host of the job, in the container or the network namespace of a rank, as its user or root"
_OF_THE_JOB = ("launcher", "world_size", "num_nodes", "master_addr", "master_port")


def show(arguments: list[str]) -> int:
    """`show`: print what was detected, with the source of every value; with --job, where all the ranks are."""
    options = Parser(
        "show",
        "Print what was detected, every value with its source.",
        "--json  print one JSON object\n"
        "--job  run on all ranks: they meet once, and rank 0 says where each is, or who is missing",
    ).parse_args(arguments)
    placement = detect(launcher=options.launcher)
    warn_of_unknown(os.environ, placement.rank, placement.who)
    if options.job:
        _show_job(placement, as_json=options.json)
        return 0
    placement = _with_unused(placement, options.launcher)
    emit(json.dumps(placement.as_dict()) if options.json else _table(placement))
    return 0


def _with_unused(placement: Placement, launcher: str | None) -> Placement:
    """The placement with a note on tasks and hosts that the job leaves unused."""
    unused = surroundings.unused(placement, os.environ, launcher)
    if unused is None:
        return placement
    note = f"{surroundings.described(placement, unused)}: {unused.remedy}"
    return placement._replace(notes=(*placement.notes, note))


def _table(placement: Placement) -> str:
    values = {field: getattr(placement, field) for field in FIELDS}
    shown = {
        field: "-" if value is None else escape_control(str(value))
        for field, value in values.items()
    }
    width = max(map(len, shown.values()))
    lines = [
        f"{field:<16}  {value:<{width}}  {placement.sources.get(field) or _unknown(field, placement)}".rstrip()
        for field, value in shown.items()
    ]
    return "\n".join(
        [
            _headline(placement),
            "",
            *lines,
            *(f"note: {escape_control(note)}" for note in placement.notes),
        ]
    )


def _headline(placement: Placement) -> str:
    """One sentence: who this process is, by whom it was started, and where."""
    launcher = LAUNCHERS[placement.launcher]
    platform = next(
        (f", in {platform.title}" for platform in PLATFORMS if platform.name == placement.platform),
        "",
    )
    if placement.node_level is not None:
        why = escape_control(placement.node_level)
        return (
            f"Node {placement.rank} of {placement.world_size}, and not a rank: {why}.\n"
            f"Started by {launcher.title}{platform}.\n"
            "Start the ranks with: python -m distboot --nproc-per-node N script.py …"
        )
    if launcher.name == "single":
        return f"One process, alone: no launcher claims it{platform}."
    where = f"Rank {placement.rank} of {placement.world_size}"
    of_node, of_job = (
        (placement.local_rank, placement.local_world_size),
        (placement.node_rank, placement.num_nodes),
    )
    for what, (index, count) in (("local rank", of_node), ("node", of_job)):
        if index is not None:
            where += f", {what} {index}" + ("" if count is None else f" of {count}")
    return f"{where}: started by {launcher.title}{platform}."


def _unknown(field: str, placement: Placement) -> str:
    if getattr(placement, field) is not None or field in ("platform", "job_id"):
        return ""
    if field == "master_port" and placement.world_size == 1:
        return "not set: a free one is taken at the start"
    if field in ("master_addr", "master_port"):
        return f"not known: set {field.upper()} for every process"
    return "not known from one process alone: completed when the ranks meet"


def _show_job(placement: Placement, *, as_json: bool) -> None:
    """Let all ranks meet once, and print where each is; or every rank says who is missing."""
    from ..rendezvous.plan import join_here  # here, so that a plain `show` does not pay for sockets

    with with_rank(placement.who):
        refuse_unless_rank(placement)
        with join_here(require_master(placement), os.environ, join_timeout_setting(None)) as job:
            pass
    if placement.rank != 0 or job.membership is None:
        return
    nodes = list(enumerate(zip(job.hosts, job.membership.nodes, strict=True)))
    if as_json:
        of_job = {name: getattr(job.placement, name) for name in _OF_THE_JOB}
        listed = [
            {"node_rank": node, "host": host, "ranks": list(ranks)} for node, (host, ranks) in nodes
        ]
        emit(json.dumps({**of_job, "nodes": listed, "warnings": job.warnings}))
        return
    there = (
        "The one rank is" if placement.world_size == 1 else f"All {placement.world_size} ranks are"
    )
    where = f"rank 0 at {job.placement.master_addr}, port {job.placement.master_port}"
    width = max(map(len, job.hosts))
    lines = [
        f"node {node:<5} {escape_control(host):<{width}}  {ranks_said(sorted(ranks))}"
        for node, (host, ranks) in nodes
    ]
    emit("\n".join([f"{there} there, on {counted(len(nodes), 'node')}; {where}.", *lines]))


def env(arguments: list[str]) -> int:
    """`env`: print the variables that `run` exports."""
    parser = Parser(
        "env", 'Print the variables that `run` exports: eval "$(python -m distboot env)"'
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--format",
        choices=("shell", "docker", "dotenv"),
        default="shell",
        help="shell: export and unset lines (default); for a container: docker: -e NAME=value …, to be read by a shell "
        '(eval "docker run $(…) image"), or dotenv: NAME=value lines, for docker run --env-file',
    )
    form.add_argument(
        "--json", action="store_true", help="print one JSON object; null means: must not be set"
    )
    options = parser.parse_args(arguments)
    placement = detect(launcher=options.launcher)
    with with_rank(placement.who):
        refuse_unless_rank(placement)
        placement = require_master(placement)
        wait_until_resolves(placement, join_timeout_setting(None))
    exports = variables(placement, os.environ, named=options.launcher)
    if options.json:
        emit(json.dumps(exports))
    elif options.format == "shell":
        shell = (
            f"unset {n}" if value is None else f"export {n}={shlex.quote(value)}"
            for n, value in exports.items()
        )
        emit("\n".join(shell))
    else:
        # There the variables of the launcher are not, which these two speak of.
        ours = (inherited.VARIABLE, "DISTBOOT_LAUNCHER")
        texts = [
            f"{name}={value}"
            for name, value in exports.items()
            if value is not None and name not in ours
        ]
        emit(docker(texts) if options.format == "docker" else "\n".join(texts))
    return 0


def docker(variables: list[str]) -> str:
    """Options of `docker run` for variables NAME=value, as a shell reads them: `-e RANK=3 -e 'NAME=two words'`."""
    return " ".join(f"-e {shlex.quote(text)}" for text in variables)


def launchers(arguments: list[str]) -> int:
    """`launchers`: print the table of all that can be recognised, from the records that detection itself uses."""
    description = "Print all launchers, innermost first, and all platforms that can be recognised."
    options = Parser("launchers", description, "--json  print one JSON object").parse_args(
        arguments
    )
    if options.json:
        known: dict[str, tuple[Launcher | Platform, ...]] = {
            "launchers": INNERMOST_FIRST,
            "platforms": PLATFORMS,
        }
        fields = ("name", "title", "markers", "source")
        listed = {
            kind: [{name: getattr(one, name) for name in fields} for one in all_]
            for kind, all_ in known.items()
        }
        emit(json.dumps(listed))
        return 0
    lines = ["launchers, the innermost first: the first that claims a process owns its rank"]
    lines += map(_recognised, INNERMOST_FIRST)
    lines += [
        "",
        "platforms: they own no rank, but may know the address of rank 0 and the job's id",
    ]
    lines += map(_recognised, PLATFORMS)
    emit("\n".join(lines))
    return 0


def _recognised(known: Launcher | Platform) -> str:
    markers = ", ".join(known.markers) or "when nothing above claims the process"
    return f"  {known.name:<11} {known.title}\n  {'':<11}   {markers}"


def stacks(arguments: list[str]) -> int:
    """`stacks`: print the Python stacks of all ranks, equal ones once, those of fewest ranks first."""
    parser = Parser(
        "stacks", "Print where all ranks of a job on this host are: their Python stacks, folded."
    )
    parser.add_argument(
        "--pid", type=int, default=0, help="of a wrapper, a sidecar or a script of the job"
    )
    parser.add_argument(
        "--job", default="", help="the launcher's id of it, where several jobs are here"
    )
    options = parser.parse_args(arguments)
    found = _agents(options.job)
    if not found:
        raise DistbootError("usage", "no agent of a job runs on this host", _HERE)
    if len(found) > 1 and not options.pid:
        hint = f"give one: --job {', --job '.join(sorted(found))}"
        raise DistbootError("usage", f"{len(found)} jobs run on this host", hint)
    for name in (name for names in found.values() for name in names):
        said = _ask(name, options.pid)
        if said is not None:
            emit("\n".join(map(escape_control, said)))
            return 0
    of = f" for --pid {options.pid}" if options.pid else ""
    raise DistbootError("usage", f"no agent on this host answers{of}", _HERE)


def _agents(job: str) -> dict[str, list[str]]:
    """The names of the sockets of the agents of a job, or of all jobs, in this network namespace, by job."""
    from ..rendezvous.local import PREFIX, socket_name

    # 4711 is that of step 4711.0
    wanted = tuple(socket_name(job) + end for end in (".", "-")) if job else ("",)
    found: dict[str, list[str]] = {}
    with suppress(OSError), open(_SOCKETS, encoding="ascii", errors="replace") as file:
        for line in file:
            name = re.search(rf"@({PREFIX}([\w.-]+)-[0-9a-f]+)$", line.rstrip())
            if (
                name is not None
                and f"{name[2]}-".startswith(wanted)
                and name[1] not in found.get(name[2], ())
            ):
                found.setdefault(name[2], []).append(name[1])
    return found


def _ask(name: str, pid: int) -> Sequence[str] | None:
    """What an agent says; None: it has ended, or it is not that of this process."""
    import socket

    from ..rendezvous.local import AgentLink
    from ..rendezvous.messages import AskStacks, ShowStacks

    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError, DistbootError):
        connection.settimeout(_LIMIT)
        connection.connect(f"\0{name}")
        answer: ShowStacks = AgentLink(connection).ask(AskStacks(pid), _LIMIT, ShowStacks)
        return answer.lines
    return None
