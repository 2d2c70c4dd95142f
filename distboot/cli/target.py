"""What the wrapper is to run: a script or module in its own Python, another command, or another launcher.

And what the text of an unmodified script says, where that has to be known before it starts.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ..detection.export import with_local_rank
from ..detection.launchers.records import MPI_LAUNCHERS
from ..detection.launchers.tf_config import has_servers
from ..detection.placement import Placement
from ..errors import DistbootError
from ..host import free_port
from ..process import command_error, command_not_found
from ..text import did_you_mean, escape_control, short_repr

_PROGRAM = re.compile(
    r"(torchrun|deepspeed|horovodrun|mpirun|mpiexec|orterun|prterun|mpirun_rsh|srun|jsrun|aprun|accelerate)"
    r"(\.(openmpi|mpich|hydra))?"
)
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
    "horovod.runner.launch": "horovodrun",
    "accelerate.commands.launch": "accelerate",
}
_HAS_PORT = re.compile(r"\0--master[-_]port[=\0]")
_SHELLS = ("sh", "bash", "dash", "zsh")
# One process on each node starts these, and tells them of the others with such options: what shows it, and all of them.
_TOGETHER = {
    "torchrun": (
        r"\0--nnodes[=\0](?!(\d+:)?1\0)",
        "--nnodes, --node-rank, --master-addr and --master-port",
    ),
    "deepspeed": (
        r"\0--no_ssh\0",
        "--hostfile, --no_ssh, --node_rank, --master_addr and --master_port",
    ),
    "accelerate": (
        r"\0--(config_file[=\0]|num[-_]machines[=\0](?!1\0))",
        "--num_machines, --machine_rank, --main_process_ip and --main_process_port",
    ),
}
# Without these `accelerate launch` may start one process, which is the rank itself, and needs RANK and its like.
_STARTS_SEVERAL = re.compile(
    r"\0--(multi[-_]gpu\0|use[-_]deepspeed\0|use[-_]fsdp\0|num[-_]processes[=\0](?!1\0))"
)
_LONGEST = 1 << 20  # bytes of a script that are read
# Name of a framework for the wrapper -> what a script says that starts it.
_STARTS = {
    "horovod": re.compile(r"^[ \t]*(?:import|from)[ \t]+horovod\b", re.MULTILINE),
    "tensorflow": re.compile(r"\b(?:MultiWorkerMirroredStrategy|ParameterServerStrategy)\("),
    "jax": re.compile(r"\bjax\.distributed\.initialize\(\s*\)"),
}
_KNOWS_US = re.compile(r"^[ \t]*(?:import|from)[ \t]+distboot\b", re.MULTILINE)


class Target(NamedTuple):
    """What the wrapper is to run."""

    # The command, for example `["/usr/bin/python3", "-m", "module", "--epochs", "3"]`
    words: list[str]
    # Where the arguments of a script or module begin in it; its end for any other command
    start: int
    is_command: bool = False  # whether it is any other command, behind `--`

    def with_local_rank(self, local_rank: str, name: str) -> list[str]:
        """The command with the local rank as the first argument of the script, or the last of another command."""
        return [
            *self.words[: self.start],
            *with_local_rank(self.words[self.start :], local_rank, name),
        ]

    @property
    def of_python(self) -> list[str]:
        """The script with its arguments, or `-m`, the module and its own, that a Python is to run; else nothing."""
        if not self._is_python:
            return []
        rest = self.words[1:]
        while rest and rest[0].startswith("-"):
            # -m, -um, -mname, -W, -Xname
            found = re.match(r"-[A-Za-z]*?([mcWX])(.*)", rest[0], re.DOTALL)
            option, value = found.groups() if found else ("", "")
            if option == "m":
                return ["-m", *filter(None, [value]), *rest[1:]]
            if option == "c" or rest[0] == "-":
                return []
            rest = rest[2 if option and not value else 1 :]
        return rest

    @property
    def hides_hooks(self) -> str:
        """The option with which a Python does not run our `sitecustomize`, `"-I"`; empty if there is none."""
        if self._is_python:
            for word in itertools.takewhile(lambda word: word.startswith("-"), self.words[1:]):
                found = re.match("-[A-Za-z]*?([mcWXISE])", word)
                if found is not None and found[1] in "ISE":
                    return f"-{found[1]}"
        return ""

    @property
    def _is_python(self) -> bool:
        name = os.path.basename(self.words[0])
        return self.words[0] == sys.executable or bool(re.fullmatch(r"python[0-9.]*", name))

    @property
    def text(self) -> str:
        """The beginning of the script that a Python is to run; empty if no script can be read."""
        script = "".join(self.of_python[:1])
        if os.path.isfile(script):  # a pipe can be read only once
            with suppress(OSError), open(script, encoding="utf-8", errors="replace") as file:
                return file.read(_LONGEST)
        return ""

    def missing(self) -> DistbootError | None:
        """The error for a program that is not here; other ranks may have it, and should hear of this, too."""
        from shutil import which  # here, so that a process that is alone does not pay for it

        program = self.words[0]
        if which(program) is not None:
            return None
        if os.sep in program and os.path.exists(program):
            return command_error(program, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
        return command_not_found(program)


def target_of(given: list[str]) -> Target:
    """The target that our command line ends with."""
    kind, python = given[0], [sys.executable, *_interpreter_options()]
    if kind in ("--", "-m"):
        what = "command" if kind == "--" else "module"
        if len(given) == 1:
            hint = f"python -m distboot run {kind} {what} [arguments …]"
            raise DistbootError("usage", f"no {what} after {kind!r}", hint)
        if kind == "--":
            return Target(given[1:], len(given) - 1, is_command=True)
        return Target([*python, *given], len(python) + 2)
    script = short_repr(kind)
    if not os.path.exists(kind):
        where = "" if os.path.isabs(kind) else f" in {_working_directory()}"
        meant = did_you_mean(kind, ("run", "show", "env", "launchers", "doctor"))
        hint = f"{meant}check the path; any other command goes after '--': run -- {escape_control(kind)} …"
        raise DistbootError("command-not-found", f"there is no script {script}{where}", hint)
    if not os.access(kind, os.R_OK):
        raise DistbootError(
            "command-not-executable", f"the script {script} may not be read", "chmod +r it"
        )
    return Target([*python, *given], len(python) + 1)


def _working_directory() -> str:
    try:
        return short_repr(os.getcwd())
    except FileNotFoundError:
        return "the working directory, which is no longer there"


def _interpreter_options() -> list[str]:
    """The options of this Python, so that `python -u -m distboot train.py` runs `python -u train.py`."""
    spec = sys.modules["__main__"].__spec__
    # The console script: its Python has no options of its own
    if spec is None or spec.name != "distboot.__main__":
        return []
    options: list[str] = []
    for word in sys.orig_argv[1:]:
        if (
            word.startswith("-")
            and not word.startswith("--")
            and "m" in word
            and word[1] not in "WXc"
        ):
            flags = word[: word.index("m")]  # -m, or -Im, or -mdistboot
            return [*options, flags] if flags != "-" else options
        options.append(word)
    return options


class Nested(NamedTuple):
    """A launcher that is the wrapper's command: its ranks are those of another job, and often each rank starts one.

    `mpirun -n 2 python -m distboot run -- torchrun --standalone train.py` trains two models, and both end well.
    """

    name: str  # what people type, for example "torchrun"
    # Whether its options let the launchers on all nodes start one job together
    is_told_of_nodes: bool
    is_in_shell: bool  # whether a shell starts it, whose other words may be about this process
    start: int  # where its options begin in the command; not for one in a shell

    def command(self, words: Sequence[str]) -> list[str]:
        """The command, with a free port for DeepSpeed, which else takes 29500 for every job of a host."""
        if (
            self.name != "deepspeed"
            or self.is_in_shell
            or self.is_told_of_nodes
            or _HAS_PORT.search("\0".join(words))
        ):
            return list(words)
        return [*words[: self.start], f"--master_port={free_port()}", *words[self.start :]]

    def separate_jobs(self, placement: Placement, per_node: str | None = None) -> str | None:
        """A warning where each rank would start a job of its own, or None; `per_node`: of --nproc-per-node."""
        count, starts = placement.world_size, f"starts {self.name}, which starts a job of its own"
        if self.is_told_of_nodes or (count == 1 and not per_node):
            return None
        if per_node:
            command = f"python -m distboot --nproc-per-node {per_node} script.py …"
            whose = f"each rank of --nproc-per-node {per_node}"
            return f"warning: {whose} {starts}: jobs that train apart. Leave {self.name} out ({command})"
        options = f"; or pass it {_TOGETHER[self.name][1]}" if self.name in _TOGETHER else ""
        return (
            f"warning: each of the {count} ranks {starts}: {count} jobs that "
            f"train apart. Leave {self.name} out, as the {count} ranks are there (python -m distboot script.py …); or "
            "start one process per node, and let the wrapper start the ranks (python -m distboot --nproc-per-node N "
            f"script.py …){options}"
        )


def nested_launcher(target: Target, environ: Mapping[str, str]) -> Nested | None:
    """The launcher that the wrapper's command is, or None."""
    command = _after_env(target.words)
    in_shell = (
        len(command) > 2
        and os.path.basename(command[0]) in _SHELLS
        and re.fullmatch("-[a-z]*c", command[1])
    )
    if in_shell:
        command = _after_env(re.sub(r"^\s*exec\s", "", command[2]).split())
    words = target._replace(words=command).of_python or command  # `python /usr/bin/torchrun`, too
    program = _PROGRAM.fullmatch(os.path.basename(words[0]))
    name = (
        _MODULES.get("".join(words[1:2]), "") if words[0] == "-m" else program[1] if program else ""
    )
    # It has other commands
    if name == "accelerate" and words[0] != "-m" and words[1:2] != ["launch"]:
        return None
    start = len(target.words) - len(words[2:] if words[0] == "-m" else words[1:])
    of_environ = f"--nnodes={environ.get('PET_NNODES', 1)}"  # which torchrun reads
    # And not of the script
    of_launcher = itertools.takewhile(lambda word: not word.endswith(".py"), words[1:])
    options = "\0".join(["", of_environ, *of_launcher, ""])
    if not name or (
        name == "accelerate" and ("\0--cpu\0" in options or not _STARTS_SEVERAL.search(options))
    ):
        return None
    is_told = name in _TOGETHER and re.search(_TOGETHER[name][0], options) is not None
    return Nested(name, is_told, bool(in_shell), start)


def _after_env(words: list[str]) -> list[str]:
    """A command without the `env NAME=VALUE …` before it."""
    if os.path.basename("".join(words[:1])) == "env":
        words = words[1:]
        while words and (words[0].startswith("-") or "=" in words[0]):
            words = words[2 if words[0] in ("-u", "-C", "--unset", "--chdir") else 1 :]
    return words or [""]


def fit_to_script(options: Namespace, target: Target, environ: Mapping[str, str]) -> None:
    """What only the text of the script says, of those frameworks that need it.

    A script for DeepSpeed takes the local rank with an option, whose default may be 0, and `deepspeed.initialize`
    compares it with LOCAL_RANK (0.19, _do_args_sanity_check). One without the name in it may not know the option, and
    end of it. In a job with parameter servers TensorFlow has no place for a script that has only workers.
    """
    text = target.text if options.framework in ("deepspeed", "tensorflow") else ""
    if options.framework == "deepspeed" and options.pass_local_rank is None:
        found = re.search(r"""["'](--local[-_]rank)["']""", text)
        options.pass_local_rank = found and found[1]
    has_only_workers = (
        "MultiWorkerMirroredStrategy(" in text and "ParameterServerStrategy" not in text
    )
    if options.framework == "tensorflow" and has_only_workers and has_servers(environ):
        problem = "TF_CONFIG has parameter servers, and the script's MultiWorkerMirroredStrategy does not use them"
        hint = "start the job without them (on Azure ML parameter_server_count: 0), or use ParameterServerStrategy"
        raise DistbootError("usage", problem, hint)


def missing_framework_option(
    target: Target,
    framework: str,
    placement: Placement,
    environ: Mapping[str, str],
    per_node: str | None = None,
) -> str | None:
    """A warning of a script that starts a framework without the option for what that reads, or None.

    Without these variables each process of it is a world of its own, trains a model of its own, and ends well.
    """
    if framework != "torch":
        return None
    script, text = "".join(target.of_python[:1]), target.text
    has_variables = {
        "horovod": placement.launcher in (*MPI_LAUNCHERS, "horovodrun")
        or "HOROVOD_RANK" in environ,
        "tensorflow": "TF_CONFIG" in environ,
        "jax": placement.launcher in ("slurm", *MPI_LAUNCHERS)
        or "JAX_COORDINATOR_ADDRESS" in environ,
    }
    found = [
        name for name, starts in _STARTS.items() if starts.search(text) and not has_variables[name]
    ]
    if not found or _KNOWS_US.search(text):
        return None
    command = f"-- python {script}" if target.is_command else script
    if per_node:
        command = f"--nproc-per-node {per_node} {command}"
    return (
        f"warning: {script} starts {found[0]}, which reads variables of its own, and without them each rank "
        f"trains apart: python -m distboot run --framework {found[0]} {command}"
    )
