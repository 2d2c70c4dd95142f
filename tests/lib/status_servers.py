"""A stand-in for the server to which Kubeflow Trainer has a TrainJob post its status, as its source has it."""

import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/train/status"
TOKEN = "s3cret-of-a-pod"
_LONGEST = 64  # characters of a name and of a value
_MOST = 256  # metrics
_FIELDS = {"progressPercentage", "estimatedRemainingSeconds", "metrics", "lastUpdatedTime"}


def missing_for_server() -> str | None:
    """Why there can be no such server here; None: there can."""
    return None if shutil.which("openssl") else "openssl is not installed"


class StatusServer:
    """What was posted, and how the server answers."""

    def __init__(self, folder: Path) -> None:
        self.posted: list[dict[str, str]] = []  # the metrics of each post
        self.answer = 200  # 0: it never answers
        self.first_answers: list[int] = []  # before that
        self.headers: dict[str, str] = {}
        self.is_done = threading.Event()
        self.port = 0
        self._folder = folder

    def environ(self, **other: str) -> dict[str, str]:
        """The variables that the controller sets."""
        found = {
            "URL": f"https://127.0.0.1:{self.port}{PATH}",
            "CA_CERT": str(self._folder / "ca.crt"),
            "TOKEN": str(self._folder / "token"),
            **other,
        }
        return {f"KUBEFLOW_TRAINER_SERVER_{name}": value for name, value in found.items()}

    def take(self, path: str, authorization: str, body: bytes) -> int:
        """The answer to a post, with the checks of the controller and of the API server."""
        answer = self.first_answers.pop(0) if self.first_answers else self.answer
        if answer != 200:
            return answer
        if path != PATH:
            return 404
        if authorization != f"Bearer {TOKEN}":
            return 403
        status: dict[str, Any] = json.loads(body)["trainerStatus"]
        metrics = status["metrics"]
        assert status.keys() <= _FIELDS
        assert len(metrics) <= _MOST
        for metric in metrics:
            assert metric.keys() == {"name", "value"}
            assert all(1 <= len(text) <= _LONGEST for text in metric.values())
        self.posted.append({metric["name"]: metric["value"] for metric in metrics})
        return 200


@contextmanager
def status_server(folder: Path) -> Iterator[StatusServer]:
    server = StatusServer(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            code = server.take(self.path, self.headers["Authorization"], body)
            if not code:
                server.is_done.wait(60)
                return
            self.send_response(code)
            for name, value in server.headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    _certify(folder)
    (folder / "token").write_text(f"{TOKEN}\n")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "ca.crt", folder / "key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        http.socket = context.wrap_socket(http.socket, server_side=True)
        server.port = http.server_port
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.is_done.set()
            http.shutdown()
            thread.join()


def _certify(folder: Path) -> None:
    """A certificate for 127.0.0.1, of its own authority."""
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(folder / "key"), "-out", str(folder / "ca.crt")]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc"]
    subprocess.run(
        ["openssl", "req", "-x509", *key, *files, *names, "-days", "1"],
        check=True,
        capture_output=True,
    )
