"""Notices that this machine will be taken away: Azure's scheduled events, and AWS's for spot.

A machine reads them from its metadata service, over plain HTTP at a link-local address. A thread
asks every few seconds, and nothing waits for it. A whole answer may take 2 seconds and have 64 kB;
no redirect is followed, and no proxy is used. An answer that is not as documented is a failure:
after three of them in a row one line warns.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..base.errors import DistbootError, in_one_line
from ..base.threads import start_without_signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading

_TIMEOUT = 2.0  # seconds for one answer, from the connection to its last byte
_MOST = 1 << 16  # bytes of it
_TOKEN = re.compile("[!-~]{1,1000}")
_WARN_AT = 3  # failures in a row: Azure's first answer may take longer than the timeout
_TOKEN_SECONDS = 21600  # the most that AWS allows

# learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
# Not Freeze, which is a pause of a few seconds
_AZURE_EVENTS = ("Preempt", "Terminate", "Reboot", "Redeploy")
# docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
_AWS_ACTIONS = ("terminate", "stop", "hibernate")


class MetadataService:
    """The metadata service of this machine, at a host and port."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._host = host  # an IPv6 address is in brackets
        self._port = int(port)
        self.known: dict[str, str] = {}  # what a provider has learned, by name

    def get(self, path: str, headers: Mapping[str, str]) -> str:
        """The body of an answer; raises `ValueError` for another status than 200."""
        status, body = self.ask("GET", path, headers)
        if status != http.client.OK:
            raise ValueError(f"status {status}")
        return body

    def ask(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        """The status and the body of an answer."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if method == "PUT":
            lines.append("Content-Length: 0")
        request = "\r\n".join([*lines, "", ""]).encode("ascii")
        end = time.monotonic() + _TIMEOUT
        host = self._host.strip("[]")
        with socket.create_connection((host, self._port), _TIMEOUT) as connection:
            connection.sendall(request)
            received = _receive(connection, end)
        source: Any = _Received(received)
        answer = http.client.HTTPResponse(source, method=method)
        answer.begin()
        return answer.status, answer.read().decode()


class _Received:
    """What has been received, as `HTTPResponse` reads it from a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def _receive(connection: socket.socket, end: float) -> bytes:
    """What the service sends until it closes the connection or the time ends.

    Some services do not close it: at the end of the time the answer is usually complete.
    """
    data = b""
    while len(data) <= _MOST:
        connection.settimeout(max(end - time.monotonic(), 0.001))
        try:
            more = connection.recv(_MOST)
        except TimeoutError:
            if not data:
                raise
            return data
        if not more:
            return data
        data += more
    raise ValueError(f"the answer has more than {_MOST >> 10} kB")


def azure_notice(service: MetadataService) -> str | None:
    """The scheduled event that ends this machine; None if there is none.

    {"DocumentIncarnation": 2, "Events": [{"EventId": "602d9444-…", "EventStatus": "Scheduled",
    "EventType": "Preempt", "ResourceType": "VirtualMachine", "Resources": ["vmss_3"],
    "NotBefore": "Mon, 19 Sep 2022 18:29:47 GMT"}]}
    """
    headers = {"Metadata": "true"}
    # All machines of a scale set get the events of each other
    if "name" not in service.known:
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        service.known["name"] = service.get(path, headers)
    names = {service.known["name"].lower(), os.uname().nodename.lower()}
    text = service.get("/metadata/scheduledevents?api-version=2020-07-01", headers)
    events = _record(text).get("Events")
    if not isinstance(events, list):
        raise ValueError("the answer has no list of events")  # noqa: TRY004 - what the service sent
    for event in events:
        if _is_for(event, names):
            return f"Azure scheduled event {event['EventType']}"
    return None


def _is_for(event: object, names: set[str]) -> bool:
    """Whether an event of Azure ends one of these machines."""
    if not isinstance(event, dict):
        return False
    if event.get("EventType") not in _AZURE_EVENTS:
        return False
    resources = event.get("Resources")
    if not isinstance(resources, list):
        return False
    # Azure's cloud services put an underscore before the name
    ended = {str(resource).lower().removeprefix("_") for resource in resources}
    return not names.isdisjoint(ended)


def aws_notice(service: MetadataService) -> str | None:
    """What AWS will do to this spot instance; None for the status 404, which is nothing.

    {"action": "terminate", "time": "2017-09-18T08:22:00Z"}
    """
    headers = _aws_headers(service)
    status, body = service.ask("GET", "/latest/meta-data/spot/instance-action", headers)
    if status == http.client.NOT_FOUND:
        return None
    if status != http.client.OK:
        service.known.clear()  # the token has expired
        raise ValueError(f"status {status}")
    action = _record(body).get("action")
    if action not in _AWS_ACTIONS:
        raise ValueError("the answer names no known action")
    return f"AWS spot notice {action}"


def _aws_headers(service: MetadataService) -> Mapping[str, str]:
    """The token that version 2 of the service needs; none if the service gives none."""
    if "token" not in service.known:
        service.known["token"] = _aws_token(service)
    token = service.known["token"]
    if not token:
        return {}
    return {"X-aws-ec2-metadata-token": token}


def _aws_token(service: MetadataService) -> str:
    """Ask for a token; "" from version 1, and where the answer does not reach a container.

    By default the answer travels one hop only, which ends at the container's host.
    """
    seconds = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
    try:
        status, token = service.ask("PUT", "/latest/api/token", seconds)
    except TimeoutError:
        return ""
    if status != http.client.OK:
        return ""
    if not _TOKEN.fullmatch(token):
        return ""
    return token


def _record(text: str) -> Mapping[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("the answer is not a JSON object")  # noqa: TRY004 - as above
    return found


class Provider(NamedTuple):
    """A cloud with a metadata service."""

    notice: Callable[[MetadataService], str | None]
    interval: float  # seconds between two requests, as the provider recommends


PROVIDERS: Mapping[str, Provider] = {
    "aws": Provider(aws_notice, 5.0),
    "azure": Provider(azure_notice, 1.0),
}


def watch(
    name: str,
    address: str,
    ask: Callable[[str], object],
    warn: Callable[[str], object],
    over: threading.Event,
) -> None:
    """Start a thread that calls `ask` with the first notice, and ends when `over` is set.

    `warn` gets a line if the service cannot be read.
    """
    provider = PROVIDERS[name]
    service = MetadataService(address)

    def watch_service() -> None:
        failures = 0
        while not over.is_set():
            try:
                found = provider.notice(service)
                failures = 0
            except Exception as error:  # noqa: BLE001 - training goes on
                found = None
                failures += 1
                if failures == _WARN_AT:
                    warn(_warning(name, address, error, provider.interval))
            if found is not None:
                ask(found)
                return
            over.wait(provider.interval)

    try:
        start_without_signals("distboot-notices", watch_service)
    except DistbootError as error:
        problem = f"no notice will stop this job: {in_one_line(error)}"
        warn(f"warning: DISTBOOT_STOP_NOTICE={name}: {problem}")


def _warning(name: str, address: str, error: Exception, interval: float) -> str:
    problem = f"no notice can be read from the metadata service at {address}: {_problem(error)}"
    next_step = f"the job continues, and asks again every {interval:g} s"
    return f"warning: DISTBOOT_STOP_NOTICE={name}: {problem}; {next_step}"


def _problem(error: Exception) -> str:
    """Why an answer is a failure, without its bytes."""
    match error:
        case TimeoutError():
            return f"no answer within {_TIMEOUT:g} s"
        case OSError():
            return error.strerror or type(error).__name__
        case http.client.HTTPException():
            return "the answer is not complete HTTP"
        case json.JSONDecodeError() | UnicodeDecodeError() | RecursionError():
            return "the answer is not valid JSON"
        case ValueError():
            return str(error)
    return type(error).__name__
