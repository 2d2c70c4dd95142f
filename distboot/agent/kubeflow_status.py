"""Rank 0's agent tells Kubeflow Trainer how far its TrainJob is, and what holds it up.

From version 2.2 on, with the feature TrainJobStatus, the controller sets in each pod a URL, a file
with a token that is replaced from time to time, and one with the certificate of its authority. What
is posted there is `status.trainerStatus` of the TrainJob:
https://github.com/kubeflow/trainer/tree/master/docs/proposals/2779-trainjob-progress

That status has one writer at a time, and each post replaces the one before. A script may post its
progress, too. So this posts only while no script trains, and when something is wrong.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

from ..base.text import cut, short_repr
from ..report.metrics import Metrics
from .state_writer import StateWriter

_TIMEOUT = 5.0  # seconds without an answer
_LONGEST_TOKEN = 65_536  # bytes
_LONGEST = 64  # characters of a name and of a value, as the controller takes them
_LONGEST_ANSWER = 4096  # bytes
_HTTP_OK = 200
_HTTP_TOO_MANY = 429
_HTTP_OF_SERVER = 500  # from there on it is the server's fault


class StatusServer(NamedTuple):
    """Where the status goes, as the controller has set it."""

    url: str
    certificate: str  # file
    token: str  # file


class _BusyError(OSError):
    """The server cannot take the status now."""


# After these the next status is told again
_PASSING = (_BusyError, ConnectionError, TimeoutError, socket.gaierror)


class KubeflowStatus(StateWriter):
    """The status of a TrainJob."""

    between = 5.0  # as the controller asks for
    refresh = 60.0  # a status that was not taken is told again
    last = 2.0

    def __init__(self, server: StatusServer, who: str | None) -> None:
        self._server = server
        self.what = f"the status of the TrainJob at {short_repr(server.url)} was not updated"
        self._before = ""
        super().__init__(who)

    def text(self, metrics: Metrics) -> str:
        state = metrics.in_short()
        rows = [{"name": name, "value": cut(value, _LONGEST)} for name, value in state.items()]
        text = json.dumps(rows)
        if text == self._before or not state:
            return ""
        self._before = text
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return json.dumps({"trainerStatus": {"metrics": rows, "lastUpdatedTime": now}})

    def write(self, text: str) -> None:
        try:
            self._post(text)
        except (ValueError, http.client.HTTPException) as error:
            raise OSError(str(error) or type(error).__name__) from None

    def after_error(self, error: OSError) -> bool:
        self._before = ""  # it is posted again
        return isinstance(error, _PASSING)

    def _post(self, text: str) -> None:
        # Not urllib, which follows redirects with the token, and uses proxies
        address = urlsplit(self._server.url)
        if address.scheme != "https":
            raise OSError("its URL is not one of https")
        with open(self._server.token, encoding="ascii", errors="replace") as file:
            token = file.read(_LONGEST_TOKEN).strip()
        is_word = token.isprintable() and " " not in token
        if not is_word:  # the error of http.client would quote it
            raise OSError("the file of the token has more than one word")
        trusted = ssl.create_default_context(cafile=self._server.certificate)
        connection = http.client.HTTPSConnection(
            str(address.hostname), address.port, timeout=_TIMEOUT, context=trusted
        )
        path = urlunsplit(("", "", address.path, address.query, ""))
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        try:
            connection.request("POST", path, text.encode(), headers)
            answer = connection.getresponse()
            answer.read(_LONGEST_ANSWER)
        finally:
            connection.close()
        why = f"the server answers {answer.status}"
        is_busy = any((answer.status == _HTTP_TOO_MANY, answer.status >= _HTTP_OF_SERVER))
        if is_busy:
            raise _BusyError(why)
        if answer.status != _HTTP_OK:
            raise OSError(why)
