"""`DISTBOOT_PLACEMENT`: what an outer distboot (the wrapper, `init`, `distboot env`) has already found and exported.

Without it, a process could not tell RANK=0 that distboot exported from RANK=0 that a launcher set. Example:
  launcher=openmpi,rank=3,world_size=4,node_rank=1,master_port=61234,exported=RANK+WORLD_SIZE+NODE_RANK
A process of the same launcher and rank joins what was found. A process of an inner launcher (the wrapper
started mpirun, say) ignores everything that distboot exported for the outer one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from .errors import DistbootError
from .placement import VARIABLES, Placement

VARIABLE = "DISTBOOT_PLACEMENT"

_NUMBERS = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes", "master_port")
_TEXTS = ("launcher", "master_addr", "exported")


def encode(placement: Placement, exported: Iterable[str]) -> str:
    """The value of `DISTBOOT_PLACEMENT` for a placement, and the variables that had to be set or changed for it.

    It has only characters that need no quoting in a shell or an env file.
    """
    fields = ("launcher", *_NUMBERS, "master_addr")
    known = [f"{field}={getattr(placement, field)}" for field in fields if getattr(placement, field) is not None]
    return ",".join([*known, "exported=" + "+".join(exported)])


def take(environ: Mapping[str, str]) -> tuple[Mapping[str, str], dict[str, int | str]]:
    """`environ` without what an outer distboot exported, and the fields that it handed over (empty: none did).

    An inner launcher with the same variables sets them all: one changed value means that all are its own.
    """
    if VARIABLE not in environ:
        return environ, {}
    fields = _decode(environ[VARIABLE])
    own = set(filter(None, str(fields.pop("exported")).split("+")))
    values = {variable: str(fields.get(field)) for field, variable in VARIABLES.items()}
    if any(environ.get(name) != values.get(name) for name in own):
        own, fields = set(), {}
    return {name: value for name, value in environ.items() if name != VARIABLE and name not in own}, fields


def apply(fields: dict[str, int | str], placement: Placement) -> Placement:
    """`placement` completed by what was handed over, if that is about the very same process of the job."""
    identity = ("launcher", "rank", "world_size")
    if any(fields.get(field) != getattr(placement, field) for field in identity):
        return placement
    changed = {field: value for field, value in fields.items() if getattr(placement, field) != value}
    sources = {**placement.sources, **dict.fromkeys(changed, VARIABLE)}
    return replace(placement, **changed, sources=MappingProxyType(sources))  # type: ignore[arg-type]


def _decode(text: str) -> dict[str, int | str]:
    fields: dict[str, int | str] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        if name in _NUMBERS and value.isascii() and value.isdigit() and len(value) <= 8:
            fields[name] = int(value)
        elif name in _TEXTS:
            fields[name] = value
        else:
            break
    else:
        if {"launcher", "rank", "world_size", "exported"} <= fields.keys():
            return fields
    raise DistbootError(
        "broken-environment",
        f"{VARIABLE}={text[:200]!r} was not written by distboot",
        f"unset {VARIABLE}",
    )
