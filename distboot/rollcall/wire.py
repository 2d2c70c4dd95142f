"""The frames of the roll call on the wire, and their authentication. Nothing here blocks or knows what is said."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from dataclasses import dataclass, field
from functools import cached_property

VERSION = 1
ONE_DISTBOOT = "install the same version of distboot on all nodes"  # what to do about another VERSION
MOST_FROM_A_RANK = 64 * 1024  # bytes of one frame
_LENGTH = 4  # bytes
_COMPRESSED = 1 << 31  # in the length of a frame: that its body is, with zlib
_COMPRESSED_FROM = 4 * 1024  # bytes: rosters of some hundred nodes, of which rank 0 sends one to each
_TORCH_STORE = b"\x00\xce\xf7\x85"  # how a client of torch's TCPStore begins: VALIDATE, and a magic number


def most_from_rank_0(world_size: int) -> int:
    """Bytes of one frame, not compressed: each rank may have a host of its own, with a long name, and offer something.

    Whoever answers in the place of rank 0 is read so far before the secret is asked for.
    """
    return MOST_FROM_A_RANK + 1024 * world_size


@dataclass(frozen=True, slots=True)
class Membership:
    """What tells the ranks of one job from everybody else.

    Attributes:
        job: digest of the job id and MASTER_PORT.
        secret: what all ranks of the job know; empty when there is none.
    """

    job: str = ""
    secret: str = field(default="", repr=False)


class WireError(Exception):
    """The peer does not speak this protocol; the text says why, and reads well after "the peer"."""


def frame(message: dict[str, object]) -> bytes:
    """A message as it goes over the wire."""
    return framed(json.dumps(message, separators=(",", ":")))


def framed(text: str) -> bytes:
    """A text that is a JSON object, as it goes over the wire."""
    return _Beginning(text).ended("")


class _Beginning:
    """The beginning of frames that differ in their ends only: it is compressed once, if they are long."""

    def __init__(self, text: str) -> None:
        self._body = text.encode()
        self._compressing = None
        if len(self._body) >= _COMPRESSED_FROM:
            import zlib  # which a small job does not need

            self._compressing = zlib.compressobj(1)
            self._body = self._compressing.compress(self._body)

    def ended(self, text: str) -> bytes:
        """A whole frame."""
        if self._compressing is None:
            body, flag = self._body + text.encode(), 0
        else:
            rest = self._compressing.copy()
            body, flag = self._body + rest.compress(text.encode()) + rest.flush(), _COMPRESSED
        return (len(body) | flag).to_bytes(_LENGTH, "big") + body


class Frames:
    """Takes bytes as they come, and gives whole messages.

    Args:
        most: bytes that one frame may have; what announces more is not read.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._buffer = bytearray()

    @property
    def missing(self) -> int:
        """Bytes that the message in hand still needs, as far as is known: the length comes first."""
        have = len(self._buffer)
        return _LENGTH - have if have < _LENGTH else _LENGTH + self._length() - have

    def feed(self, data: bytes) -> list[dict[str, object]]:
        """The messages that `data` completes.

        Raises:
            WireError: it is no frame of ours, or too long.
        """
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH:
            if self._buffer.startswith(_TORCH_STORE):
                raise WireError("looks for torch's store: it runs without distboot, or with DISTBOOT_ROLL_CALL=0")
            length = self._length()
            if length > self._most:
                raise WireError(f"announces a message of {length} bytes, of at most {self._most}")
            if len(self._buffer) < _LENGTH + length:
                break
            body = bytes(self._buffer[_LENGTH : _LENGTH + length])
            messages.append(_message(_inflated(body, self._most) if self._buffer[0] & 0x80 else body))
            del self._buffer[: _LENGTH + length]
        return messages

    def _length(self) -> int:
        return int.from_bytes(self._buffer[:_LENGTH], "big") & ~_COMPRESSED


def _inflated(body: bytes, most: int) -> bytes:
    import zlib

    inflating = zlib.decompressobj()
    try:
        text = inflating.decompress(body, most)
    except zlib.error:
        raise WireError("sends what cannot be decompressed") from None
    if inflating.unconsumed_tail or not inflating.eof:
        raise WireError(f"sends a message of more than {most} bytes, or half of one")
    return text


def _message(body: bytes) -> dict[str, object]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        raise WireError("sends no JSON") from None
    if not isinstance(message, dict):
        raise WireError("sends no JSON object")
    return message


def fresh() -> str:
    """32 hex digits that were never used before."""
    return os.urandom(16).hex()


def canonical(content: object) -> str:
    """The one text of a JSON value that both sides authenticate."""
    return json.dumps(content, separators=(",", ":"), sort_keys=True)


@dataclass(frozen=True, slots=True)
class Session:
    """What a message on one connection is sealed with.

    Attributes:
        secret: of the job; empty when there is none, and then nothing is proved.
        us: the side that this is, as a refusal names it.
        challenge: of rank 0, fresh for this connection.
        nonce: of the rank, fresh for this connection.
    """

    secret: str = field(default="", repr=False)
    us: str = "rank 0"
    challenge: str = ""
    nonce: str = ""

    def sealed(self, kind: str, text: str) -> bytes:
        """A frame with a message of this kind, whose content is a canonical text."""
        return Announcement(kind, text).sealed(self)

    def opened(self, message: dict[str, object], *kinds: str) -> tuple[str, object]:
        """Kind and content of a message, which must be one of these kinds.

        Raises:
            WireError: it is none, or was not sent by somebody who knows the secret.
        """
        kind = next((kind for kind in kinds if kind in message), None)
        if kind is None:
            raise WireError(f"does not send {' or '.join(kinds)} where that is due")
        content, mac = message[kind], message.get("mac")
        if not isinstance(mac, str) or len(mac) > 64:
            raise WireError("sends no mac")
        if bool(mac) != bool(self.secret):
            raise WireError(f"has a DISTBOOT_SECRET, and {self.us} has none" if mac else "has no DISTBOOT_SECRET")
        expected = self.mac(kind, _digest(canonical(content))) if self.secret else ""
        if not hmac.compare_digest(mac.encode(errors="replace"), expected.encode()):
            raise WireError("has another DISTBOOT_SECRET")
        return kind, content

    def mac(self, kind: str, digest: str) -> str:
        """What proves that we know the secret, if there is one, and have sent a content with this digest."""
        if not self.secret:
            return ""
        # With the kind, so that an answer does not pass for a report.
        text = canonical([self.challenge, self.nonce, kind, digest])
        return hmac.new(self.secret.encode(errors="surrogateescape"), text.encode(), hashlib.sha256).hexdigest()


class Announcement:
    """A message for many, each of whom has a session: what does not differ is done once. Rosters are long.

    Args:
        kind: of the message.
        text: its content, canonical.
    """

    def __init__(self, kind: str, text: str) -> None:
        self._kind, self._text = kind, text
        self._beginning = _Beginning(f'{{"{kind}":{text},"mac":"')
        self._unproved: bytes | None = None  # as all get it that have no secret

    @cached_property
    def _digest(self) -> str:
        return _digest(self._text)

    def sealed(self, session: Session) -> bytes:
        """The frame for one of them."""
        if session.secret:
            return self._beginning.ended(f'{session.mac(self._kind, self._digest)}"}}')
        if self._unproved is None:
            self._unproved = self._beginning.ended('"}')
        return self._unproved


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
