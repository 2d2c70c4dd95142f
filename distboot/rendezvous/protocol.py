"""Protocol 2: messages, and the frames that carry them over a connection. Pure.

A frame is a header and a body. The header has 44 bytes, integers with the most significant first:

    4   length of the body; the highest bit: the body is compressed with zlib
    4   round of the job
    4   rank that the message is from or for, as an agent may have several
    32  MAC that authenticates the frame; zeros without DISTBOOT_SECRET

The body is a JSON object: the kind of the message, and its fields. An empty body is a heartbeat.

With DISTBOOT_SECRET the MAC is HMAC-SHA256 over

- the challenge of rank 0 and the nonce of the other side: a frame of another connection is refused;
- the round and the rank;
- the side that sends it: a frame that is sent back to its sender is refused;
- the number of the frame, which both sides count (8 bytes): no frame can be left out, repeated or
  reordered on its way;
- the SHA-256 of the body as it is sent: a broadcast is hashed once for all connections.

So no process without the secret can join or pose as rank 0. Nothing is encrypted.

The order of checks is the point of this file. `Frames` bounds the length from the first 4 bytes,
before the body arrives. `Channel.verify` authenticates the bytes, before anything parses them. Only
then is the body decompressed, within the same bound, and decoded. `decode` accepts only the kinds
that the caller expects. A message is a frozen dataclass; each of its fields has a check that
returns the value, or raises `ValueError`. What fails is a `ProtocolError`, which costs the sender
its connection, and has no effect on others.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from functools import cache, cached_property
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from ..base.dataclass import as_dict, dataclass, field, fields

VERSION = 2
# Bytes of one body, and of anything that a rank other than 0 sends
BEFORE_AUTHENTICATION = 64 * 1024
MOST = 64 * 1024 * 1024  # bytes of the longest body that a rank accepts of rank 0
_HEADER = struct.Struct("!III32s")  # length, round, rank, MAC
HEADER = _HEADER.size  # bytes
_COMPRESSED = 1 << 31
_COMPRESSED_FROM = 4 * 1024  # bytes
_UNPROVED = bytes(32)
# By whether a frame has a MAC
_SECRET_PROBLEMS = {
    False: "has no DISTBOOT_SECRET",
    True: "has a DISTBOOT_SECRET, but {} has none",
}
# By whether a frame before it on the connection was authentic
_FORGED = {
    False: "has a different DISTBOOT_SECRET",
    True: "sends a message that was changed, repeated or reordered on its way",
}
_LARGEST = 1 << 32  # of any number
LONGEST_TIME = math.nextafter(_LARGEST, 0.0)  # seconds
_MOST_SHARED = 1000  # values of one field
_HEARTBEAT = type(None)  # the kind of an empty body

Check: TypeAlias = Callable[[Any], Any]


class ProtocolError(Exception):
    """The peer violates this protocol; the text reads well after "the peer"."""


# Messages


def of(check: Check, **more: Any) -> Any:
    """A field of a message. `check` returns the value that is received, or raises `ValueError`."""
    return field(metadata={"check": check}, **more)


def valid(holds: Check, what: str) -> Check:
    """Accept a value for which this holds; any other is not a valid `what`."""

    def check(value: Any) -> Any:
        if holds(value):
            return value
        raise ValueError(what)

    return check


def in_range(kinds: tuple[type, ...], least: int, most: float, what: str) -> Check:
    """Accept a number of exactly these types; a truth value is an instance of int."""

    def check_number(value: Any) -> Any:  # in one call, as there are many
        if type(value) in kinds and least <= value <= most:
            return value
        raise ValueError(what)

    return check_number


def _sized(kinds: tuple[Any, ...], least: int, most: int, what: str) -> Check:
    """Accept an instance of these types with a length in this range."""

    def check_size(value: Any) -> Any:  # in one call, as there are many
        if isinstance(value, kinds) and least <= len(value) <= most:
            return value
        raise ValueError(what)

    return check_size


def integer(
    least: int = 0,
    most: int = _LARGEST - 1,
    what: str = "number",
) -> Check:
    """Accept an integer from `least` to `most`."""
    return in_range((int,), least, most, what)


def text(most: int) -> Check:
    """Accept at most so many characters."""
    return _sized((str,), 0, most, f"text of at most {most} characters")


def both(first: Check, second: Check) -> Check:
    """Apply the second check to the result of the first one."""

    def check_both(value: Any) -> Any:
        checked = first(value)
        return second(checked)

    return check_both


number = integer()
flag = valid(lambda value: type(value) is bool, "truth value")
time_or_duration = both(
    in_range((int, float), 0, LONGEST_TIME, "number of seconds"),
    float,
)


def optional(check: Check) -> Check:
    """Accept also None."""

    def check_unless_none(value: Any) -> Any:
        if value is not None:
            value = check(value)
        return value

    return check_unless_none


def several(
    check: Check,
    most: int = _LARGEST,
    least: int = 0,
    what: str = "list",
) -> Check:
    """Accept a list of `least` to `most` items, as a tuple."""
    check_size = _sized((list, tuple), least, most, what)

    def check_items(value: Any) -> tuple[Any, ...]:
        check_size(value)
        items = map(check, value)
        return tuple(items)

    return check_items


def shared(check: Check) -> Check:
    """Accept what `check` does. Equal values are checked once and are one object: those of 10,000
    ranks often are equal.
    """
    known: dict[str, Any] = {}

    def check_once(value: Any) -> Any:
        written = repr(value)  # equal only for values of equal types
        if written not in known:
            if len(known) == _MOST_SHARED:
                known.clear()
            known[written] = check(value)
        return known[written]

    return check_once


def table(most: int, check: Check) -> Check:
    """Accept at most so many names with their values."""
    check_name = text(1000)
    check_size = _sized((dict,), 0, most, "table")

    def check_rows(value: Any) -> dict[str, Any]:
        check_size(value)
        found = {}
        for key, item in value.items():
            name = check_name(key)
            found[name] = check(item)
        return found

    return check_rows


def nested(kind: type) -> Check:
    """Accept a dataclass, whose fields are declared as those of a message."""

    def check_nested(value: Any) -> object:
        is_built = isinstance(value, kind)
        if not is_built:
            value = _build(kind, value)
        return value

    return check_nested


@cache
def _checks(kind: Any) -> dict[str, Check]:
    found = {}
    for name, declared in fields(kind).items():
        found[name] = declared.metadata["check"]
    return found


def _build(kind: type, content: Any) -> object:
    """Build a dataclass from JSON.

    Raises:
        ValueError: what it is not, and the names of the fields, from the outermost in.
    """
    checks = _checks(kind)
    names = checks.keys()
    has_all_fields = isinstance(content, dict) and content.keys() == names
    if not has_all_fields:
        raise ValueError(kind.__name__)
    found = {}
    for name, check in checks.items():
        try:
            found[name] = check(content[name])
        except ValueError as error:  # noqa: PERF203 - which is rare
            what, *where = error.args
            raise ValueError(what, name, *where) from None
    return kind(**found)


def encode(content: object) -> bytes:
    """The body of a frame with this message; None is a heartbeat, whose body is empty."""
    if content is None:
        return b""
    named = {"kind": type(content).__name__, **as_dict(content)}
    return _JSON.encode(named).encode()


_JSON = json.JSONEncoder(default=as_dict, separators=(",", ":"))


def decode(body: bytes, *kinds: type) -> Any:
    """The message in a body; `ProtocolError`: it is not a valid message of these kinds."""
    if not body and _HEARTBEAT in kinds:
        return None
    try:
        content = json.loads(body.decode())
    except (ValueError, RecursionError):
        raise ProtocolError("sent data that is not JSON") from None
    kind = _kind_of(content, kinds)
    try:
        return _build(kind, content)
    except (ValueError, RecursionError) as error:
        what, *where = error.args
        why = what
        if where:
            field_name = ".".join(where)
            why = f"{field_name} is not a valid {what}"
        raise ProtocolError(f"sends a broken {kind.__name__}: {why}") from None


def _kind_of(content: Any, kinds: tuple[type, ...]) -> type:
    """Take the kind of a message out of its content."""
    by_name = _by_name(kinds)
    if isinstance(content, dict):
        name = str(content.pop("kind", None))
        if name in by_name:
            return by_name[name]
    expected = " or ".join(map(attrgetter("__name__"), kinds))
    raise ProtocolError(f"does not send the expected {expected}")


@cache
def _by_name(kinds: tuple[type, ...]) -> dict[str, type]:
    found = {kind.__name__: kind for kind in kinds}
    found.pop(_HEARTBEAT.__name__, None)  # whose body is empty
    return found


# Frames


class Frame(NamedTuple):
    """A frame as it was received."""

    compressed: bool
    round: int
    rank: int
    mac: bytes
    body: bytes


def announced_length(data: bytes | bytearray) -> int:
    """The number of bytes of the body of a frame that begins like this."""
    return int.from_bytes(data[:4], "big") & ~_COMPRESSED


class Frames:
    """Cuts received bytes into frames. A body has at most `most` bytes, also once inflated."""

    def __init__(self, most: int = BEFORE_AUTHENTICATION) -> None:
        self.most = most
        self._buffer = bytearray()

    @property
    def pending(self) -> bytes:
        """The bytes of an incomplete frame, or of what is not a frame."""
        return bytes(self._buffer)

    @property
    def missing(self) -> int:
        """How many bytes complete the header, or, once that is there, the frame."""
        have = len(self._buffer)
        if have < HEADER:
            return HEADER - have
        return HEADER + announced_length(self._buffer) - have

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes; `ProtocolError`: one is too long, or it is not one."""
        self._buffer += data
        found = []
        while len(self._buffer) >= 4:
            length = announced_length(self._buffer)
            if length > self.most:
                raise ProtocolError(f"announces a message of {length} bytes (limit: {self.most})")
            if len(self._buffer) < HEADER + length:
                break
            flagged, round_, rank, mac = _HEADER.unpack_from(self._buffer)
            body = bytes(self._buffer[HEADER : HEADER + length])
            found.append(Frame(flagged != length, round_, rank, mac, body))
            del self._buffer[: HEADER + length]
        return found

    def inflated(self, frame: Frame) -> bytes:
        """The body of a frame."""
        if not frame.compressed:
            return frame.body
        import zlib

        inflating = zlib.decompressobj()
        try:
            body = inflating.decompress(frame.body, self.most)
        except zlib.error:
            raise ProtocolError("sends what cannot be decompressed") from None
        is_complete = inflating.eof and not inflating.unconsumed_tail
        if not is_complete:
            raise ProtocolError(
                f"sends a message of more than {self.most} bytes, or an incomplete one"
            )
        return body


@dataclass(slots=True)
class Counts:
    """How many frames have been signed for a connection, and verified."""

    sent: int = 0
    received: int = 0


@dataclass(frozen=True, slots=True)
class Channel:
    """What the frames of one connection are authenticated with. Without a secret nothing is proved.

    Frames have to be sent in the order in which they were signed.
    """

    secret: str = field(default="", repr=False)
    is_rank_0: bool = True  # whether this side is
    challenge: str = ""  # of rank 0, random for this connection
    nonce: str = ""  # of the other side, likewise
    round: int = 0  # of the job
    counts: Counts = field(default_factory=Counts, repr=False, compare=False)

    def sign(self, content: object, rank: int = 0) -> bytes:
        """A frame with a message from or for a rank."""
        return Broadcast(content).sign(self, rank)

    def verify(self, frame: Frame, frames: Frames, *kinds: type) -> Any:
        """The message in a frame of `frames`.

        Raises:
            ProtocolError: it is not authentic, or not a valid message of these kinds.
        """
        if frame.round != self.round:
            raise ProtocolError(
                f"sent a message for round {frame.round}; the job is in round {self.round}"
            )
        has_mac = frame.mac != _UNPROVED
        if has_mac is not bool(self.secret):
            us = "this rank"
            if self.is_rank_0:
                us = "rank 0"
            raise ProtocolError(_SECRET_PROBLEMS[has_mac].format(us))
        if has_mac:
            self._authenticate(frame)
        self.counts.received += 1
        body = frames.inflated(frame)
        return decode(body, *kinds)

    def _authenticate(self, frame: Frame) -> None:
        from .authentication import are_equal, digest_of  # here and below, as few jobs have secrets

        received = self.counts.received
        mac = self.mac(lambda: digest_of(frame.body), frame.rank, received, theirs=True)
        if not are_equal(frame.mac, mac):
            raise ProtocolError(_FORGED[received > 0])

    def mac(
        self,
        digest: Callable[[], bytes],  # of the body; not needed without a secret
        rank: int,
        number: int,  # of the frame
        *,
        theirs: bool = False,
    ) -> bytes:
        """The MAC of a body with this digest, as this side computes it, or, `theirs`, the peer."""
        if not self.secret:
            return _UNPROVED
        from .authentication import mac_of

        # Else a frame of this side could be sent back to it
        is_of_rank_0 = self.is_rank_0 is not theirs
        about = f"{self.challenge}/{self.nonce}/{self.round}/{rank}/{is_of_rank_0}/"
        signed = about.encode() + number.to_bytes(8, "big") + digest()
        return mac_of(self.secret, signed)


class Broadcast:
    """A message for many connections, encoded and compressed once: that of a large job is long."""

    def __init__(self, content: object) -> None:
        body = encode(content)
        compressed = 0
        if len(body) >= _COMPRESSED_FROM:
            import zlib  # which a small job does not need

            body = zlib.compress(body, 1)
            compressed = _COMPRESSED
        self._length = compressed | len(body)
        self._body = body

    @property
    def size(self) -> int:
        """Bytes of one frame."""
        return HEADER + len(self._body)

    def sign(self, channel: Channel, rank: int = 0) -> bytes:
        """The next frame for one of these connections."""
        mac = channel.mac(lambda: self._digest, rank, channel.counts.sent)
        channel.counts.sent += 1
        return _HEADER.pack(self._length, channel.round, rank, mac) + self._body

    @cached_property
    def _digest(self) -> bytes:
        from .authentication import digest_of

        return digest_of(self._body)


HEARTBEAT = Broadcast(None)


def random_nonce() -> str:
    """32 hex digits that were never used before."""
    nonce = os.urandom(16)
    return nonce.hex()


def most_from_rank_0(world_size: int) -> int:
    """The most bytes of one body of rank 0, once it is authenticated; it grows with the job."""
    return min(BEFORE_AUTHENTICATION + 1024 * world_size, MOST)
