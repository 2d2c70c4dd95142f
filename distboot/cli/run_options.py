"""The options of `run`, and where they end: what follows belongs to the script or command."""

from __future__ import annotations

import os
import re
from argparse import ArgumentTypeError

from .. import arguments, frameworks
from ..errors import did_you_mean
from .parser import Parser

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace

# What is torchrun's, and is passed on to it; the names that `Namespace` has for them.
_TORCHRUN = ("max_restarts", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf")
_STAYS = "nobody stays for it where --exec replaces the wrapper by the command"


def parse(words: list[str]) -> tuple[Namespace, list[str]]:
    """Our own options, and the target.

    Raises:
        DistbootError: `usage`.
    """
    own, target = _split(words)
    parser = _parser()
    options = parser.parse_args(own)
    if not target:
        parser.error("no script, module or command to run")
    if options.exec and options.framework in ("horovod", "tensorflow"):
        parser.error(f"--framework {options.framework}: the wrapper holds a port for the script, and {_STAYS}")
    for name in ("grace", "log_dir", "log_prefix", "report"):
        if options.exec and getattr(options, name):
            parser.error(f"--{name.replace('_', '-')}: {_STAYS}")
    for name in _TORCHRUN:
        if getattr(options, name) is not None and not options.nproc_per_node:
            parser.error(f"--{name.replace('_', '-')} is torchrun's, which --nproc-per-node starts")
    return options, target


def of_torchrun(options: Namespace) -> list[str]:
    """Those of our options that are torchrun's."""
    given = ((name, getattr(options, name)) for name in _TORCHRUN)
    return [f"--{name.replace('_', '-')}={value}" for name, value in given if value is not None]


def of_a_rank(options: Namespace) -> list[str]:
    """Those of our options that only a wrapper of the rank itself can heed; empty: it needs none."""
    own = ["--log-prefix"] if options.log_prefix else []
    own += [] if options.log_dir is None else [f"--log-dir={options.log_dir}"]
    own += [] if options.report is None else [f"--report={options.report}"]
    own += [] if options.framework == "torch" else [f"--framework={options.framework}"]
    own += [] if options.pass_local_rank is None else [f"--pass-local-rank={options.pass_local_rank}"]
    return own


def for_every_wrapper(options: Namespace) -> list[str]:
    """Those that each wrapper of a rank is to have, too, if it has one."""
    both = ["--exec"] if options.exec else []
    both += [] if options.join_timeout is None else [f"--join-timeout={options.join_timeout}"]
    return both + ([] if options.grace is None else [f"--grace={options.grace}"])


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    names = ("launcher", "framework", "join_timeout", "grace", "nproc_per_node", "log_dir", "report", *_TORCHRUN)
    takes_value = {f"--{name.replace('_', '-')}" for name in names}
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] not in ("-m", "--"):
        index += 2 if words[index] in takes_value else 1
    # torch.distributed.launch and DeepSpeed's launcher put --local-rank=N before what they take for our arguments.
    return arguments.without_local_rank(words[:index]), words[index:]


def _processes(text: str) -> str:
    if text in ("auto", "gpu", "cpu") or (text.isascii() and text.isdigit() and 0 < int(text[:6]) < 10_000):
        return text
    raise ArgumentTypeError(f"{text!r} is neither a number of processes nor auto, gpu or cpu")


def _folder(text: str) -> str:
    if not text:
        raise ArgumentTypeError("the name of a folder is needed")
    return text


def _file(text: str) -> str:
    if not text:
        raise ArgumentTypeError("the name of a file is needed")
    return os.path.abspath(text)


def _framework(text: str) -> str:
    """The name of a framework for the wrapper; the names for `init` will do."""
    if text in frameworks.FILES:
        return frameworks.FILES[text]
    names = tuple(dict.fromkeys(frameworks.FILES.values()))
    if text in names:
        return text
    raise ArgumentTypeError(f"{text!r} is no framework: {did_you_mean(text, names)}they are {', '.join(names)}")


def _option(text: str) -> str:
    if re.fullmatch(r"--?[A-Za-z][\w-]*", text, re.ASCII):
        return text
    raise ArgumentTypeError(f"{text!r} is no name of an option, as --local_rank is")


def _parser() -> Parser:
    parser = Parser(
        "run",
        "Export the variables of torch.distributed and run a script or command as a child: signals are forwarded to "
        "it, and its exit code is ours (128 + n when signal n ended it, 127 not found, 126 not executable).",
        usage="python -m distboot [run] [options] (script.py | -m module | -- command) [arguments …]",
    )
    parser.add_argument(
        "--join-timeout",
        metavar="SECONDS",
        help="how long to wait for all ranks to be there (default: DISTBOOT_JOIN_TIMEOUT, or 300)",
    )
    parser.add_argument(
        "--grace",
        metavar="SECONDS",
        help="how long the child may take to end after TERM, before KILL (default: DISTBOOT_GRACE, or 30)",
    )
    parser.add_argument(
        "--framework",
        type=_framework,
        default="torch",
        metavar="NAME",
        help="what the script starts: torch (the default, and whatever is built on it), deepspeed, horovod, "
        "tensorflow, jax, mpi, none; the variables that it reads are exported: HOROVOD_*, TF_CONFIG, …",
    )
    parser.add_argument(
        "--pass-local-rank",
        nargs="?",
        const=arguments.NAME,
        type=_option,
        metavar="NAME",
        help=f"pass the local rank to the script, for example as {arguments.NAME}=3 (=NAME: in another spelling); "
        "without it the one that torch.distributed.launch or DeepSpeed's launcher pass is kept from the script",
    )
    parser.add_argument(
        "--exec",
        action="store_true",
        help="become the command, instead of staying as its parent: there is no lifeline then, and no grace; not with "
        "--framework horovod or tensorflow, for whose scripts the wrapper holds a port",
    )
    parser.add_argument(
        "--log-prefix", action="store_true", help="begin each line of the output with its rank and host"
    )
    parser.add_argument(
        "--log-dir",
        type=_folder,
        metavar="DIR",
        help="also append the output to a file for each rank: DIR/rank-3.log",
    )
    parser.add_argument(
        "--report",
        type=_file,
        metavar="FILE",
        help="write a report of the job, on rank 0's host: who was there, how each rank began and ended, who failed "
        "first; one HTML page if FILE ends in .html, else JSON (default: DISTBOOT_REPORT, or none)",
    )
    _add_per_node(parser)
    return parser


def _add_per_node(parser: Parser) -> None:
    group = parser.add_argument_group("for launches of one process a node, pod or container")
    group.add_argument(
        "--nproc-per-node",
        type=_processes,
        metavar="N|auto",
        help="let torchrun (without torch: mpirun, on one node) start N processes here, with the node rank, the number "
        "of nodes and the address found (gpu: one an accelerator; cpu: one a CPU; auto: gpu, or cpu if there are none)",
    )
    group.add_argument("--max-restarts", type=int, metavar="N", help="of torchrun: start failed ranks anew so often")
    for name, what in (
        ("backend", "how its agents meet, for example c10d (default: static)"),
        ("endpoint", "where (default: the address and port found)"),
        ("id", "the name of the job for them (default: the job's id)"),
        ("conf", "more for that backend, as key=value,…"),
    ):
        group.add_argument(f"--rdzv-{name}", metavar=name.upper(), help=f"of torchrun: {what}")
