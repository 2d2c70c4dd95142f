"""What distboot passes to scripts and frameworks: variables, and `--local_rank`; and what alone writes `os.environ`.

Rank 0 has to have an address and a port by then, or an error says what to pass for this launcher.
`torch.distributed.launch` and DeepSpeed's launcher pass `--local_rank` as the first argument, and scripts written for
them ask for it; scripts that were not end with "unrecognized arguments".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..base.errors import DistbootError
from ..base.internal_variables import RANK
from ..base.text import is_address
from ..host import cpus, free_port
from . import inherited
from .detect import INNERMOST_FIRST, LAUNCHERS, traces
from .launchers.records import MPI_LAUNCHERS
from .launchers.tf_config import corrected
from .placement import VARIABLES, Placement

LOCAL_RANK = "--local_rank"  # DeepSpeed's spelling, and that of torch before 2.0
_SPELLINGS = re.compile(r"--local[-_]rank")
_NUMBER = re.compile(r"-?[0-9]+")

# What launchers set for one process, besides RANK and its like. Slurm's are the allocation's, too, and stay.
_OF_ONE_PROCESS = re.compile(
    r"OMPI_COMM_WORLD_|PMIX_(?!MCA_)|PMI_(RANK|SIZE|FD|PORT|ID|JOBID|SPAWNED|LOCAL_)|MPI_LOCAL(RANKID|NRANKS)$|"
    r"HYDRA_BSTRAP_|I_MPI_HYDRA_UUID$|MV2_COMM_WORLD_|LOCAL_SIZE$|CROSS_(RANK|SIZE)$|"
    r"HOROVOD_((LOCAL_|CROSS_)?(RANK|SIZE)$|GLOO_RENDEZVOUS_)|JAX_(NUM_PROCESSES|PROCESS_ID|COORDINATOR_ADDRESS)$|"
    r"(GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)$|TORCHELASTIC_(RUN_ID|RESTART_COUNT|MAX_RESTARTS|ERROR_FILE|USE_AGENT_STORE)$"
)


def variables(
    placement: Placement,
    environ: Mapping[str, str],
    *,
    named: str | None = None,
    others: Mapping[str, str] = {},
    **state: Any,
) -> dict[str, str | None]:
    """The variables to set for a placement, starting from `environ`; None means: must not be set.

    A field that is not known is cleared, so that no framework reads a value left over from elsewhere. `named` is the
    launcher that the user named, `others` what only one framework reads; `state` is for `inherited.encode`.
    """
    fields = {name: getattr(placement, field) for field, name in VARIABLES.items()}
    exports = {name: None if value is None else str(value) for name, value in fields.items()}
    launcher = LAUNCHERS[placement.launcher]
    if launcher.sets_torch_vars and "LOCAL_RANK" in environ:
        # It stays, also in another order: it is the index of the device for this process (with torchrun
        # --virtual-local-rank 0 for all).
        exports["LOCAL_RANK"] = environ["LOCAL_RANK"]
    if placement.launcher != "torchrun":
        # Left over from a torchrun further out, it makes torch wait for a store that no process serves.
        exports["TORCHELASTIC_USE_AGENT_STORE"] = None
    without_ours, outer = inherited.strip(environ)
    # What the wrapper has exported for the framework of the script stays, and is to be known as ours.
    of_others = outer.strip_framework_vars(environ)
    others = {**{name: value for name, value in environ.items() if name not in of_others}, **others}
    others |= thread_variables(placement, environ)
    # What would show that another launcher has started a process is inherited here, and shows it no more.
    marks = (each.own_mark for each in INNERMOST_FIRST if each is not launcher)
    others |= {mark: without_ours[mark] for mark in marks if mark in without_ours}
    changed = [
        name
        for name, value in exports.items()
        if value is not None and without_ours.get(name) != value
    ]
    if named is not None:
        exports["DISTBOOT_LAUNCHER"] = named
    exports[inherited.VARIABLE] = inherited.encode(
        placement, changed, others=others, seen=traces(environ), **state
    )
    # Of `environ`, and not `others`: it stays the launcher's, as which a distboot below this one is to read it.
    return {**exports, **others, **corrected(environ)}


def of_one_process(environ: Mapping[str, str], kept: Sequence[str] = ()) -> dict[str, str | None]:
    """The variables that are about this one process, to be cleared, but for those of RANK and its like in `kept`."""
    without_ours, _ = inherited.strip(environ)
    names = [name for name in environ if name not in without_ours]
    names += [name for name in VARIABLES.values() if name not in kept]
    return dict.fromkeys([*names, "DISTBOOT_LAUNCHER", *filter(_OF_ONE_PROCESS.match, environ)])


def base_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for all ranks: without what says that each of them is this one process."""
    others = merged(of_one_process(environ), environ).items()
    # PET_* are torchrun's options; TORCHELASTIC_* those of an agent further out, whose store no rank must use.
    of_nodes = ("PET_", "TORCHELASTIC_")
    return {
        name: value
        for name, value in others
        if name not in (*RANK, "TF_CONFIG") and not name.startswith(of_nodes)
    }


def for_launcher(
    placement: Placement, environ: Mapping[str, str], *, together: bool
) -> dict[str, str | None]:
    """The variables to set where the wrapper's command is a launcher, whose ranks are those of another job.

    RANK and its like of this process would be wrong in all of them, and stay with launchers that set no such names: so
    they are cleared, also those of a user; and so is what else the outer launcher has set for this process alone, as
    some inner ones read it, and none sets all of it. `together`: the launchers on all nodes start one job, which has
    these nodes.
    """
    # Then they are about the other job
    kept = ("MASTER_ADDR", "MASTER_PORT") if placement.world_size == 1 else ()
    cleared = of_one_process(environ, kept)
    node_rank = (
        {"NODE_RANK": str(placement.node_rank)}
        if together and placement.node_rank is not None
        else {}
    )
    own = inherited.encode(placement, (), seen=traces(merged(cleared, environ)), launches=True)
    return {**cleared, **node_rank, inherited.VARIABLE: own}


def thread_variables(placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """The number of threads of a rank, which has to be set before its framework is imported; see `cpus`."""
    _, outer = inherited.strip(environ)
    return cpus.variables(placement.local_world_size, outer.strip_framework_vars(environ))


def merged(exports: Mapping[str, str | None], environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of `environ` with the exports in it, for a child process."""
    both = {**environ, **exports}
    return {name: value for name, value in both.items() if value is not None}


def require_master(placement: Placement) -> Placement:
    """The placement, as detected, with address and port of rank 0; else `no-master-addr` or `no-master-port`."""
    if placement.master_addr is None:
        raise DistbootError(
            "no-master-addr",
            f"{_size_of_job(placement)}, "
            "and nothing in the environment says on which host rank 0 is",
            f"name the host of rank 0: {_how_to_pass(placement, 'MASTER_ADDR', '<host of rank 0>')}"
            + ("; and a free port there as MASTER_PORT" if placement.master_port is None else "")
            + (
                "; or install mpi4py, which init() asks"
                if placement.launcher in MPI_LAUNCHERS
                else ""
            ),
        )
    if placement.master_port is None and placement.world_size > 1:
        raise DistbootError(
            "no-master-port",
            f"launcher {placement.launcher!r} gives neither a port nor a job id to derive one from",
            f"choose a free port: {_how_to_pass(placement, 'MASTER_PORT', '29500')}",
        )
    if placement.world_size == 1 and placement.sources.get("master_port") not in VARIABLES.values():
        # No other process has to know it. One that is derived or handed over may be a sibling's.
        placement = placement.with_fields("found free on this host", {"master_port": free_port()})
    return placement


def _size_of_job(placement: Placement) -> str:
    """`"launcher 'openmpi' started 2 processes"`, or `"WORLD_SIZE=2"` where a person may have set that."""
    source = placement.sources.get("world_size", "")
    if LAUNCHERS[placement.launcher].generic_names and source == VARIABLES["world_size"]:
        return f"{source}={placement.world_size}"
    text = f"launcher {placement.launcher!r} started {placement.world_size} processes"
    if placement.num_nodes is not None:
        text += " on several nodes"
    return text


def _how_to_pass(placement: Placement, name: str, value: str) -> str:
    return (
        LAUNCHERS[placement.launcher]
        .env_forwarding_hint.replace("NAME", name)
        .replace("VALUE", value)
    )


def wait_until_resolves(placement: Placement, join_timeout: float) -> None:
    """Wait until the name of rank 0's host resolves; `unresolvable-address`: it did not in time."""
    host = str(placement.master_addr)
    if is_address(host):
        return
    from ..host.network import Backoff, look_up  # here, as most starts need no sockets

    backoff = Backoff(placement.who, join_timeout, f"{host!r} does not resolve yet")
    while True:
        try:
            look_up(host, None, backoff.left())
        except OSError as error:
            cause = error.strerror or str(error)
        else:
            return
        if not backoff.sleep_or_expire(cause):
            raise DistbootError(
                "unresolvable-address",
                f"{placement.sources['master_addr']} says that rank 0 is at {host!r}, "
                f"which did not resolve in {join_timeout:g} s: {cause}",
                "check the name, or give an address that this host can look up",
            )


class EnvTransaction:
    """Context manager: writes to `os.environ`, and restores it if the block fails."""

    def __enter__(self) -> EnvTransaction:  # noqa: PYI034 - typing.Self needs Python 3.11
        self._before: dict[str, str | None] = {}
        return self

    def environ_before(self) -> dict[str, str]:
        return merged(self._before, os.environ)

    def write(self, exports: Mapping[str, str | None]) -> None:
        """Set (or, for None, clear) these variables in `os.environ`."""
        for name, value in exports.items():
            self._before.setdefault(name, os.environ.get(name))
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.write(self._before)


def with_local_rank(
    arguments: Sequence[str], local_rank: int | str, name: str = LOCAL_RANK
) -> list[str]:
    """The arguments of a script with the local rank, once, in the script's own spelling of the option."""
    # First, as the launchers do it: it is then an option of the main parser, and before any "--".
    return [f"{name}={local_rank}", *without_local_rank(arguments, name)]


def without_local_rank(arguments: Sequence[str], name: str = LOCAL_RANK) -> list[str]:
    """The arguments of a script without the local rank, in whatever spelling."""
    spans = [span for span, _ in _local_ranks(arguments, name)]
    return [word for at, word in enumerate(arguments) if not any(at in span for span in spans)]


def wrong_local_rank(arguments: Sequence[str], local_rank: int | str) -> str | None:
    """A warning of a local rank in the arguments that is not this one, or None."""
    if (empty := empty_local_rank(arguments)) is not None:
        return f"{empty}: leave it out, and init(pass_local_rank=True) supplies it"
    # -1 is what scripts have as their default, for "not given".
    values = (value for _, value in _local_ranks(arguments) if _NUMBER.fullmatch(value))
    wrong = next((value for value in values if int(value) not in (-1, int(local_rank))), None)
    if wrong is None:
        return None
    return (
        f"warning: the arguments say {LOCAL_RANK}={wrong}, and the local rank is {local_rank}: the script may use "
        "another rank's device; init(pass_local_rank=True) puts that right, and False removes the argument"
    )


def empty_local_rank(arguments: Sequence[str]) -> str | None:
    """A warning, without the hint, of a local rank in the arguments that has no value, or None."""
    option = next(
        (arguments[span[0]] for span, value in _local_ranks(arguments) if not value), None
    )
    if option is None:
        return None
    return f"warning: {option.rstrip('=')} has no value (a shell replaces $LOCAL_RANK before LOCAL_RANK is set)"


def _local_ranks(arguments: Sequence[str], name: str = LOCAL_RANK) -> Iterator[tuple[range, str]]:
    """Where the option stands, and its value; empty if it has none. What comes after "--" is the script's own."""
    for at, word in enumerate(arguments):
        if word == "--":
            return
        option, equals, value = word.partition("=")
        if option != name and not _SPELLINGS.fullmatch(option):
            continue
        following = "".join(arguments[at + 1 : at + 2])
        two_words = (
            not equals and arguments[at + 1 :] and (following == "" or _NUMBER.fullmatch(following))
        )
        yield (
            range(at, at + 2 if two_words else at + 1),
            value if equals else following if two_words else "",
        )
