"""What is at the port of rank 0, or connects to it, and is not distboot: it is named, with a remedy. Real programs."""

import http.client
import http.server
import shutil
import socket
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from conftest import ROOT, Fake, Run, StartRank0
from launched import needs_torch
from rendezvous_peers import Rank, peer, record, refusal

from distboot.rendezvous import foreign, worker
from distboot.rendezvous.messages import Welcome
from distboot.rendezvous.protocol import Channel

LISTENS = "the process that listens there"
MESH = 'sidecar.istio.io/inject: "false"'
OTHER_PORT = "set MASTER_PORT to a port that is free"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Servers of a test, which end with it."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A file with a key and a certificate that this host has made itself."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    pem = tmp_path / "host.pem"
    words = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
    public = tmp_path / "certificate.pem"
    command = ["openssl", *words.split(), "-keyout", str(pem), "-out", str(public)]
    subprocess.run(command, check=True, capture_output=True)
    pem.write_text(pem.read_text() + public.read_text())
    return pem


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Answers with a list of files, and writes no log."""

    def log_message(self, *_: object) -> None:
        """Nothing."""


def serve_http(stack: ExitStack, kind: type[http.server.HTTPServer]) -> int:
    server = kind(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    return server.server_port


def failure(port: int, limit: float = 0.6) -> tuple[str, str]:
    """What rank 1 says of a port where rank 0 should be, and its hint."""
    error = Rank(port, record(1, 2), limit).failed()
    assert error.code == "missing-rank"
    assert error.message.isprintable()
    return error.message, error.hint


@pytest.mark.parametrize("kind", [http.server.HTTPServer, http.server.ThreadingHTTPServer])
def test_web_server_is_named(stack: ExitStack, kind: type[http.server.HTTPServer]) -> None:
    message, hint = failure(serve_http(stack, kind))
    # On a busy machine the first answer is the one to a question that is not in HTTP
    lines = [
        f"{LISTENS} answers in HTTP ('{line}')" for line in ("HTTP/1.0 200 OK", "<!DOCTYPE HTML>")
    ]
    assert any(line in message for line in lines), message
    assert MESH in hint
    assert OTHER_PORT in hint


def test_tls_server_is_named(fake: Fake, certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def talk(connection: socket.socket) -> None:
        with suppress(ssl.SSLError):
            context.wrap_socket(connection, server_side=True)

    message, hint = failure(fake(talk).port)
    assert f"{LISTENS} answers in TLS" in message
    assert MESH in hint


@needs_torch
@pytest.mark.parametrize("use_libuv", [True, False])
def test_store_of_torch_is_named(use_libuv: bool) -> None:
    from torch.distributed import TCPStore

    store = TCPStore(
        "127.0.0.1",
        0,
        2,
        True,
        wait_for_workers=False,
        use_libuv=use_libuv,
    )
    message, hint = failure(store.port)
    assert f"{LISTENS} is torch's store (TCPStore)" in message
    assert "start all ranks with distboot, or none of them" in hint


# What Envoy answers to bytes that are not HTTP, and the header of Istio's sidecar
ENVOY = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 11\r\nserver: istio-envoy\r\n\r\nBad Request"
# A server of HTTP/2 begins with its settings; then the client's bytes are not HTTP/2
GRPC = b"\0\0\x12\x04\0\0\0\0\0" + bytes(18) + b"\0\0\x08\x07\0\0\0\0\0" + bytes(8)


@pytest.mark.parametrize(
    ("said", "name", "remedy"),
    [
        (ENVOY, "is Envoy, the proxy of a service mesh ('HTTP/1.1 400 Bad Request')", MESH),
        (GRPC, "answers in HTTP/2, as a gRPC server does", "start rank 0 with distboot, too"),
        (
            b"SSH-2.0-OpenSSH_9.2p1\r\n",
            "is an SSH server ('SSH-2.0-OpenSSH_9.2p1')",
            "such as 29500",
        ),
        (b"-ERR unknown command\r\n", "answers with a text ('-ERR unknown command')", OTHER_PORT),
        (b"\xff" * 64, "does not use distboot's protocol: it begins with ff ff ff ff", OTHER_PORT),
        (b"", "closes the connection at once", "look at the output of rank 0, which may have"),
    ],
    ids=["envoy", "grpc", "ssh", "text", "bytes", "closes"],
)
def test_first_bytes_of_server_name_it(said: bytes, name: str, remedy: str, fake: Fake) -> None:
    message, hint = failure(fake(lambda connection: connection.sendall(said)).port)
    assert f"{LISTENS} {name}" in message
    assert remedy in hint


def test_silent_listener_is_no_secret_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        message, hint = failure(listener.getsockname()[1])
    assert "a process listens there, and does not answer as rank 0" in message
    assert hint.startswith("look at the output of rank 0, which may be stopped or busy")
    assert MESH in hint


def test_silent_web_server_is_named_while_waiting(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "_ASKED_AFTER", 0.4)
    monkeypatch.setattr(worker, "_FIRST_LIMIT", 0.3)
    rank = Rank(serve_http(stack, http.server.ThreadingHTTPServer), record(1, 2), 4)
    error = rank.failed()
    assert "yet (the process that listens there answers in HTTP" in capfd.readouterr().err
    assert f"{LISTENS} answers in HTTP" in error.message


def test_closing_listener_is_asked_once(fake: Fake) -> None:
    asked: list[bytes] = []

    def talk(connection: socket.socket) -> None:
        connection.settimeout(0.2)
        with suppress(TimeoutError):
            asked.append(connection.recv(4))

    failure(fake(talk).port, 2.5)
    assert asked.count(b"GET ") == 1
    assert len(asked) > 4, "it was tried again"


def test_frame_of_rank_0_is_not_foreign() -> None:
    for secret in ("", "secret"):
        frame = Channel(secret).sign(Welcome("0" * 32))
        for length in range(len(frame)):
            assert foreign.identify(foreign.SERVERS, frame[:length]) is None
            assert foreign.identify(foreign.CLIENTS, frame[:length]) is None


def test_job_names_a_web_server(run: Run, stack: ExitStack) -> None:
    port = serve_http(stack, http.server.ThreadingHTTPServer)
    numbers = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    script = "import distboot; distboot.init('none')"
    done = run("python", "-c", script, env={**numbers, "DISTBOOT_JOIN_TIMEOUT": "2"})
    assert f"{LISTENS} answers in HTTP" in done.stderr
    assert "DISTBOOT_SECRET" not in done.stderr
    assert done.returncode == 75


def test_page_of_meshes_has_every_name() -> None:
    page = (ROOT / "docs" / "how-to" / "service-meshes.md").read_text()
    names = [row.description for row in foreign.SERVERS]
    names += [foreign.TORCH_STORE.description, foreign.CLOSES.description]
    assert [name for name in names if f"| `{name}` |" not in page] == []


# -- What connects to rank 0


def _web_client(port: int) -> None:
    urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)


def _tls_client(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), 5) as plain:
        ssl.create_default_context().wrap_socket(plain, server_hostname="localhost")


def _ssh_client(port: int) -> None:
    words = f"ssh -p {port} -o BatchMode=yes -o ConnectTimeout=5 -F /dev/null 127.0.0.1".split()
    if shutil.which("ssh") is None:
        pytest.skip("needs ssh")
    assert subprocess.run(words, capture_output=True, timeout=20, check=False).returncode


@pytest.mark.parametrize(
    ("connect", "name"),
    [
        (_web_client, "sends HTTP ('GET')"),
        (_tls_client, "begins with TLS"),
        (_ssh_client, "is an SSH client ('SSH-2.0-"),
    ],
    ids=["http", "tls", "ssh"],
)
def test_client_of_rank_0_is_named(
    connect: Callable[[int], None],
    name: str,
    rank0: StartRank0,
    capfd: pytest.CaptureFixture[str],
) -> None:
    first = rank0(2)
    with suppress(OSError, http.client.HTTPException):
        connect(first.port)
    Rank(first.port, record(1, 2)).met()
    assert f"the connecting process {name}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("said", "name"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "sends HTTP/2, as a gRPC client does"),
        (b"PROXY TCP4 10.0.0.1 10.0.0.2 4711 29500\r\n", "begins with the PROXY protocol"),
        (b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c", "begins with the PROXY protocol"),
        (b"\xff" * 64, "does not use distboot's protocol: it begins with ff ff ff ff"),
    ],
    ids=["grpc", "proxy", "proxy-2", "bytes"],
)
def test_first_bytes_of_client_name_it(said: bytes, name: str, rank0: StartRank0) -> None:
    first = rank0(2)
    assert name in refusal(peer(first.port, said))
    Rank(first.port, record(1, 2)).met()


def test_missing_rank_behind_a_proxy_gets_the_remedy(rank0: StartRank0) -> None:
    first = rank0(2, 1.0)
    refusal(peer(first.port, b"PROXY TCP4 10.0.0.1 10.0.0.2 4711 29500\r\n"))
    error = first.failed()
    assert "1 refused: the connecting process begins with the PROXY protocol" in error.message
    assert error.hint.startswith("switch the PROXY protocol off for the port of rank 0; or look at")


def test_missing_rank_keeps_its_hint_beside_health_check(rank0: StartRank0) -> None:
    first = rank0(2, 1.0)
    refusal(peer(first.port, b"GET /healthz HTTP/1.1\r\n\r\n"))
    error = first.failed()
    assert "1 refused: the connecting process sends HTTP ('GET')" in error.message
    assert error.hint.startswith("look at the output of the missing ranks")
