"""The variables that distboot exports to scripts and frameworks.

`require_master` refuses a job without an address or a port of rank 0 before that; its error names
the option of this launcher that passes them. In `init()`, only `EnvTransaction` writes
to `os.environ`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..base.errors import DistbootError, reason_of
from ..base.internal_variables import RANK
from ..base.patterns import pattern
from ..base.text import is_address
from ..host import cpus, free_port
from . import inherited
from .inherited import merged
from .order import LAUNCHERS, with_any_variable
from .outer_distboot import traces
from .placement import VARIABLES, Placement

# PET_* are torchrun's options; TORCHELASTIC_* those of an agent further out, whose store no rank
# must use.
_OF_NODES = pattern("PET_|TORCHELASTIC_")


def variables(
    placement: Placement,
    environ: Mapping[str, str],
    *,
    named: str | None = None,
    others: Mapping[str, str] = {},
    bound: Collection[int] = (),
    **state: Any,
) -> dict[str, str | None]:
    """The variables to set for a placement, starting from `environ`; None: must not be set.

    A field that is not known is cleared, so that no framework reads a value left over from
    elsewhere.

    Args:
        placement: of the process that is to have the variables.
        environ: its environment so far.
        named: the launcher that the user named.
        others: variables that only one framework reads.
        bound: the CPUs to which the process will be bound; empty: as this one is.
        state: for `inherited.encode`.
    """
    without_ours, outer = inherited.restored(environ)
    exports = _fields(placement, environ)
    # What the wrapper has exported for the framework of the script stays, and is to be known as
    # ours.
    for name in outer.unchanged(environ).keys() - exports.keys():
        exports[name] = environ.get(name)
    exports |= others
    exports |= thread_variables(placement, environ, bound)
    # As if distboot had set them: so they do not show an inner distboot that its launcher has
    marks = _marks_of_others(placement, without_ours)
    exports |= marks
    before = without_ours.items() - marks.items()
    text = inherited.encode(
        placement,
        _changes(exports, dict(before)),
        seen=traces(environ),
        **state,
    )
    if named is not None:
        exports["DISTBOOT_LAUNCHER"] = named
    return {**exports, inherited.VARIABLE: text, **_corrected_tf_config(environ)}


def _fields(placement: Placement, environ: Mapping[str, str]) -> dict[str, str | None]:
    """The torch variables: RANK, WORLD_SIZE and the others of `VARIABLES`."""
    exports: dict[str, str | None] = {}
    for field, name in VARIABLES.items():
        value = getattr(placement, field)
        exports[name] = None
        if value is not None:
            exports[name] = str(value)
    launcher = LAUNCHERS[placement.launcher]
    if launcher.sets_torch_vars and "LOCAL_RANK" in environ:
        # It stays, also in another order: it is the index of the device for this process (with
        # torchrun --virtual-local-rank 0 for all).
        exports["LOCAL_RANK"] = environ["LOCAL_RANK"]
    if not launcher.serves_master_port:
        # Left over from a torchrun further out, it makes torch wait for a store that no process
        # serves.
        exports["TORCHELASTIC_USE_AGENT_STORE"] = None
    return exports


def _marks_of_others(placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that would show that another launcher has started a process.

    This process has inherited them.
    """
    marks = {}
    for launcher in with_any_variable(environ):
        mark = launcher.own_mark
        is_own = launcher.name == placement.launcher
        if mark in environ and not is_own:
            marks[mark] = environ[mark]
    return marks


def _changes(
    exports: Mapping[str, str | None], before: Mapping[str, str]
) -> dict[str, inherited.Export]:
    """What is set, or cleared, that was not so before."""
    changes = {}
    for name, value in exports.items():
        previous = before.get(name)
        if value != previous:
            changes[name] = inherited.Export(inherited.digest(value), previous)
    return changes


def _corrected_tf_config(environ: Mapping[str, str]) -> dict[str, str]:
    """TF_CONFIG, if it has to be changed.

    It is not one of distboot's own: it stays the launcher's, as which a distboot below this one is
    to read it.
    """
    if "TF_CONFIG" not in environ:
        return {}
    from .launchers.tf_config import corrected

    return corrected(environ)


def of_one_process(environ: Mapping[str, str], kept: Sequence[str] = ()) -> dict[str, str | None]:
    """The variables of this one process, to be cleared, but for those in `kept`.

    What else an outer distboot exported gets its previous value.
    """
    _, outer = inherited.restored(environ)
    exports = {**outer.unchanged(environ), inherited.VARIABLE: None}
    cleared = {*VARIABLES.values()} - {*kept}
    cleared.add("DISTBOOT_LAUNCHER")
    for launcher in with_any_variable(environ):
        cleared |= launcher.set_for_one_process(environ)
    return {**exports, **dict.fromkeys(sorted(cleared))}


def base_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for all ranks, without the variables of this one process."""
    of_nodes = filter(_OF_NODES.match, environ)
    cleared = (*RANK, "TF_CONFIG", *of_nodes)
    exports = of_one_process(environ) | dict.fromkeys(cleared)
    return merged(exports, environ)


def for_launcher(
    placement: Placement, environ: Mapping[str, str], *, together: bool
) -> dict[str, str | None]:
    """The variables to set where the wrapper's command is a launcher of another job.

    The torch variables of this process would be wrong in all of them, and stay with launchers that
    set no such names: so they are cleared, also those of a user; and so is what else the outer
    launcher has set for this process alone, as some inner ones read it, and none sets all of it.
    `together`: the launchers on all nodes start one job, which has these nodes.
    """
    kept: tuple[str, ...] = ()
    if placement.world_size == 1:  # then they are about the other job
        kept = ("MASTER_ADDR", "MASTER_PORT")
    exports = of_one_process(environ, kept)
    seen = traces(merged(exports, environ))
    if together and placement.node_rank is not None:
        exports["NODE_RANK"] = str(placement.node_rank)
    exports[inherited.VARIABLE] = inherited.encode(placement, seen=seen, launches=True)
    return exports


def thread_variables(
    placement: Placement, environ: Mapping[str, str], bound: Collection[int] = ()
) -> dict[str, str]:
    """The number of threads of a rank, to be set before its framework is imported; see `cpus`."""
    without_ours, _ = inherited.restored(environ)
    return cpus.variables(placement.local_world_size, without_ours, bound=bound)


def require_master(placement: Placement, *, in_init: bool = False) -> Placement:
    """The placement, as detected, with address and port of rank 0.

    `in_init`: the hint may name mpi4py, which init() asks for the address. Raises `no-master-addr`
    or `no-master-port`.
    """
    if placement.master_addr is None:
        raise _no_address(placement, in_init=in_init)
    if placement.world_size == 1:
        if placement.sources.get("master_port") in VARIABLES.values():
            return placement
        # No other process has to know it. One that is derived or handed over may be a sibling's.
        return placement.with_fields("found free on this host", {"master_port": free_port()})
    if placement.master_port is None:
        raise DistbootError(
            "no-master-port",
            f"launcher {placement.launcher!r} gives neither a port nor a job id to derive one from",
            f"choose a free port: {_how_to_pass(placement, 'MASTER_PORT', '29500')}"
            f"{_or_unset(placement)}",
        )
    return placement


def _no_address(placement: Placement, *, in_init: bool) -> DistbootError:
    how = _how_to_pass(placement, "MASTER_ADDR", "<host of rank 0>")
    hint = f"name the host of rank 0: {how}"
    if placement.master_port is None:
        hint += "; and a free port there as MASTER_PORT"
    if in_init and LAUNCHERS[placement.launcher].mpi == "yes":
        hint += "; or install mpi4py, which init() asks"
    hint += _or_unset(placement)
    return DistbootError(
        "no-master-addr",
        f"{_size_of_job(placement)}, but no variable names the host of rank 0",
        hint,
    )


def _size_of_job(placement: Placement) -> str:
    """`"launcher 'openmpi' started 2 processes"`, or `"WORLD_SIZE=2"`, which a person may set."""
    name = placement.launcher
    count = placement.world_size
    source = placement.sources.get("world_size", "")
    is_generic = source == VARIABLES["world_size"]
    if is_generic and LAUNCHERS[name].generic_names:
        return f"{source}={count}"
    text = f"launcher {name!r} started {count} processes"
    if placement.num_nodes is not None:
        text += " on several nodes"
    return text


def _how_to_pass(placement: Placement, name: str, value: str) -> str:
    hint = LAUNCHERS[placement.launcher].env_forwarding_hint
    return hint.replace("NAME", name).replace("VALUE", value)


def _or_unset(placement: Placement) -> str:
    from .address_remedy import or_unset  # here, as most have an address

    return or_unset(placement.launcher, placement.platform, placement.sources)


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
            cause = reason_of(error)
        else:
            return
        if not backoff.sleep_or_expire(cause):
            raise DistbootError(
                "unresolvable-address",
                f"rank 0 is on {host!r} by {placement.sources['master_addr']}, "
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
