"""`run`, the wrapper: detect, export, start the script or command as a child, and end as it ends."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager

from .. import frameworks, nodes, supervise
from ..detection import detect
from ..errors import DistbootError, printable, quoted, said_by
from ..exports import applied, variables
from ..lifeline.settings import grace_setting, settings
from ..placement import Placement
from ..rendezvous import join_timeout_setting, roll_call_setting, settled, wait_until_resolves
from .parser import Parser

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace

    from ..logs import Logs


def main(arguments: list[str]) -> int:
    """Run the command; the exit code of the child."""
    options, target = _split(arguments)
    parser = _parser()
    parsed = parser.parse_args(options)
    if not target:
        parser.error("no script, module or command to run")
    placement = detect(launcher=parsed.launcher)
    with said_by(placement.who):
        command = _command(target)
        seconds, grace = join_timeout_setting(parsed.join_timeout), grace_setting(os.environ, parsed.grace)
        if parsed.nproc_per_node:
            return _through_torchrun(parsed, placement, target, command)
        nodes.refuse_unless_rank(placement)
        placement = settled(placement)
        logs, problem = _logs(parsed, placement)
        if placement.world_size == 1 or not roll_call_setting():
            if problem is not None:
                raise problem
            wait_until_resolves(placement, seconds)
            others = _alone(parsed.framework, placement, seconds)
            exports = variables(placement, os.environ, named=parsed.launcher, others=others)
            return supervise.run(command, _unbuffered(applied(exports, os.environ), logs), grace=grace, logs=logs)
        lifeline = settings(os.environ, grace)
        from .. import interfaces  # here and below, so that a process that is alone does not pay for sockets
        from ..lifeline.keeper import Keeper
        from ..rollcall.attend import attend

        framework, problem = parsed.framework, _not_there(command[0]) or problem
        with _ended_by_term():
            meeting = attend(placement, os.environ, seconds, framework=framework, problem=problem)
        with meeting:
            with _ended_by_term():  # here, too, ranks may wait for each other
                others = frameworks.exports(framework, meeting, os.environ)
            exports = variables(
                meeting.placement,
                os.environ,
                named=parsed.launcher,
                others=others,
                met=True,
                watched=lifeline is not None,
            )
            exports |= interfaces.variables(meeting.interface, os.environ)
            meeting.vacate()
            environ = _unbuffered(applied(exports, os.environ), logs)
            watch = None
            if lifeline is None:
                meeting.goodbye()
            else:
                watch = Keeper(meeting, lifeline, environ.get("DISTBOOT_SECRET", ""))
                environ = watch.environ(environ)
            return supervise.run(command, environ, grace=grace, open_files=meeting.open_files, watch=watch, logs=logs)


def _through_torchrun(parsed: Namespace, placement: Placement, target: list[str], command: list[str]) -> int:
    """Let torchrun start the ranks of this node; its exit code."""
    nodes.refuse_several_here(placement, os.environ)
    problem = _not_there(command[0])  # torchrun would say so with a traceback, once for each rank
    if problem is not None:
        raise problem
    placement = settled(placement)
    wait_until_resolves(placement, join_timeout_setting(parsed.join_timeout))
    options = _of_a_rank(parsed)
    if options:  # each rank has a wrapper of its own
        target = ["--", sys.executable, "-m", "distboot", "run", *options, "--", *command]
    command = [*nodes.torchrun(placement, parsed.nproc_per_node), *nodes.agent_target(target)]
    grace = grace_setting(os.environ, parsed.grace)
    return supervise.run(command, nodes.agent_environ(os.environ, placement), grace=grace)


def _of_a_rank(parsed: Namespace) -> list[str]:
    """Those of our options that only a wrapper of the rank itself can heed; and then the others for it."""
    options = ["--log-prefix"] if parsed.log_prefix else []
    options += [] if parsed.log_dir is None else [f"--log-dir={parsed.log_dir}"]
    options += [] if parsed.framework == "torch" else [f"--framework={parsed.framework}"]
    if options:
        options += [] if parsed.join_timeout is None else [f"--join-timeout={parsed.join_timeout}"]
        options += [] if parsed.grace is None else [f"--grace={parsed.grace}"]
    return options


def _alone(framework: str, placement: Placement, join_timeout: float) -> dict[str, str]:
    """What the framework reads besides torch's variables, where the ranks do not meet."""
    if framework == "torch":
        return {}  # and whoever starts it does not pay for sockets
    from ..rollcall.meeting import alone

    return frameworks.exports(framework, alone(placement, join_timeout), os.environ)


def _not_there(program: str) -> DistbootError | None:
    """What the other ranks should hear, too, if they have the command and this one has not."""
    if shutil.which(program) is not None or os.path.exists(program):  # the latter is found out when it is started
        return None
    return DistbootError("command-not-found", f"{quoted(program)} does not exist", "check PATH and spelling")


def _logs(parsed: Namespace, placement: Placement) -> tuple[Logs | None, DistbootError | None]:
    """Where the output goes, if not to where ours does; or why it cannot, which the other ranks should hear, too."""
    if not parsed.log_prefix and parsed.log_dir is None:
        return None, None
    from ..logs import Logs

    try:
        return Logs(placement.rank, placement.who, prefix=parsed.log_prefix, folder=parsed.log_dir), None
    except DistbootError as error:
        return None, error


def _unbuffered(environ: dict[str, str], logs: Logs | None) -> dict[str, str]:
    """The environment for a child whose output is a pipe, in which Python would else keep it back until it ends."""
    return environ if logs is None else {"PYTHONUNBUFFERED": "1", **environ}


@contextmanager
def _ended_by_term() -> Iterator[None]:
    """Let TERM end us also as process 1 of a container, for which the kernel drops what has no handler."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _processes(text: str) -> str:
    if text in ("auto", "gpu", "cpu") or (text.isascii() and text.isdigit() and 0 < int(text[:6]) < 10_000):
        return text
    raise ArgumentTypeError(f"{text!r} is neither a number of processes nor auto, gpu or cpu")


def _folder(text: str) -> str:
    if not text:
        raise ArgumentTypeError("the name of a folder is needed")
    return text


def _parser() -> Parser:
    parser = Parser(
        "run",
        "Export the variables of torch.distributed and run a script or command as a child: signals are forwarded to "
        "it, and its exit code is ours (128 + n when signal n ended it, 127 not found, 126 not executable).",
        usage="python -m distboot [run] [options] (script.py | -m module | -- command) [arguments …]",
    )
    parser.add_argument(
        "--join-timeout",
        type=float,
        metavar="SECONDS",
        help="how long to wait for all ranks to be there (default: DISTBOOT_JOIN_TIMEOUT, or 300)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        metavar="SECONDS",
        help="how long the child may take to end after TERM, before KILL (default: DISTBOOT_GRACE, or 30)",
    )
    parser.add_argument(
        "--framework",
        choices=tuple(dict.fromkeys(frameworks.FILES.values())),
        default="torch",
        metavar="NAME",
        help="what the script starts: torch (the default, and whatever is built on it), deepspeed, horovod, "
        "tensorflow, jax, mpi, none; the variables that it reads are exported: HOROVOD_*, TF_CONFIG, …",
    )
    parser.add_argument(
        "--nproc-per-node",
        type=_processes,
        metavar="N|auto",
        help="for launches of one process a node: let torchrun start N processes here, with the node rank, the number "
        "of nodes and the address found (auto or gpu: one an accelerator; cpu: one a CPU)",
    )
    parser.add_argument(
        "--log-prefix",
        action="store_true",
        help="begin each line of the output with its rank and host",
    )
    parser.add_argument(
        "--log-dir",
        type=_folder,
        metavar="DIR",
        help="also append the output to a file for each rank: DIR/rank-3.log",
    )
    return parser


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our own options, and the target: what follows belongs to it, also if it looks like one of ours."""
    takes_value = {"--launcher", "--framework", "--join-timeout", "--grace", "--nproc-per-node", "--log-dir"}
    index = 0
    while index < len(arguments) and arguments[index].startswith("-") and arguments[index] not in ("-m", "--"):
        index += 2 if arguments[index] in takes_value else 1
    return arguments[:index], arguments[index:]


def _command(target: list[str]) -> list[str]:
    if target[0] == "--":
        if len(target) == 1:
            raise DistbootError("usage", "no command after '--'", "python -m distboot run -- command [arguments …]")
        return target[1:]
    python = [sys.executable, *_interpreter_options()]
    if target[0] == "-m":
        if len(target) == 1:
            raise DistbootError("usage", "no module after '-m'", "python -m distboot run -m module [arguments …]")
        return [*python, *target]
    script = target[0]
    if not os.path.exists(script):
        raise DistbootError(
            "command-not-found",
            f"there is no script {quoted(script)}",
            f"check the path; any other command goes after '--': run -- {printable(script)} …; or is it show or env?",
        )
    if not os.access(script, os.R_OK):
        raise DistbootError("command-not-executable", f"the script {quoted(script)} may not be read", "chmod +r it")
    return [*python, *target]


def _interpreter_options() -> list[str]:
    """The options of this Python, so that `python -u -m distboot train.py` runs `python -u train.py`."""
    spec = sys.modules["__main__"].__spec__
    if spec is None or spec.name != "distboot.__main__":  # the console script: its Python has no options of its own
        return []
    options: list[str] = []
    for word in sys.orig_argv[1:]:
        if word.startswith("-") and not word.startswith("--") and "m" in word and word[1] not in "WXc":
            flags = word[: word.index("m")]  # -m, or -Im, or -mdistboot
            return [*options, flags] if flags != "-" else options
        options.append(word)
    return options
