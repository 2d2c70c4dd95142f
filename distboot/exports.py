"""What distboot tells the frameworks through the environment, and the one place that writes `os.environ`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType, TracebackType

from . import cpus, handoff
from .detection import launcher_of
from .placement import VARIABLES, Placement


def variables(
    placement: Placement,
    environ: Mapping[str, str],
    *,
    joined: int = 0,
    named: str | None = None,
    others: Mapping[str, str] = MappingProxyType({}),
    met: bool = False,
    watched: bool = False,
) -> dict[str, str | None]:
    """The variables to set for a placement, starting from `environ`; None means: must not be set.

    A field that is not known is cleared, so that no framework reads a value left over from elsewhere. `joined` is the
    id of this process when it has joined the job as this rank, else 0; `named` is the launcher that the user named;
    `others` is what only one framework reads; `met` says that the ranks have met, and `watched` that the wrapper
    keeps the lifeline.
    """
    exports: dict[str, str | None] = {}
    for field, name in VARIABLES.items():
        value = getattr(placement, field)
        exports[name] = None if value is None else str(value)
    launcher = launcher_of(placement)
    if launcher.local_index in environ and (launcher.rewrites or placement.local_rank is None):
        # What the launcher has set stays: it is the index of the device that it meant for this process (with torchrun
        # --virtual-local-rank 0 for all). And better in another order than not at all.
        exports["LOCAL_RANK"] = environ[launcher.local_index]
    if placement.launcher != "torchrun":
        # Left over from a torchrun further out, it makes torch wait for a store that nobody serves.
        exports["TORCHELASTIC_USE_AGENT_STORE"] = None
    bare, outer = handoff.take(environ)
    # What the wrapper has exported for the framework of the script stays, and is to be known as ours.
    of_others = environ if outer is None else outer.without_others(environ)
    others = {**{name: value for name, value in environ.items() if name not in of_others}, **others}
    others |= threads(placement, environ)
    changed = [name for name, value in exports.items() if value is not None and bare.get(name) != value]
    if named is not None:
        exports["DISTBOOT_LAUNCHER"] = named
    exports[handoff.VARIABLE] = handoff.encode(placement, changed, joined, others=others, met=met, watched=watched)
    return {**exports, **others}


def threads(placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """The number of threads of a rank, which has to be set before its framework is imported; see `cpus`."""
    _, outer = handoff.take(environ)
    return cpus.variables(placement.local_world_size, environ if outer is None else outer.without_others(environ))


def applied(exports: Mapping[str, str | None], environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of `environ` with the exports in it, for a child process."""
    merged = {**environ, **exports}
    return {name: value for name, value in merged.items() if value is not None}


class Exported:
    """Context manager: writes to `os.environ`, and puts it back as it was if the block fails."""

    def __enter__(self) -> Exported:  # noqa: PYI034 - typing.Self needs Python 3.11
        self._before: dict[str, str | None] = {}
        return self

    def environ_before(self) -> dict[str, str]:
        """`os.environ` as it was on entering the block."""
        merged = {**os.environ, **self._before}
        return {name: value for name, value in merged.items() if value is not None}

    def write(self, exports: Mapping[str, str | None]) -> None:
        """Set (or, for None, clear) these variables in `os.environ`."""
        for name, value in exports.items():
            self._before.setdefault(name, os.environ.get(name))
            _write(name, value)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for name, value in self._before.items():
                _write(name, value)


def _write(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
