"""The options of `run`, and where they end: what follows is the script's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from .. import frameworks
from ..base import settings
from ..base.errors import DistbootError
from ..base.patterns import pattern
from ..base.settings import option_help
from ..base.text import did_you_mean, log_line, short_repr
from ..detection.local_rank_option import LOCAL_RANK, empty_local_rank
from ..detection.placement import Placement
from . import torchrun_options
from .nested_launcher import Nested
from .option_table import default_values
from .target import Target, begins_target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .parser import Parser

# The last words: an option, and a script that became its value. The words are between \0.
_TAKEN = pattern(r"(?<![^\0])(--?[^-\0=][^\0=]*)\0([^-\0\s=@][^\0\s=@]*\.py)\Z")
_OPTION_NAME = pattern(r"--?[A-Za-z][\w-]*", re.ASCII)
_WITH_EXEC = "cannot be used with --exec, because the wrapper is replaced by the command"
# For these the wrapper holds a port, until their script takes it
_NEED_WRAPPER = ("horovod", "tensorflow")


def _text(is_valid: Callable[[str], object], problem: str) -> Callable[[str], str]:
    """The type of an option for argparse; `problem` is a text such as "{} is not a number"."""

    def check(text: str) -> str:
        if not is_valid(text):
            from argparse import ArgumentTypeError  # here and below: most starts have no options

            raise ArgumentTypeError(problem.format(short_repr(text)))
        return text

    return check


def _option_name(text: str) -> str:
    """The value of --pass-local-rank."""
    if _OPTION_NAME.fullmatch(text):
        return text
    shown = short_repr(text)
    dashed = f"--{text}"
    if _OPTION_NAME.fullmatch(dashed):
        raise DistbootError(
            "usage",
            f"--pass-local-rank={shown} does not begin with '--'",
            f"--pass-local-rank={dashed}",
        )
    raise DistbootError(
        "usage",
        f"--pass-local-rank: {shown} is not a valid name of an option",
        f"--pass-local-rank={LOCAL_RANK}",
    )


def _framework(text: str) -> str:
    """The name of a framework for the wrapper, also from one for `init`: "horovod.torch"."""
    if text in frameworks.FILES:
        return frameworks.FILES[text].wrapper_name
    names = tuple(frameworks.WRAPPER_FILES)
    if text not in names:
        from argparse import ArgumentTypeError

        meant = did_you_mean(text, names)
        listed = ", ".join(names)
        shown = short_repr(text)
        raise ArgumentTypeError(f"{shown} is not a valid framework: {meant}they are {listed}")
    return text


_DETECTS = option_help("DISTBOOT_LAUNCHER")  # the parser adds it, as to all commands that detect
_OPTIONS = (
    # Most used first
    option_help("DISTBOOT_NPROC_PER_NODE"),
    option_help("DISTBOOT_MAX_RESTARTS"),
    option_help("DISTBOOT_REPORT"),
    "--log-prefix  begin each line of the output with its rank and host",
    "--log-dir DIR  also append the output to a file for each rank: DIR/rank-3.log",
    option_help("DISTBOOT_JOIN_TIMEOUT"),
    option_help("DISTBOOT_CHECK"),
    option_help("DISTBOOT_BIND"),
    option_help("DISTBOOT_SHARE_ENV"),
    option_help("DISTBOOT_GRACE"),
    option_help("DISTBOOT_RESTART_DELAY"),
    option_help("DISTBOOT_RESTART_WINDOW"),
    option_help("DISTBOOT_LOG_FORMAT"),
    """\
--framework NAME  what the script uses: torch (the default, also for frameworks built on it),
  deepspeed, horovod, tensorflow, jax, mpi, none; distboot also exports the variables that it reads:
  HOROVOD_*, TF_CONFIG, …""",
    f"""\
--pass-local-rank NAME  pass the local rank to the script, for example as {LOCAL_RANK}=3 (=NAME: in
  another spelling); without it, what torch.distributed.launch or DeepSpeed's
  launcher passes is removed, unless the script adds such an option; with --framework deepspeed, a
  script that has such an option gets it""",
    """\
--exec  replace the wrapper by the command: no failure detection and no grace; not with --framework
  horovod or tensorflow, because the wrapper holds a port for their scripts""",
    torchrun_options.TITLE,
    *torchrun_options.OPTIONS,
)
_MORE: dict[str, dict[str, Any]] = {
    **torchrun_options.MORE,
    "--framework": {"type": _framework, "default": "torch"},
    "--pass-local-rank": {
        "type": _option_name,
        "nargs": "?",
        "const": LOCAL_RANK,
    },
    "--log-dir": {"type": _text(bool, "the name of a folder is needed")},
    "--report": {"type": _text(bool, "the name of a file is needed")},
}
_DESCRIPTION = (
    "Export the variables of torch.distributed and run a script or command as a child: signals are "
    "forwarded to it, and its exit code is the wrapper's (128 + n when signal n ended it, 127 not "
    "found, 126 not executable)."
)
_USAGE = "python -m distboot [run] [options] (script.py | -m module | -- command) [arguments …]"
_NOT_WITH_EXEC = {
    "grace": "--grace",
    "log_dir": "--log-dir",
    "log_prefix": "--log-prefix",
    "report": "--report",
    "nproc_per_node": "--nproc-per-node (or DISTBOOT_NPROC_PER_NODE)",
}


def run_parser() -> Parser:
    """The parser of the options of `run`."""
    from .parser import Parser

    parser = Parser(
        "run",
        _DESCRIPTION,
        "\n".join(_OPTIONS),
        more=_MORE,
        usage=_USAGE,
        hints=torchrun_options.HINTS,
    )
    parser.set_defaults(one_per_node_by="")  # see `torchrun_options.apply`
    return parser


def parse(argv: list[str], environ: MutableMapping[str, str]) -> tuple[SimpleNamespace, list[str]]:
    """The options of `run`, and the target with its arguments.

    Options that the ranks read, too, are copied into `environ`; what is for this wrapper alone is
    removed from it.
    """
    has_no_options = bool(argv) and begins_target(argv[0])
    if has_no_options:
        # Without argparse
        options = SimpleNamespace(**default_values("\n".join((_DETECTS, *_OPTIONS)), _MORE))
        target = list(argv)
    else:
        options, target = _parsed(argv, environ)
    if target[:1] == ["--module"]:
        target[0] = "-m"
    if _is_flag(target):
        options, target = _parsed_with_flag(argv, target, environ)
    drops_separator = torchrun_options.has_any(options)
    for_ranks = {
        "DISTBOOT_SHARE_ENV": options.share_env,
        "DISTBOOT_LOG_FORMAT": options.log_format,
    }
    for variable, value in for_ranks.items():
        if value is not None:
            settings.value_of(variable, environ, value)  # refuses what is not valid
            environ[variable] = value
    options.nproc_per_node = _nproc_per_node(options, environ)
    environ.pop("DISTBOOT_NPROC_PER_NODE", None)
    if not target:
        run_parser().error(f"no script, module or command to run{_taken_script(argv)}")
    torchrun_options.apply(options, environ)
    if drops_separator:
        target = torchrun_options.without_separator(target)
    target = torchrun_options.as_command(options, target)
    if options.exec:
        _refuse_with_exec(options)
    return options, target


def _taken_script(argv: list[str]) -> str:
    """Which option has the script as its value, as its own is missing; empty: none."""
    taken = _TAKEN.search("\0".join(argv))
    if taken is None:
        return ""
    option, script = taken.groups()
    return f": {option} took {script!r} as its value"


def _nproc_per_node(options: SimpleNamespace, environ: Mapping[str, str]) -> str | None:
    """The value of --nproc-per-node, or else of DISTBOOT_NPROC_PER_NODE."""
    try:
        found: str | None = settings.value_of(
            "DISTBOOT_NPROC_PER_NODE", environ, options.nproc_per_node
        )
    except DistbootError:
        # The other variables are read later, and would be refused in a second attempt
        if options.nproc_per_node is None:
            settings.refuse_invalid(environ, list(overriding(options)))
        raise
    return found


def _parsed_with_flag(
    argv: list[str], target: list[str], environ: MutableMapping[str, str]
) -> tuple[SimpleNamespace, list[str]]:
    """Options and target of a command such as `torchrun -m --nproc-per-node 8 module`."""
    before = argv[: len(argv) - len(target)]
    options, module = _parsed([*before, *target[1:]], environ)
    if module[:1] in (["--"], ["-m"]):
        module = module[1:]
    return options, ["-m", *module]


def _is_flag(target: Sequence[str]) -> bool:
    """Whether -m says that a module follows the options, in place of preceding its name."""
    after = target[1:2]
    is_module = target[:1] == ["-m"]
    return is_module and after != ["--"] and "".join(after).startswith("-")


def _parsed(
    argv: list[str], environ: MutableMapping[str, str]
) -> tuple[SimpleNamespace, list[str]]:
    """The options that are given, and what follows them."""
    parser = run_parser()
    own, target = parser.split(argv)
    # In the environment, for the command too; at once, for errors in the other options
    log_format = _value_of("--log-format", own)
    if log_format == "json":
        environ["DISTBOOT_LOG_FORMAT"] = log_format
    return parser.parse_args(own, SimpleNamespace()), target


def _value_of(option: str, argv: Sequence[str]) -> str | None:
    """The last value of an option on a command line that argparse has not checked yet."""
    found = None
    previous = ""
    for word in argv:
        name, equals, value = word.partition("=")
        if previous == option:
            found = word
        elif name == option and equals:
            found = value
        previous = word
    return found


def _refuse_with_exec(options: SimpleNamespace) -> None:
    given = [option for name, option in _NOT_WITH_EXEC.items() if getattr(options, name)]
    if options.framework in _NEED_WRAPPER:
        holds = f"--framework {options.framework}, for which the wrapper holds a port,"
        given.insert(0, holds)
    if given:
        raise _exec_error(given[0])


def _exec_error(option: str) -> DistbootError:
    return DistbootError(
        "usage",
        f"{option} {_WITH_EXEC}",
        "leave one of them out",
    )


def complete(
    options: SimpleNamespace, environ: Mapping[str, str], given: Mapping[str, object]
) -> None:
    """Add what the environment sets and no option does; refuse what is invalid or impossible.

    `given`: what `overriding` has found.
    """
    settings.refuse_invalid(environ, list(given))
    options.join_timeout = settings.value_of("DISTBOOT_JOIN_TIMEOUT", environ, options.join_timeout)
    options.grace = settings.value_of("DISTBOOT_GRACE", environ, options.grace)
    options.check = settings.value_of("DISTBOOT_CHECK", environ, options.check)
    options.bind = settings.value_of("DISTBOOT_BIND", environ, options.bind)
    options.restarts = _restarts_of(options, environ)


def overriding(options: SimpleNamespace) -> dict[str, object]:
    """What each option gives that was given, by its variable."""
    found = {}
    for setting in filter(attrgetter("option"), settings.SETTINGS):
        attribute = setting.option.removeprefix("--").replace("-", "_")
        value = getattr(options, attribute)
        if value is not None:
            found[setting.variable] = value
    return found


def _restarts_of(options: SimpleNamespace, environ: Mapping[str, str]) -> settings.RestartSettings:
    """How often and when the command is started again."""
    found = settings.restart_settings(
        environ, options.max_restarts, options.restart_delay, options.restart_window
    )
    if not found.most:
        return found
    restarts = "--max-restarts (or DISTBOOT_MAX_RESTARTS)"
    if options.exec:
        raise _exec_error(restarts)
    if options.framework == "mpi":
        why = "its launcher lets each of its processes call MPI_Init once"
        problem = f"{restarts} cannot be used with MPI: {why}"
        raise DistbootError(
            "usage",
            problem,
            "let the platform start the job again",
        )
    switch = settings.unwatched_by(environ)
    if switch:
        problem = f"{restarts} needs failure detection, which {switch}=0 turns off"
        raise DistbootError(
            "usage",
            problem,
            f"unset {switch}, or leave {restarts} out",
        )
    return found


def check_local_rank(
    options: SimpleNamespace, target: Target, nested: Nested | None, placement: Placement
) -> None:
    """Refuse to pass the local rank to a launcher; log an argument for it that is empty."""
    if options.pass_local_rank:
        _refuse_launcher(nested)
        return
    arguments = (target.of_python or target.words)[1:]
    empty = empty_local_rank(arguments)
    if empty is not None and placement.rank == 0:
        remedy = "leave it out, and pass it with python -m distboot run --pass-local-rank"
        log_line(placement.who, f"{empty}: {remedy}")


def _refuse_launcher(nested: Nested | None) -> None:
    if nested is None:
        return
    passes = "--pass-local-rank passes the local rank of this process"
    problem = f"{passes}, and {nested.name} starts others"
    raise DistbootError(
        "usage",
        problem,
        f"give it to a wrapper that {nested.name} starts",
    )
