"""A launcher as the command of the wrapper. Its ranks are those of another job.

Often each rank starts one: `mpirun -n 2 python -m distboot run -- torchrun --standalone train.py`
trains two models, and both exit with code 0.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..base.patterns import pattern
from ..detection.placement import Placement
from ..host import free_port
from .shell_text import shell_text, without_prefixes
from .target import Target

_LAUNCHERS = (
    *("torchrun", "deepspeed", "horovodrun", "mpirun", "mpiexec", "orterun", "prterun"),
    *("mpirun_rsh", "srun", "jsrun", "aprun", "accelerate"),
)
_VARIANTS = ("", ".openmpi", ".mpich", ".hydra")  # of Debian: mpirun.openmpi
_LAUNCHER_PROGRAMS = {f"{name}{variant}": name for name in _LAUNCHERS for variant in _VARIANTS}
_LAUNCHER_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
    "horovod.runner.launch": "horovodrun",
    "accelerate.commands.launch": "accelerate",
}
_ONLY_TELLS = pattern(r"--help|-h|--version|-V")  # and starts no job
# What trains nothing beside a launcher
_TRAIN_NOTHING = pattern(
    r"cd|date|done|echo|esac|exit|export|fi|for|hostname|mkdir|module|return|set|sleep|source|tee"
    r"|test|ulimit|unset|wait|\[\[?|\}|"
)
_HAS_PORT = pattern(r"\0--master[-_]port[=\0]")


class MultiNode(NamedTuple):
    """Options by which a launcher that is started once on each node starts one job on all nodes."""

    sign: re.Pattern[str]  # shows that they are given; the words of the command are between \0
    options: str


_MULTI_NODE = {
    "torchrun": MultiNode(
        pattern(r"\0--nnodes[=\0](?!(\d+:)?1\0)"),
        "--nnodes, --node-rank, --master-addr and --master-port",
    ),
    "deepspeed": MultiNode(
        pattern(r"\0--no_ssh\0"),
        "--hostfile, --no_ssh, --node_rank, --master_addr and --master_port",
    ),
    "accelerate": MultiNode(
        pattern(r"\0--(config_file[=\0]|num[-_]machines[=\0](?!1\0))"),
        "--num_machines, --machine_rank, --main_process_ip and --main_process_port",
    ),
}
_NO_MULTI_NODE = MultiNode(pattern("(?!)"), "")
# Without one of these, `accelerate launch` may start one process, which is the rank itself and
# needs RANK.
_ACCELERATE_SEVERAL = pattern(
    r"\0--(multi[-_]gpu\0|use[-_]deepspeed\0|use[-_]fsdp\0|num[-_]processes[=\0](?!1\0))"
)
_ACCELERATE_CPU = "\0--cpu\0"


class Nested(NamedTuple):
    """A launcher that the wrapper's command starts."""

    name: str  # of its program, for example "torchrun"
    # Whether its options let the launchers on all nodes start one job together
    spans_nodes: bool
    is_in_shell: bool  # whether a shell starts it, whose other words may be about this process
    start: int  # where its options begin in the command; not for one in a shell
    # Whether the command also runs others, which may be what trains
    is_beside_others: bool = False

    def command(self, words: Sequence[str]) -> list[str]:
        """The command, with a free port for DeepSpeed, which would use 29500 for every job."""
        command = list(words)
        is_for_one_node = not self.spans_nodes and not self.is_in_shell
        if self.name == "deepspeed" and is_for_one_node:
            has_port = _HAS_PORT.search("\0".join(words)) is not None
            if not has_port:
                command.insert(self.start, f"--master_port={free_port()}")
        return command

    def describe_end(self) -> str:
        """How a job ended whose ranks did not call `init`, and each ran this launcher."""
        text = f"each rank ran {self.name} for a job of its own"
        if self.is_beside_others:
            return text
        return f"{text}, and none joined the others"

    def separate_jobs(self, placement: Placement, per_node: str | None) -> str | None:
        """A warning if each rank starts its own job, or None; `per_node`: of --nproc-per-node."""
        if self.spans_nodes:
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
        options = ""
        if self.name in _MULTI_NODE:
            options = f"; or pass it {_MULTI_NODE[self.name].options}"
        return (
            f"warning: each of the {count} ranks {starts}: {count} jobs that train separately. "
            f"Leave {self.name} out, as there are {count} ranks already "
            "(python -m distboot script.py …); "
            "or start one process per node, and let the wrapper start the ranks "
            f"(python -m distboot --nproc-per-node N script.py …){options}"
        )


def nested_launcher(target: Target, environ: Mapping[str, str]) -> Nested | None:
    """The launcher that the wrapper's command starts, or None.

    Of several in a shell script, one that is told of all nodes: the others may be for one node.
    """
    command = without_prefixes(target.words)
    text = shell_text(command)
    if not text:
        return _nested_in(target._replace(words=command), environ, len(target.words))
    from .shell_commands import all_commands_in, commands_in  # here, as few commands are shells

    launchers = []
    for words in commands_in(text):
        inner = target._replace(words=words)
        found = _nested_in(inner, environ)
        if found is not None:
            launchers.append(found)
    programs = [words[0] for words in all_commands_in(text)]
    may_train = list(itertools.filterfalse(_TRAIN_NOTHING.fullmatch, programs))
    is_beside_others = len(may_train) > len(launchers)
    launchers = [one._replace(is_beside_others=is_beside_others) for one in launchers]
    return max(
        launchers,
        key=lambda one: one.spans_nodes,
        default=None,
    )


def _nested_in(target: Target, environ: Mapping[str, str], end: int = 0) -> Nested | None:
    """The launcher that this command is; `end`: of its words in the target, 0: it is in a shell."""
    # `python /usr/bin/torchrun` is torchrun, too
    name, options = _launcher_in(target.of_python or target.words)
    if not name:
        return None
    if _ONLY_TELLS.fullmatch("\0".join(options)) is not None:
        return None
    # The options of the launcher, without those of the script
    own_options = itertools.takewhile(lambda word: not word.endswith(".py"), options)
    nnodes = f"--nnodes={environ.get('PET_NNODES', 1)}"  # torchrun reads the variable
    joined = "\0".join(["", nnodes, *own_options, ""])
    if _is_one_process_of_accelerate(name, joined):
        return None
    multi_node = _MULTI_NODE.get(name, _NO_MULTI_NODE)
    return Nested(
        name,
        spans_nodes=multi_node.sign.search(joined) is not None,
        is_in_shell=not end,
        start=end - len(options),
    )


def _launcher_in(words: list[str]) -> tuple[str, list[str]]:
    """The name of a launcher, and the words after its program or module; empty for other words."""
    if words[0] == "-m":
        module = "".join(words[1:2])
        return _LAUNCHER_MODULES.get(module, ""), words[2:]
    name = _LAUNCHER_PROGRAMS.get(os.path.basename(words[0]))
    if name is None:
        return "", []
    is_launch = words[1:2] == ["launch"]
    if name == "accelerate" and not is_launch:  # another command of accelerate
        return "", []
    return name, words[1:]


def _is_one_process_of_accelerate(name: str, options: str) -> bool:
    if name != "accelerate":
        return False
    if _ACCELERATE_CPU in options:
        return True
    return _ACCELERATE_SEVERAL.search(options) is None
