"""What a process is that is not distboot, by the first bytes that it sends.

A rank that finds another program at the port of rank 0 gets a name for it and a remedy, and so does
rank 0 for what connects to it. Each table is tried in order. Most servers wait for the client, and
some of them close the connection when its bytes are not in their protocol; then nothing is there to
read. So `probe` sends them a beginning that they know.
"""

from __future__ import annotations

import re
import socket
from typing import Any, NamedTuple, TypeAlias

from ..base.text import short_repr
from .protocol import MOST, announced_length

Address: TypeAlias = tuple[int, Any]  # family, and where it is in that
_MOST = 2048  # bytes that are read for a name
_PROBE_LIMIT = 0.4  # seconds for each probe

_INJECTION = (
    'in the pods of this job, set the label sidecar.istio.io/inject: "false" (Istio) or the '
    "annotation linkerd.io/inject: disabled (Linkerd)"
)
_MESH = f"if it is a service mesh: {_INJECTION}"
_OTHER_PORT = (
    "if it is another program: set MASTER_PORT to a port that is free on the host of rank 0, "
    "for all processes"
)
_STORE = (
    "start all ranks with distboot, or none of them; if it is the store of torchrun or of another "
    "job: set MASTER_PORT to another port for all processes"
)


class Foreign(NamedTuple):
    """A process that uses another protocol."""

    # Reads well after "the process that listens there" or "the connecting process"
    description: str
    remedy: str  # empty: it does not matter to the job
    # Whether an earlier answer tells more: all that is known is that it does not answer
    is_vague: bool = False


class _Row(NamedTuple):
    first_bytes: bytes  # a regular expression; its group is quoted
    description: str
    remedy: str


# What answers at the port of rank 0
SERVERS = (
    # "HTTP/1.1 400 Bad Request\r\nserver: envoy\r\n"; a sidecar of Istio has istio-envoy there
    _Row(
        rb"(?i)(HTTP/\d[^\r\n]*)\r\n.*server: (?:istio-)?envoy",
        "is Envoy, the proxy of a service mesh",
        _INJECTION,
    ),
    # A busy one may first answer what is not HTTP: with a page, and no line of HTTP before that
    _Row(
        rb"(?i)(HTTP/\d[^\r\n]*|<!DOCTYPE HTML[^\r\n]*)",
        "answers in HTTP",
        f"{_OTHER_PORT}; {_MESH}",
    ),
    # RFC 9113, 3.4: a server begins with SETTINGS, a frame of type 4 on stream 0
    _Row(
        rb"\0\0.\x04\0\0\0\0\0",
        "answers in HTTP/2, as a gRPC server does",
        f"if it is JAX or TensorFlow: start rank 0 with distboot, too; {_OTHER_PORT}",
    ),
    # RFC 8446, 5.1: an alert or a handshake, and the version of the record
    _Row(rb"[\x15\x16]\x03[\0-\4]", "answers in TLS", f"{_OTHER_PORT}; {_MESH}"),
    # RFC 4253, 4.2
    _Row(
        rb"(SSH-[^\r\n]*)",
        "is an SSH server",
        "MASTER_PORT is the port of SSH: set it to a free one, such as 29500, for all processes",
    ),
    _Row(rb"([ -~]{4,}[^\r\n]*)", "answers with a text", _OTHER_PORT),
)

# What connects to rank 0
CLIENTS = (
    # VALIDATE, and a magic number: torch/csrc/distributed/c10d/TCPStore.cpp
    _Row(
        rb"\0\xce\xf7\x85",
        "looks for torch's store: it runs without distboot, or with DISTBOOT_RENDEZVOUS=0",
        "start all ranks with distboot, or none of them",
    ),
    # RFC 9113, 3.4: the preface of a client
    _Row(rb"PRI \* HTTP/2", "sends HTTP/2, as a gRPC client does", ""),
    _Row(rb"((?:GET|HEAD|POST|PUT|DELETE|OPTIONS|PATCH|CONNECT|TRACE)) ", "sends HTTP", ""),
    _Row(
        rb"\x16\x03[\0-\4]",
        "begins with TLS",
        f"a proxy may encrypt what the ranks send: {_MESH}",
    ),
    # haproxy's proxy-protocol.txt: version 1, and version 2
    _Row(
        rb"PROXY |\r\n\r\n\0\r\nQUIT\n",
        "begins with the PROXY protocol of a load balancer",
        "switch the PROXY protocol off for the port of rank 0",
    ),
    _Row(rb"(SSH-[^\r\n]*)", "is an SSH client", ""),
)

# TLS 1.2, a ClientHello with one cipher: an alert is an answer, too
_CLIENT_HELLO = (
    b"\x16\x03\x01\0\x2d\x01\0\0\x29\x03\x03" + bytes(range(32)) + b"\0\0\x02\0\x2f\x01\0"
)
_NONCE = b"dist"  # torch's store sends it back
_PING_STORE = b"\0\xce\xf7\x85\x3c\x0d" + _NONCE  # VALIDATE, its magic number, PING
_PROBES = (b"GET / HTTP/1.0\r\n\r\n", _PING_STORE, _CLIENT_HELLO)

TORCH_STORE = Foreign("is torch's store (TCPStore)", _STORE)
CLOSES = Foreign(
    "closes the connection at once",
    f"look at the output of rank 0, which may have ended; {_MESH}; {_OTHER_PORT}",
    is_vague=True,
)
SILENT = (  # the remedy for what accepts connections and answers nothing
    f"look at the output of rank 0, which may be stopped or busy; {_MESH}; {_OTHER_PORT}"
)


def identify(table: tuple[_Row, ...], received: bytes) -> Foreign | None:
    """What has sent these bytes, by `SERVERS` or `CLIENTS`; None: it may be a rank."""
    for row in table:
        match = re.match(row.first_bytes, received, re.DOTALL)
        if match is not None:
            description = row.description + _quoted(match)
            return Foreign(description, row.remedy)
    if announced_length(received) <= MOST:
        return None
    begins = received[:8].hex(" ")
    return Foreign(f"does not use distboot's protocol: it begins with {begins}", _OTHER_PORT)


def probe(address: Address) -> Foreign | None:
    """Ask what listens at an address, in protocols whose servers wait for the client."""
    for question in _PROBES:
        answer = _ask(address, question)
        if (question, answer) == (_PING_STORE, _NONCE):
            return TORCH_STORE
        found = identify(SERVERS, answer)
        if found is not None:
            return found
    return None


def read_more(connection: socket.socket, received: bytes) -> bytes:
    """These bytes and what follows them within a moment: headers that name the server."""
    connection.settimeout(_PROBE_LIMIT)
    try:
        return received + connection.recv(_MOST)
    except OSError:
        return received


def _quoted(match: re.Match[bytes]) -> str:
    if match.lastindex is None:
        return ""
    text = match.group(1).decode("ascii", "replace")
    return f" ({short_repr(text)})"


def _ask(address: Address, question: bytes) -> bytes:
    """The answer to this within a moment; empty: none."""
    family, where = address
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(_PROBE_LIMIT)
            connection.connect(where)
            connection.sendall(question)
            return connection.recv(_MOST)
    except OSError:
        return b""
