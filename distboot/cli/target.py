"""The command of the wrapper: a script or module in its own Python, any other command, or another
launcher.

And the facts in an unmodified script that have to be known before it starts.
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

from ..base.errors import DistbootError
from ..base.process import command_error, command_not_found
from ..base.text import did_you_mean, escape_control, short_repr
from ..detection.export import with_local_rank
from ..detection.launchers.records import MPI_LAUNCHERS
from ..detection.launchers.tf_config import has_servers
from ..detection.placement import Placement
from ..host import free_port

# An option of Python that takes a value, which may be in the next word: -m, -um, -mname, -W, -Xname
_PYTHON_OPTION = re.compile(r"-[A-Za-z]*?([mcWX])(.*)", re.DOTALL)
# Flags before an `m`: -m, or -Im, or -mdistboot; the others take a value, which may have an m
_MODULE_OPTION = re.compile(r"-(?![-WXc])([^m]*)m")
_PYTHON = re.compile(r"python[0-9.]*")
_SHELLS = ("sh", "bash", "dash", "zsh")
_ENV_OPTIONS_WITH_VALUE = ("-u", "-C", "--unset", "--chdir")
_LONGEST = 1 << 20  # bytes of a script that are read

_LAUNCHER_PROGRAM = re.compile(
    r"(torchrun|deepspeed|horovodrun|mpirun|mpiexec|orterun|prterun|mpirun_rsh|srun|jsrun|aprun"
    r"|accelerate)(\.(openmpi|mpich|hydra))?"
)
_LAUNCHER_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
    "horovod.runner.launch": "horovodrun",
    "accelerate.commands.launch": "accelerate",
}
_HAS_PORT = re.compile(r"\0--master[-_]port[=\0]")


# Options of the wrapper that no script has for itself; --report, --log-dir and such, many have.
_WRAPPERS_ALONE = (
    "--nproc-per-node",
    "--max-restarts",
    "--restart-delay",
    "--restart-window",
    "--join-timeout",
    "--pass-local-rank",
    "--log-prefix",
    "--log-json",
)
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec


class MultiNode(NamedTuple):
    """Options with which a launcher that is started once on each node starts one job on all of
    them.
    """

    sign: re.Pattern[str]  # shows that they are given; the words of the command are between \0
    options: str


_MULTI_NODE = {
    "torchrun": MultiNode(
        re.compile(r"\0--nnodes[=\0](?!(\d+:)?1\0)"),
        "--nnodes, --node-rank, --master-addr and --master-port",
    ),
    "deepspeed": MultiNode(
        re.compile(r"\0--no_ssh\0"),
        "--hostfile, --no_ssh, --node_rank, --master_addr and --master_port",
    ),
    "accelerate": MultiNode(
        re.compile(r"\0--(config_file[=\0]|num[-_]machines[=\0](?!1\0))"),
        "--num_machines, --machine_rank, --main_process_ip and --main_process_port",
    ),
}
# Without one of these, `accelerate launch` may start one process, which is the rank itself and
# needs RANK.
_ACCELERATE_SEVERAL = re.compile(
    r"\0--(multi[-_]gpu\0|use[-_]deepspeed\0|use[-_]fsdp\0|num[-_]processes[=\0](?!1\0))"
)


class Framework(NamedTuple):
    """A framework with variables of its own, which the wrapper sets only with `--framework`."""

    starts: re.Pattern[str]  # in a script that starts it
    launchers: tuple[str, ...]  # whose own variables it reads
    variable: str  # with which any other environment tells it its rank


_FRAMEWORKS = {
    "horovod": Framework(
        re.compile(r"^[ \t]*(?:import|from)[ \t]+horovod\b", re.MULTILINE),
        (*MPI_LAUNCHERS, "horovodrun"),
        "HOROVOD_RANK",
    ),
    "tensorflow": Framework(
        re.compile(r"\b(?:MultiWorkerMirroredStrategy|ParameterServerStrategy)\("),
        (),
        "TF_CONFIG",
    ),
    "jax": Framework(
        re.compile(r"\bjax\.distributed\.initialize\(\s*\)"),
        ("slurm", *MPI_LAUNCHERS),
        "JAX_COORDINATOR_ADDRESS",
    ),
}
_IMPORTS_DISTBOOT = re.compile(r"^[ \t]*(?:import|from)[ \t]+distboot\b", re.MULTILINE)


class Target(NamedTuple):
    """What the wrapper runs."""

    # The command, for example `["/usr/bin/python3", "-m", "module", "--epochs", "3"]`
    words: list[str]
    # Where the arguments of a script or module begin in it; its end for any other command
    start: int
    is_command: bool = False  # whether it is any other command, behind `--`

    def with_local_rank(self, local_rank: str, name: str) -> list[str]:
        """The command with the local rank as the script's first argument, or the command's last."""
        before = self.words[: self.start]
        arguments = with_local_rank(self.words[self.start :], local_rank, name)
        return [*before, *arguments]

    @property
    def of_python(self) -> list[str]:
        """What a Python runs: a script with its arguments, or `-m` with a module and its own.

        Empty if the command is not a Python, or if that reads its program from -c or stdin.
        """
        if not self._is_python:
            return []
        words = self.words[1:]
        while words and words[0].startswith("-"):
            option, value = _python_option(words[0])
            if option == "m":
                return ["-m", *filter(None, [value]), *words[1:]]
            if option == "c" or words[0] == "-":
                return []
            has_value_in_next_word = option != "" and value == ""
            words = words[2:] if has_value_in_next_word else words[1:]
        return words

    @property
    def script(self) -> str:
        """The script that a Python runs, or `-m`; empty if there is none."""
        return "".join(self.of_python[:1])

    @property
    def is_shell(self) -> bool:
        """Whether the command is a shell, in whose script anything may be started."""
        return os.path.basename(self.words[0]) in _SHELLS

    @property
    def hides_hooks(self) -> str:
        """The option with which a Python does not run distboot's `sitecustomize`, `"-I"`; empty if there is none."""
        if not self._is_python:
            return ""
        for word in self.words[1:]:
            if not word.startswith("-"):
                break
            found = re.match("-[A-Za-z]*?([mcWXISE])", word)
            if found is not None and found[1] in "ISE":
                return f"-{found[1]}"
        return ""

    @property
    def _is_python(self) -> bool:
        program = self.words[0]
        return program == sys.executable or bool(_PYTHON.fullmatch(os.path.basename(program)))

    @property
    def text(self) -> str:
        """The beginning of the script that a Python runs; empty if it cannot be read."""
        script = self.script
        if os.path.isfile(script):  # a pipe can be read only once
            with suppress(OSError), open(script, encoding="utf-8", errors="replace") as file:
                return file.read(_LONGEST)
        return ""

    def missing(self) -> DistbootError | None:
        """The error if the program is not here, for all ranks: others may have it."""
        from shutil import which  # here, so that a process that is alone does not pay for it

        program = self.words[0]
        if which(program) is not None:
            return None
        if os.sep in program and os.path.exists(program):
            return command_error(program, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
        return command_not_found(program)


def misplaced_options(target: Target) -> list[str]:
    """Options of the wrapper among the script's arguments, which the script does not mention."""
    if target.is_command:
        return []
    text = target.text
    found = []
    for word in itertools.takewhile(lambda word: word != "--", target.words[target.start :]):
        option = word.partition("=")[0].replace("_", "-")
        name = option.removeprefix("--")
        is_scripts = name in text or name.replace("-", "_") in text
        if option in _WRAPPERS_ALONE and not is_scripts:
            found.append(word.partition("=")[0])
    return found


def _python_option(word: str) -> tuple[str, str]:
    """The option that takes a value, and the value; each is empty if the word does not have it."""
    found = _PYTHON_OPTION.match(word)
    if found is None:
        return "", ""
    return found[1], found[2]


def target_of(given: list[str]) -> Target:
    """The target in the last words of the wrapper's command line."""
    first = given[0]
    if first == "--":
        if len(given) == 1:
            raise _nothing_after(first, "command")
        return Target(given[1:], len(given) - 1, is_command=True)
    python = [sys.executable, *_interpreter_options()]
    if first == "-m":
        if len(given) == 1:
            raise _nothing_after(first, "module")
        _refuse_missing_module(given[1])
        return Target([*python, *given], len(python) + 2)
    _refuse_unreadable(first)
    return Target([*python, *given], len(python) + 1)


def _nothing_after(option: str, what: str) -> DistbootError:
    hint = f"python -m distboot run {option} {what} [arguments …]"
    return DistbootError("usage", f"no {what} after {option!r}", hint)


def _refuse_unreadable(script: str) -> None:
    if not os.path.exists(script):
        where = "" if os.path.isabs(script) else f" in {_working_directory()}"
        meant = did_you_mean(script, ("run", "show", "env", "launchers", "doctor"))
        hint = (
            f"{meant}check the path; "
            f"any other command goes after '--': run -- {escape_control(script)} …"
        )
        raise DistbootError(
            "command-not-found", f"there is no script {short_repr(script)}{where}", hint
        )
    if not os.access(script, os.R_OK):
        message = f"the script {short_repr(script)} is not readable"
        raise DistbootError("command-not-executable", message, "chmod +r it")


def _refuse_missing_module(name: str) -> None:
    """Refuse a module that this Python does not find, as Python itself ends with 1 for it."""
    missing = _missing_part(name)
    if missing is None:
        return
    what = f"there is no module {short_repr(name)}"
    if missing != name:
        what = f"{what}: {short_repr(missing)} is missing"
    hint = f"check the spelling and PYTHONPATH, or install it for {sys.executable}"
    raise DistbootError("command-not-found", what, hint)


def _missing_part(name: str) -> str | None:
    """The package or module in a dotted name that is not there; no module is imported to find out."""
    parts = name.split(".")
    path: Sequence[str] | None = None
    for end in range(1, len(parts) + 1):
        part = ".".join(parts[:end])
        spec = _spec(part, path)
        if spec is None:
            return part
        # An __init__ may change the path of its package: only Python itself knows what is below.
        if _changes_its_path(spec):
            return None
        path = spec.submodule_search_locations
        if path is None and end < len(parts):
            return ".".join(parts[: end + 1])
    return None


def _spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """What Python would import as this name; `path`: the folders of its package, None at the top."""
    from importlib.machinery import PathFinder

    if path is None:
        # `python -m` looks in the working directory first.
        spec = PathFinder.find_spec(name, [os.getcwd()])
        if spec is not None:
            return spec
    for finder in sys.meta_path:  # those of editable installs, too
        spec = finder.find_spec(name, path, None)
        if spec is not None:
            return spec
    return None


def _changes_its_path(spec: ModuleSpec) -> bool:
    if spec.submodule_search_locations is None or not spec.origin:
        return False
    try:
        with open(spec.origin, encoding="utf-8", errors="replace") as file:
            return "__path__" in file.read(_LONGEST)
    except OSError:
        return True


def _working_directory() -> str:
    try:
        return short_repr(os.getcwd())
    except FileNotFoundError:
        return "the working directory, which is no longer there"


def _interpreter_options() -> list[str]:
    """The options of this Python, so that `python -u -m distboot train.py` runs `python -u
    train.py`.
    """
    spec = sys.modules["__main__"].__spec__
    # The console script: its Python has no options of its own.
    if spec is None or spec.name != "distboot.__main__":
        return []
    options: list[str] = []
    for word in sys.orig_argv[1:]:
        flags = _MODULE_OPTION.match(word)
        if flags is None:
            options.append(word)
            continue
        if flags[1]:
            options.append(f"-{flags[1]}")
        break
    return options


class Nested(NamedTuple):
    """A launcher as the wrapper's command. Its ranks are those of another job.

    Often each rank starts one: `mpirun -n 2 python -m distboot run -- torchrun --standalone
    train.py` trains two models, and both exit with code 0.
    """

    name: str  # of its program, for example "torchrun"
    # Whether its options let the launchers on all nodes start one job together
    is_told_of_nodes: bool
    is_in_shell: bool  # whether a shell starts it, whose other words may be about this process
    start: int  # where its options begin in the command; not for one in a shell

    def command(self, words: Sequence[str]) -> list[str]:
        """The command, with a free port for DeepSpeed, which else uses 29500 for every job."""
        has_port = self.is_told_of_nodes or _HAS_PORT.search("\0".join(words)) is not None
        if self.name != "deepspeed" or self.is_in_shell or has_port:
            return list(words)
        return [*words[: self.start], f"--master_port={free_port()}", *words[self.start :]]

    def separate_jobs(self, placement: Placement, per_node: str | None = None) -> str | None:
        """A warning if each rank starts its own job, or None; `per_node`: of --nproc-per-node."""
        if self.is_told_of_nodes:
            return None
        starts = f"starts {self.name}, which starts a job of its own"
        if per_node:
            whose = f"each rank of --nproc-per-node {per_node}"
            command = f"python -m distboot --nproc-per-node {per_node} script.py …"
            return (
                f"warning: {whose} {starts}: jobs that train separately. "
                f"Leave {self.name} out ({command})"
            )
        count = placement.world_size
        if count == 1:
            return None
        warning = (
            f"warning: each of the {count} ranks {starts}: {count} jobs that train separately. "
            f"Leave {self.name} out, as there are {count} ranks already "
            "(python -m distboot script.py …); "
            "or start one process per node, and let the wrapper start the ranks "
            "(python -m distboot --nproc-per-node N script.py …)"
        )
        if self.name in _MULTI_NODE:
            warning += f"; or pass it {_MULTI_NODE[self.name].options}"
        return warning


def nested_launcher(target: Target, environ: Mapping[str, str]) -> Nested | None:
    """The launcher that the wrapper's command starts, or None."""
    command = _without_env(target.words)
    script = _shell_script(command)
    if script is not None:
        command = _without_env(re.sub(r"^\s*exec\s", "", script).split())
    words = target._replace(words=command).of_python or command  # `python /usr/bin/torchrun`, too
    found = _launcher_in(words)
    if found is None:
        return None
    name, options = found
    nnodes = f"--nnodes={environ.get('PET_NNODES', 1)}"  # torchrun reads the variable
    # The options of the launcher, without those of the script
    own = itertools.takewhile(lambda word: not word.endswith(".py"), options)
    joined = "\0".join(["", nnodes, *own, ""])
    if name == "accelerate" and not _accelerate_starts_several(joined):
        return None
    is_told = name in _MULTI_NODE and _MULTI_NODE[name].sign.search(joined) is not None
    return Nested(name, is_told, script is not None, len(target.words) - len(options))


def _shell_script(command: list[str]) -> str | None:
    """The script of `sh -c script`."""
    if len(command) < 3 or os.path.basename(command[0]) not in _SHELLS:
        return None
    if not re.fullmatch("-[a-z]*c", command[1]):
        return None
    return command[2]


def _launcher_in(words: list[str]) -> tuple[str, list[str]] | None:
    """The name of a launcher, and the words after its program or module; None for anything else."""
    if words[0] == "-m":
        name = _LAUNCHER_MODULES.get("".join(words[1:2]))
        return None if name is None else (name, words[2:])
    program = _LAUNCHER_PROGRAM.fullmatch(os.path.basename(words[0]))
    if program is None:
        return None
    if program[1] == "accelerate" and words[1:2] != ["launch"]:  # it has other commands
        return None
    return program[1], words[1:]


def _accelerate_starts_several(options: str) -> bool:
    return "\0--cpu\0" not in options and _ACCELERATE_SEVERAL.search(options) is not None


def _without_env(words: list[str]) -> list[str]:
    """A command without the `env NAME=VALUE …` before it."""
    if os.path.basename("".join(words[:1])) == "env":
        words = words[1:]
        while words and _belongs_to_env(words[0]):
            words = words[2:] if words[0] in _ENV_OPTIONS_WITH_VALUE else words[1:]
    return words or [""]


def _belongs_to_env(word: str) -> bool:
    return word.startswith("-") or "=" in word


def fit_to_script(options: Namespace, target: Target, environ: Mapping[str, str]) -> None:
    """Fit the options of DeepSpeed and TensorFlow to the text of the script."""
    if options.framework == "deepspeed" and options.pass_local_rank is None:
        # A script for DeepSpeed takes the local rank with an option, whose default may be 0, and
        # deepspeed.initialize compares it with LOCAL_RANK (0.19, _do_args_sanity_check). A script
        # without the name in it may not know the option, and would end with a usage error.
        found = re.search(r"""["'](--local[-_]rank)["']""", target.text)
        options.pass_local_rank = found and found[1]
    if options.framework == "tensorflow" and has_servers(environ):
        _refuse_workers_only(target.text)


def _refuse_workers_only(text: str) -> None:
    """In a job with parameter servers, TensorFlow does not run a script that uses only workers."""
    if "MultiWorkerMirroredStrategy(" in text and "ParameterServerStrategy" not in text:
        raise DistbootError(
            "usage",
            "TF_CONFIG has parameter servers, "
            "but the script's MultiWorkerMirroredStrategy does not use them",
            "start the job without them (on Azure ML parameter_server_count: 0), "
            "or use ParameterServerStrategy",
        )


def missing_framework_option(
    target: Target,
    framework: str,
    placement: Placement,
    environ: Mapping[str, str],
    per_node: str | None = None,
) -> str | None:
    """A warning if a script starts a framework whose variables only `--framework` sets, or None.

    Without these variables each process is a world of its own, and trains a model of its own.
    """
    if framework != "torch":
        return None
    text = target.text
    if _IMPORTS_DISTBOOT.search(text):
        return None
    name = _framework_without_variables(text, placement, environ)
    if name is None:
        return None
    command = target.script
    if target.is_command:
        command = f"-- python {command}"
    if per_node:
        command = f"--nproc-per-node {per_node} {command}"
    return (
        f"warning: {target.script} starts {name}, which reads variables of its own, and without "
        "them each rank trains separately: "
        f"python -m distboot run --framework {name} {command}"
    )


def _framework_without_variables(
    text: str, placement: Placement, environ: Mapping[str, str]
) -> str | None:
    for name, framework in _FRAMEWORKS.items():
        has_variables = placement.launcher in framework.launchers or framework.variable in environ
        if not has_variables and framework.starts.search(text):
            return name
    return None
