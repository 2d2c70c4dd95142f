"""Protocol 2: messages, and the frames that carry them over a connection. Pure: no socket, no
clock.

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
its connection, and nobody else anything.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple, TypeAlias

VERSION = 2
# Bytes of one body, and of anything that a rank other than 0 sends
BEFORE_AUTHENTICATION = 64 * 1024
MOST = 64 * 1024 * 1024  # bytes of the longest body that a rank accepts of rank 0
_HEADER = struct.Struct("!III32s")  # length, round, rank, MAC
HEADER = _HEADER.size  # bytes
_COMPRESSED = 1 << 31
_COMPRESSED_FROM = 4 * 1024  # bytes
_UNPROVED = bytes(32)
_ALTERED = "sends a message that was changed, repeated or reordered on its way"
_LARGEST = 1 << 32  # of any number

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
        if not holds(value):
            raise ValueError(what)
        return value

    return check


def integer(least: int = 0, most: int = _LARGEST - 1, what: str = "number") -> Check:
    """Accept an integer from `least` to `most`."""

    def is_in_range(value: Any) -> bool:
        # `type`, as a truth value is an instance of int
        return type(value) is int and least <= value <= most

    return valid(is_in_range, what)


def text(most: int) -> Check:
    """Accept at most so many characters."""

    def is_short_text(value: Any) -> bool:
        return isinstance(value, str) and len(value) <= most

    return valid(is_short_text, f"text of at most {most} characters")


def both(first: Check, second: Check) -> Check:
    """Apply the second check to the result of the first one."""
    return lambda value: second(first(value))


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _LARGEST


number = integer()
flag = valid(lambda value: type(value) is bool, "truth value")
time_or_duration = both(valid(_is_seconds, "number of seconds"), float)


def optional(check: Check) -> Check:
    """Accept also None."""

    def check_unless_none(value: Any) -> Any:
        if value is None:
            return None
        return check(value)

    return check_unless_none


def several(check: Check, most: int = _LARGEST, least: int = 0, what: str = "list") -> Check:
    """Accept a list of `least` to `most` items, as a tuple."""

    def check_items(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or not least <= len(value) <= most:
            raise ValueError(what)
        return tuple(map(check, value))

    return check_items


def table(most: int, check: Check) -> Check:
    """Accept at most so many names with their values."""
    name = text(1000)

    def check_rows(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or len(value) > most:
            raise ValueError("table")
        return {name(key): check(item) for key, item in value.items()}

    return check_rows


def nested(kind: type) -> Check:
    """Accept a dataclass, whose fields are declared as those of a message."""

    def check_nested(value: Any) -> object:
        if isinstance(value, kind):
            return value
        return _build(kind, value)

    return check_nested


@cache
def _checks(kind: Any) -> dict[str, Check]:
    return {each.name: each.metadata["check"] for each in fields(kind)}


def _build(kind: type, content: Any) -> object:
    """Build a dataclass from JSON.

    Raises:
        ValueError: what it is not, and the names of the fields, from the outermost in.
    """
    checks = _checks(kind)
    found = {}
    if not isinstance(content, dict) or content.keys() != checks.keys():
        raise ValueError(kind.__name__)
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
    named = {"kind": type(content).__name__, **_fields_of(content)}
    return json.dumps(named, default=_fields_of, separators=(",", ":")).encode()


def _fields_of(content: Any) -> dict[str, object]:
    return {name: getattr(content, name) for name in content.__slots__}


def decode(body: bytes, *kinds: type) -> Any:
    """The message in a body; `ProtocolError`: it is not a valid message of these kinds."""
    if not body and type(None) in kinds:
        return None
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise ProtocolError("sends no JSON") from None
    kind = _kind_of(content, kinds)
    try:
        return _build(kind, content)
    except ValueError as error:
        what, *where = error.args
        why = what
        if where:
            why = f"{'.'.join(where)} is not a valid {what}"
        raise ProtocolError(f"sends a broken {kind.__name__}: {why}") from None


def _kind_of(content: Any, kinds: tuple[type, ...]) -> type:
    """Take the kind of a message out of its content."""
    name = None
    if isinstance(content, dict):
        name = content.pop("kind", None)
    for kind in kinds:
        if kind.__name__ == name and kind is not type(None):
            return kind
    expected = " or ".join(kind.__name__ for kind in kinds)
    raise ProtocolError(f"does not send the expected {expected}")


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
        return HEADER + self._length() - have

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes; `ProtocolError`: one is too long, or it is not one."""
        self._buffer += data
        found = []
        while len(self._buffer) >= 4:
            length = self._length()
            if length > self.most:
                raise ProtocolError(
                    f"announces a message of {length} bytes, of at most {self.most}"
                )
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
        if inflating.unconsumed_tail or not inflating.eof:
            raise ProtocolError(f"sends a message of more than {self.most} bytes, or half of one")
        return body

    def _length(self) -> int:
        return announced_length(self._buffer)


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
    us: str = "rank 0"  # this side, as a refusal names it
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
                f"speaks of round {frame.round} of the job, and this is round {self.round}"
            )
        if frame.mac == _UNPROVED and self.secret:
            raise ProtocolError("has no DISTBOOT_SECRET")
        if frame.mac != _UNPROVED and not self.secret:
            raise ProtocolError(f"has a DISTBOOT_SECRET, and {self.us} has none")
        digest = hashlib.sha256(frame.body).digest()
        mac = self.mac(digest, frame.rank, self.counts.received, theirs=True)
        if not hmac.compare_digest(frame.mac, mac):
            if self.counts.received:
                raise ProtocolError(_ALTERED)
            raise ProtocolError("has another DISTBOOT_SECRET")
        self.counts.received += 1
        return decode(frames.inflated(frame), *kinds)

    def mac(self, digest: bytes, rank: int, number: int, *, theirs: bool = False) -> bytes:
        """The MAC of a body with this digest, as this side computes it, or, `theirs`, the peer."""
        if not self.secret:
            return _UNPROVED
        # Else a frame of this side could be sent back to it
        is_of_rank_0 = (self.us == "rank 0") is not theirs
        about = f"{self.challenge}/{self.nonce}/{self.round}/{rank}/{is_of_rank_0}/"
        signed = about.encode() + number.to_bytes(8, "big") + digest
        return hmac.digest(self.secret.encode(errors="surrogateescape"), signed, "sha256")


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
        self._digest = hashlib.sha256(body).digest()

    @property
    def size(self) -> int:
        """Bytes of one frame."""
        return HEADER + len(self._body)

    def sign(self, channel: Channel, rank: int = 0) -> bytes:
        """The next frame for one of these connections."""
        mac = channel.mac(self._digest, rank, channel.counts.sent)
        channel.counts.sent += 1
        return _HEADER.pack(self._length, channel.round, rank, mac) + self._body


HEARTBEAT = Broadcast(None)


def random_nonce() -> str:
    """32 hex digits that were never used before."""
    return os.urandom(16).hex()


def most_from_rank_0(world_size: int) -> int:
    """The most bytes of one body of rank 0, once it is authenticated; it grows with the job."""
    return min(BEFORE_AUTHENTICATION + 1024 * world_size, MOST)
