"""`DISTBOOT_PLACEMENT`: what an outer distboot (the wrapper, `init`, `distboot env`) has already found and exported.

Without it, a process could not tell RANK=0 that distboot exported from RANK=0 that a launcher set. Example:
  launcher=openmpi,rank=3,world_size=4,node_rank=1,master_port=61234,job=5c2f10aa,exported=RANK+WORLD_SIZE+NODE_RANK
What only one framework reads stands there with a digest of its value: exported=RANK+HOROVOD_RANK:6dd28e9b
A process of the same launcher, job and rank joins what was found. A process of an inner launcher (the wrapper
started mpirun, say) ignores everything that distboot exported for the outer one.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from .address import parse_address, parse_port
from .errors import DistbootError, quoted
from .placement import VARIABLES, Placement

VARIABLE = "DISTBOOT_PLACEMENT"

_NUMBERS = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes", "master_port")
_IDENTITY = ("launcher", "rank", "world_size")
_OTHER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}(:[0-9a-f]{8})?")
_PLACE = ("local_rank", "local_world_size", "node_rank", "num_nodes")


class Handoff(NamedTuple):
    """What `DISTBOOT_PLACEMENT` says.

    Attributes:
        fields: fields of `Placement` that were known, by name.
        job: digest of the job id; empty when there was none.
        exported: the variables that distboot set or changed, and that are a field's.
        others: those that are not, with the digests of their values.
        joined: process id of the process that has joined the job as this rank with `init`; 0 when none has.
        met: whether the ranks of the job have met already.
        watched: whether the wrapper keeps the lifeline of this rank.
    """

    fields: Mapping[str, int | str]
    job: str
    exported: frozenset[str]
    others: Mapping[str, str]
    joined: int
    met: bool
    watched: bool

    def is_about(self, placement: Placement) -> bool:
        """Whether `placement` is the very process that this was written for."""
        same = all(self.fields.get(field) == getattr(placement, field) for field in _IDENTITY)
        place = ((self.fields.get(field), getattr(placement, field)) for field in _PLACE)
        return same and self.job == digest(placement.job_id) and all(new in (None, old) for old, new in place)

    def completed(self, placement: Placement) -> Placement:
        """`placement` with what was found out since about the very same process."""
        # An address or a port that is in the environment all the same was set after distboot exported its own.
        given = {field for field, name in VARIABLES.items() if placement.sources.get(field) == name}
        return placement.with_fields(VARIABLE, {f: value for f, value in self.fields.items() if f not in given})

    def without_others(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """`environ` without those of `others` that are as distboot exported them."""
        return {name: value for name, value in environ.items() if self.others.get(name) != digest(value)}


def encode(
    placement: Placement,
    exported: Iterable[str],
    joined: int = 0,
    *,
    others: Mapping[str, str] = MappingProxyType({}),
    met: bool = False,
    watched: bool = False,
) -> str:
    """The value of `DISTBOOT_PLACEMENT`. It has only characters that need no quoting in a shell or an env file.

    Args:
        placement: what was found.
        exported: the variables that distboot set or changed, and that are a field's.
        joined: as in `Handoff`.
        met: the same.
        watched: the same.
        others: those that are not, with their values.
    """
    fields = ("launcher", *_NUMBERS, "master_addr")
    words = [f"{field}={getattr(placement, field)}" for field in fields if getattr(placement, field) is not None]
    words += [f"job={digest(placement.job_id)}"] if placement.job_id is not None else []
    words += [f"joined={joined}"] if joined else []
    words += ["met=1"] if met else []
    words += ["watched=1"] if watched else []
    digests = (f"{name}:{digest(value)}" for name, value in others.items())
    return ",".join([*words, "exported=" + "+".join([*exported, *digests])])


def take(environ: Mapping[str, str]) -> tuple[Mapping[str, str], Handoff | None]:
    """`environ` without what an outer distboot exported, and what it handed over; None when there is nothing."""
    if VARIABLE not in environ:
        return environ, None
    handoff = _decode(environ[VARIABLE])
    ours = {name: str(handoff.fields.get(field)) for field, name in VARIABLES.items() if name in handoff.exported}
    # What was exported without being a field is the launcher's own variable under another name.
    unchanged = {name for name, value in ours.items() if value == "None" or environ.get(name) == value}
    if any(name in ours and name not in unchanged for name in ("RANK", "WORLD_SIZE")):
        # Somebody started processes of their own and numbered them. What says where our one process was is not about
        # them; the address may be: such starters often leave it to the environment.
        unchanged -= {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    own = {VARIABLE, *unchanged}
    return {name: value for name, value in handoff.without_others(environ).items() if name not in own}, handoff


def left(text: str) -> str:
    """What the value of `DISTBOOT_PLACEMENT` is once the process that has joined has left."""
    return ",".join(word for word in text.split(",") if not word.startswith("joined="))


def digest(job_id: str | None) -> str:
    """Eight hex digits that stand for a job id; empty for None."""
    return "" if job_id is None else f"{zlib.crc32(job_id.encode(errors='surrogatepass')):08x}"


def _decode(text: str) -> Handoff:
    pairs = [word.partition("=")[::2] for word in text.split(",")]
    words = dict(pairs)
    names = list(filter(None, words.pop("exported", "?").split("+")))
    exported = frozenset(name for name in names if ":" not in name)
    others = dict(name.split(":", 1) for name in names if ":" in name)
    job, joined = words.pop("job", ""), words.pop("joined", "0")
    met, watched = words.pop("met", "0"), words.pop("watched", "0")
    numbers = {name: value for name, value in words.items() if name in _NUMBERS}
    texts = {name: value for name, value in words.items() if name in ("launcher", "master_addr")}
    well_formed = all(
        value.isascii() and value.isdigit() and len(value) <= 8 for value in (*numbers.values(), joined, met, watched)
    )
    complete = words.keys() >= set(_IDENTITY) and len(numbers) + len(texts) == len(words)
    once = len({name for name, _ in pairs}) == len(pairs)
    fields = {name: int(value) for name, value in numbers.items()} if well_formed else {}
    known = exported <= set(VARIABLES.values()) and all(map(_OTHER.fullmatch, names))
    if not (complete and once and known and _is_possible(fields, texts)):
        raise DistbootError(
            "broken-environment", f"{VARIABLE}={quoted(text)} was not written by distboot", f"unset {VARIABLE}"
        ).of("rank ?")
    return Handoff({**texts, **fields}, job, exported, others, int(joined), met == "1", watched == "1")


def _is_possible(numbers: Mapping[str, int], texts: Mapping[str, str]) -> bool:
    """Whether a placement can have these fields: it was checked before it was written, but anybody can write it."""
    world_size = numbers.get("world_size", 0)
    pairs = (("rank", "world_size"), ("local_rank", "local_world_size"), ("node_rank", "num_nodes"))
    below = all(numbers.get(index, 0) < numbers.get(size, world_size) <= world_size for index, size in pairs)
    try:
        parse_port(str(numbers.get("master_port", 1)))
        host = parse_address(texts.get("master_addr", "localhost"))[0]
    except ValueError:
        return False
    return below and host == texts.get("master_addr", host)
