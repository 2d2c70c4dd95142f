"""`DISTBOOT_PLACEMENT`: what an outer distboot (wrapper, `init`, `distboot env`) has exported.

Without it, a process could not tell RANK=0 that distboot exported from RANK=0 that a launcher set.
An example, in which JOB is launcher=openmpi,rank=3,world_size=4:
  JOB,node_rank=1,master_port=61234,job=5c2f10aa,exported=RANK:6dd28e9b+NODE_RANK:83dcefb7:37
Each variable that distboot set or cleared stands there with a digest of its value, and with the
previous one (hexadecimal: NODE_RANK was 7). While it is as distboot left it, the previous value is
restored, so that an inner distboot detects in the very environment in which the outer one did.

A process of the same launcher, job and rank uses what was found. A process of an inner launcher
(mpirun below the wrapper) ignores everything that distboot exported for the outer one. Which
launcher that is:
- one whose variables were not there when the outer distboot looked (`seen`) has started this
  process since;
- a variable with the value that distboot exported is distboot's, but not where its launcher sets
  all variables again, which one shows that distboot does not export (`Launcher.own_mark`).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from ..base.errors import UNKNOWN_RANK, DistbootError
from ..base.patterns import pattern
from ..base.text import short_repr
from .parse import parse_address
from .placement import NUMBERS, SIZES, VARIABLES, Placement

VARIABLE = "DISTBOOT_PLACEMENT"

_NUMBERS = (*NUMBERS, "master_port")
_FLAGS = ("joined", "met", "launches")
# What the placement of the very process has, too, as far as it knows it
_COMPARED = ("launcher", *NUMBERS)
_FIELDS = {name: field for field, name in VARIABLES.items()}
_OF_FIELDS = _FIELDS.keys()
_NUMBERED = {"RANK", "WORLD_SIZE"}  # the variables with which a launcher numbers its processes


def _list_of(one: str) -> str:
    """The regular expression of none, one or more of these, with + between them."""
    return rf"(?:{one}(?:\+{one})*)?"


# What `encode` writes, in its order. One match reads all of it, as each process of a job does
# several times.
_NUMBER = "[0-9]{1,8}"
_NAME = "[A-Za-z_][A-Za-z0-9_]{0,99}"
_DIGEST = "[0-9a-f]{8}"
_IDENTITY = f"(?:{_DIGEST}){{1,2}}"  # of one process, and of the job
_PREVIOUS = "(?:[0-9a-f]{2})*"
_EXPORT = f"{_NAME}:(?:{_DIGEST})?(?::{_PREVIOUS})?"
_EXPORT_OF_0_1 = f"(?:{'|'.join(sorted(_OF_FIELDS))})"  # with the value of its field
_FORM = pattern(
    "".join(
        [
            r"launcher=(?P<launcher>[^,=]+)",
            rf",rank=(?P<rank>{_NUMBER}),world_size=(?P<world_size>{_NUMBER})",
            *(rf"(?:,{name}=(?P<{name}>{_NUMBER}))?" for name in _NUMBERS[2:]),
            r"(?:,master_addr=(?P<master_addr>[^,]+))?",
            r"(?:,job=(?P<job>[0-9a-f]{8}))?",
            *(rf"(?:,{name}=(?P<{name}>{_NUMBER}))?" for name in _FLAGS),
            rf"(?:,seen=(?P<seen>{_list_of(f'{_NAME}(?::{_IDENTITY})?')}))?",
            rf",exported=(?P<exported>{_list_of(f'(?:{_EXPORT}|{_EXPORT_OF_0_1})')})",
        ]
    )
)


_JOINED = pattern(r"(?<=,)joined=[^,]*,")


class Export(NamedTuple):
    """A variable that distboot set or cleared."""

    digest: str  # of its value; empty: it is cleared
    previous: str | None  # None: it was not set


class InheritedEnv(NamedTuple):
    """What `DISTBOOT_PLACEMENT` says; all is empty where it is not set."""

    fields: Mapping[str, int | str] = {}  # fields of `Placement` that were known, by name
    job: str = ""  # digest of the job id
    exported: Mapping[str, Export] = {}  # by the name of the variable
    joined: int = 0  # id of the process that has joined the job as this rank with `init`, or 0
    met: bool = False  # whether the ranks of the job have met already
    # All launchers whose variables were there, also those further out, with `identity` of what each
    # said.
    seen: Mapping[str, str] = {}
    # Whether it was written for a launcher, so that no process is this rank any more
    launches: bool = False

    def is_about(self, placement: Placement) -> bool:
        """Whether `placement` is the very process that this was written for."""
        if self.launches or not self.fields:
            return False
        for field in _COMPARED:
            possible = (None, self.fields.get(field))
            if getattr(placement, field) not in possible:
                return False
        return self.job == digest(placement.job_id)

    def is_new(self, launcher: str, identity: str) -> bool:
        """Whether the numbers of a launcher are those of another process than before.

        A container may lack the variable of the job.
        """
        before = self.seen.get(launcher, "")
        own = identity[:8]
        if own != before[:8]:
            return True
        jobs = {identity[8:], before[8:]}
        both_known = "" not in jobs
        return both_known and len(jobs) > 1

    def merge(self, placement: Placement, environ: Mapping[str, str]) -> Placement:
        """`placement` with what was found out since about the very same process."""
        # An address or a port in one of these was set after distboot exported its own
        set_since = _OF_FIELDS - self.unchanged(environ).keys()
        new = {
            field: value
            for field, value in self.fields.items()
            if placement.sources.get(field) not in set_since
        }
        return placement.with_fields(VARIABLE, new)

    def was_replaced(self, name: str, environ: Mapping[str, str]) -> bool:
        """Whether a variable that distboot had set has got another value since."""
        still_set = self.exported.keys() & environ.keys()
        return name in still_set - self.unchanged(environ).keys()

    def unchanged(self, environ: Mapping[str, str]) -> dict[str, str | None]:
        """The variables that are still as distboot left them, with their previous values."""
        same = {}
        for name, export in self.exported.items():
            if digest(environ.get(name)) == export.digest:
                same[name] = export.previous
        changed = self.exported.keys() - same.keys()
        if changed & _NUMBERED:
            # A launcher without variables of its own has started processes and numbered them. The
            # place of our one process is not theirs; the address may be: such launchers often leave
            # it to the environment.
            for name in (*_NUMBERED, "MASTER_ADDR", "MASTER_PORT"):
                same.pop(name, None)
        return same


_NOTHING = InheritedEnv()


def encode(
    placement: Placement,
    exported: Mapping[str, Export] = {},
    joined: int = 0,
    *,
    met: bool = False,
    seen: Mapping[str, str] = {},
    launches: bool = False,
) -> str:
    """The value of `DISTBOOT_PLACEMENT`, in characters that no shell or env file has to quote.

    The arguments are as in `InheritedEnv`.
    """
    words = []
    for field in ("launcher", *_NUMBERS, "master_addr"):
        value = getattr(placement, field)
        if value is not None:
            words.append(f"{field}={value}")
    job = digest(placement.job_id)
    if job:
        words.append(f"job={job}")
    flags = (joined, met, launches)
    for name, flag in zip(_FLAGS, flags, strict=True):
        number = int(flag)
        if number:
            words.append(f"{name}={number}")
    if seen:
        launchers = map(":".join, seen.items())
        words.append("seen=" + "+".join(launchers))
    exports = [_word_of(name, export) for name, export in exported.items()]
    words.append("exported=" + "+".join(exports))
    return ",".join(words)


def _word_of(name: str, export: Export) -> str:
    word = f"{name}:{export.digest}"
    if export.previous is None:
        return word
    previous = export.previous.encode(errors="surrogateescape")
    return f"{word}:{previous.hex()}"


def _exports_of(listed: str, fields: Mapping[str, int | str]) -> dict[str, Export]:
    """`"NODE_RANK:83dcefb7:37"` -> `NODE_RANK`, and that it was `"7"`."""
    exports = {}
    for word in _split(listed):
        name, _, rest = word.partition(":")
        if word in _OF_FIELDS:
            rest = _digest_of_0_1(name, fields)
        digest_, colon, previous_hex = rest.partition(":")
        previous = None
        if colon:
            previous = bytes.fromhex(previous_hex).decode(errors="surrogateescape")
        exports[name] = Export(digest_, previous)
    return exports


def _digest_of_0_1(name: str, fields: Mapping[str, int | str]) -> str:
    """What 0.1 left out, as the value is that of a field."""
    field = _FIELDS[name]
    if field not in fields:
        return ""
    return digest(str(fields[field]))


def restored(environ: Mapping[str, str]) -> tuple[Mapping[str, str], InheritedEnv]:
    """`environ` as it was before an outer distboot, and what `DISTBOOT_PLACEMENT` has."""
    if VARIABLE not in environ:
        return environ, _NOTHING
    outer = _decode(environ[VARIABLE])
    previous_values = {VARIABLE: None, **outer.unchanged(environ)}
    return merged(previous_values, environ), outer


def merged(exports: Mapping[str, str | None], environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of `environ` with these variables set or, for None, cleared: as of a child process."""
    both = dict(environ)
    for name, value in exports.items():
        if value is None:
            both.pop(name, None)  # it may be cleared already
        else:
            both[name] = value
    return both


def about(placement: Placement, environ: Mapping[str, str]) -> InheritedEnv:
    """What an outer distboot has said of this very process, whose placement it is."""
    _, outer = restored(environ)
    if outer.is_about(placement):
        return outer
    return _NOTHING


def after_close(text: str) -> str:
    """A value of `DISTBOOT_PLACEMENT` without `joined`, for after close()."""
    return _JOINED.sub("", text)


def digest(text: str | None) -> str:
    """The CRC-32 of a text as eight hex digits; empty for None."""
    if text is None:
        return ""
    data = text.encode(errors="surrogatepass")
    number = zlib.crc32(data)
    return f"{number:08x}"


@lru_cache  # a process asks for it some eight times while it starts
def _decode(text: str) -> InheritedEnv:
    match = _FORM.fullmatch(text)
    if match is None:
        raise _foreign(text)
    words = match.groupdict("")
    numbers = {}
    for name in _NUMBERS:
        if words[name]:
            numbers[name] = int(words[name])
    host = words["master_addr"]
    if not _is_possible(numbers, host):
        raise _foreign(text)
    fields: dict[str, int | str] = {"launcher": words["launcher"], **numbers}
    if host:
        fields["master_addr"] = host
    return InheritedEnv(
        fields=fields,
        job=words["job"],
        exported=_exports_of(words["exported"], fields),
        joined=int(words["joined"] or 0),
        met=words["met"] == "1",
        seen=_pairs(words["seen"]),
        launches=words["launches"] == "1",
    )


def _foreign(text: str) -> DistbootError:
    return DistbootError(
        "broken-environment",
        f"{VARIABLE}={short_repr(text)} was not written by distboot",
        f"unset {VARIABLE}",
    ).of(UNKNOWN_RANK)


def _split(listed: str) -> list[str]:
    """`"slurm:12+pals"` -> `["slurm:12", "pals"]`."""
    found = listed.split("+")
    return list(filter(None, found))


def _pairs(listed: str) -> dict[str, str]:
    """`"slurm:12+pals"` -> `{"slurm": "12", "pals": ""}`."""
    pairs = {}
    for one in _split(listed):
        name, _, digests = one.partition(":")
        pairs[name] = digests
    return pairs


def _is_possible(numbers: Mapping[str, int], host: str) -> bool:
    """Whether a placement can have these fields: a user may have written the variable."""
    world_size = numbers["world_size"]
    for index, size in SIZES.items():
        low = numbers.get(index, 0)
        high = numbers.get(size, world_size)
        possible = low < high <= world_size
        if not possible:
            return False
    port = numbers.get("master_port", 1)
    ports = range(1, 65536)
    if port not in ports:
        return False
    if not host:
        return True
    try:
        parsed, _ = parse_address(host)
    except ValueError:
        return False
    return parsed == host
