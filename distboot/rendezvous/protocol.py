"""Protocol 2: messages, and the frames in which they go over a connection. Nothing here blocks, or knows what is said.

A frame is a header and a body. The header has the length of the body in 4 bytes, most significant first, whose highest
bit says that the body is compressed with zlib; the round of the job in 4 bytes; in 4 bytes the rank that the message is
from or for, as an agent may have several; and 32 bytes that authenticate it. With DISTBOOT_SECRET they are HMAC-SHA256
over the challenge of rank 0, the nonce of the other side, the round, the rank, the side that sends it, the number of
the frame on its way (8 bytes, which both sides count) and the SHA-256 of the body as it is sent: no process without it
can join, pose as rank 0, or send again what was said on another connection, in another round, or by the other side; and
none on the way can leave out, repeat or reorder frames. Without a secret they are zeros. Nothing is encrypted.

The body is a JSON object: the kind of the message, and its fields. A message is a frozen dataclass, whose fields say
what they accept; `decode` takes nothing else. An empty body is a heartbeat.
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
    """The connecting process does not speak this protocol; the text reads well after "the peer"."""


# Messages


def of(check: Check, **more: Any) -> Any:
    """A field of a message: what is received is what `check` returns; it raises for what the field cannot be."""
    return field(metadata={"check": check}, **more)


def valid(holds: Check, what: str) -> Check:
    """What this holds for; else it is not a valid `what`."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(what)
        return value

    return check


def integer(least: int = 0, most: int = _LARGEST - 1, what: str = "number") -> Check:
    """From `least` to `most`."""
    return valid(lambda value: type(value) is int and least <= value <= most, what)


def text(most: int) -> Check:
    """At most so many characters."""
    return valid(
        lambda value: isinstance(value, str) and len(value) <= most,
        f"text of at most {most} characters",
    )


def both(first: Check, second: Check) -> Check:
    """What the second check makes of what the first one has let pass."""
    return lambda value: second(first(value))


number = integer()
flag = valid(lambda value: type(value) is bool, "truth value")
_seconds = valid(
    lambda value: type(value) in (int, float) and 0 <= value < _LARGEST, "number of seconds"
)
time_or_duration = both(_seconds, float)


def optional(check: Check) -> Check:
    """Or None."""
    return lambda value: None if value is None else check(value)


def several(check: Check, most: int = _LARGEST, least: int = 0, what: str = "list") -> Check:
    """So many items."""
    is_list = valid(
        lambda value: isinstance(value, list | tuple) and least <= len(value) <= most, what
    )
    return lambda value: tuple(map(check, is_list(value)))


def table(most: int, check: Check) -> Check:
    """Of names and values."""
    name, is_table = (
        text(1000),
        valid(lambda value: isinstance(value, Mapping) and len(value) <= most, "table"),
    )
    return lambda value: {name(key): check(item) for key, item in is_table(value).items()}


def nested(kind: type) -> Check:
    """A field that is a dataclass itself, whose fields are as those of a message."""
    return lambda value: value if isinstance(value, kind) else _made(kind, value)


@cache
def _checks(kind: Any) -> dict[str, Check]:
    return {each.name: each.metadata["check"] for each in fields(kind)}


def _made(kind: type, content: Any) -> object:
    """`ValueError`: what it is not, and the names of the fields, from the outermost in."""
    checks, found = _checks(kind), {}
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
    """The body of a frame with this message; a heartbeat, which is None, has an empty one: it is the shortest frame."""
    if content is None:
        return b""
    named = {"kind": type(content).__name__, **_fields_of(content)}
    return json.dumps(named, default=_fields_of, separators=(",", ":")).encode()


def _fields_of(content: Any) -> dict[str, object]:
    return {name: getattr(content, name) for name in content.__slots__}


def decode(body: bytes, *kinds: type) -> Any:
    """The message in a body, which must be one of these kinds; `ProtocolError`: it is something else."""
    if not body and type(None) in kinds:
        return None
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise ProtocolError("sends no JSON") from None
    name = content.pop("kind", None) if isinstance(content, dict) else None
    kind = next((each for each in kinds if each.__name__ == name and each is not type(None)), None)
    if kind is None:
        raise ProtocolError(
            f"does not send the expected {' or '.join(each.__name__ for each in kinds)}"
        )
    try:
        return _made(kind, content)
    except ValueError as error:
        what, *where = error.args
        why = f"{'.'.join(where)} is not a valid {what}" if where else what
        raise ProtocolError(f"sends a broken {name}: {why}") from None


# Frames


class Frame(NamedTuple):
    """A frame as it was received."""

    compressed: bool
    round: int
    rank: int
    mac: bytes
    body: bytes


def announced_length(data: bytes | bytearray) -> int:
    """Bytes of the body of a frame that begins so."""
    return int.from_bytes(data[:4], "big") & ~_COMPRESSED


class Frames:
    """Takes bytes as they come, and gives whole frames; `most` bytes are what a body may have, also once inflated."""

    def __init__(self, most: int = BEFORE_AUTHENTICATION) -> None:
        self.most = most
        self._buffer = bytearray()

    @property
    def pending(self) -> bytes:
        """What was received of a frame that is not whole, or not a frame."""
        return bytes(self._buffer)

    @property
    def missing(self) -> int:
        """Bytes that the frame in hand still needs, as far as is known: the header comes first."""
        have = len(self._buffer)
        return HEADER - have if have < HEADER else HEADER + self._length() - have

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes; `ProtocolError`: it is not a frame of ours, or too long."""
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
    us: str = "rank 0"  # the side that this is, as a refusal names it
    challenge: str = ""  # of rank 0, random for this connection
    nonce: str = ""  # of the other side, likewise
    round: int = 0  # of the job
    counts: Counts = field(default_factory=Counts, repr=False, compare=False)

    def sign(self, content: object, rank: int = 0) -> bytes:
        """A frame with a message from or for a rank."""
        return Broadcast(content).sign(self, rank)

    def verify(self, frame: Frame, frames: Frames, *kinds: type) -> Any:
        """The message in a frame of `frames`; `ProtocolError`: it is another one, or its sender lacks the secret."""
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
            raise ProtocolError(_ALTERED if self.counts.received else "has another DISTBOOT_SECRET")
        self.counts.received += 1
        return decode(frames.inflated(frame), *kinds)

    def mac(self, digest: bytes, rank: int, number: int, *, theirs: bool = False) -> bytes:
        """What proves that we, or they, know the secret, and have sent a body with this digest for the rank."""
        if not self.secret:
            return _UNPROVED
        # Else what we have sent could come back as theirs
        is_of_rank_0 = (self.us == "rank 0") is not theirs
        about = f"{self.challenge}/{self.nonce}/{self.round}/{rank}/{is_of_rank_0}/"
        signed = about.encode() + number.to_bytes(8, "big") + digest
        return hmac.digest(self.secret.encode(errors="surrogateescape"), signed, "sha256")


class Broadcast:
    """A message for many connections: what does not differ is done once. The membership of a large job is long."""

    def __init__(self, content: object) -> None:
        body, flag_of_length = encode(content), 0
        if len(body) >= _COMPRESSED_FROM:
            import zlib  # which a small job does not need

            body, flag_of_length = zlib.compress(body, 1), _COMPRESSED
        self._length, self._body, self._digest = (
            flag_of_length | len(body),
            body,
            hashlib.sha256(body).digest(),
        )

    @property
    def size(self) -> int:
        """Bytes of one frame."""
        return HEADER + len(self._body)

    def sign(self, channel: Channel, rank: int = 0) -> bytes:
        """The next frame for one of them."""
        mac = channel.mac(self._digest, rank, channel.counts.sent)
        channel.counts.sent += 1
        return _HEADER.pack(self._length, channel.round, rank, mac) + self._body


HEARTBEAT = Broadcast(None)


def random_nonce() -> str:
    """32 hex digits that were never used before."""
    return os.urandom(16).hex()


def most_from_rank_0(world_size: int) -> int:
    """Bytes of one body, once rank 0 is authenticated: each rank may have a host of its own, and publish something."""
    return min(BEFORE_AUTHENTICATION + 1024 * world_size, MOST)
