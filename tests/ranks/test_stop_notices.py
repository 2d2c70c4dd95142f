"""Notices of Azure and AWS, read from a stand-in for the metadata service that may answer anything."""

import json
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from ranks import RunRanks
from supervised import until

from distboot.script import stop_notices
from distboot.script.stop_notices import (
    MetadataService,
    aws_notice,
    azure_notice,
    watch,
)

AWS = "/latest/meta-data/spot/instance-action"
TOKEN = "/latest/api/token"
AZURE = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
Answer = Callable[[Any], None]  # given the socket of the connection


def reply(body: str, status: str = "200 OK", more: str = "") -> Answer:
    data = body.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n{more}\r\n".encode()
    return lambda connection: connection.sendall(head + data)


def events(kind: str, *resources: str) -> Answer:
    event = {"EventId": "602d9444", "EventType": kind, "Resources": resources}
    return reply(json.dumps({"DocumentIncarnation": 2, "Events": [event]}))


def drip(connection: Any) -> None:
    for byte in b"HTTP/1.1 200 OK\r\nX-Slow: " + b"x" * 1000:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def endless(connection: Any) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10485760\r\n\r\n")
    for _ in range(160):
        connection.sendall(b"[" * 65536)


def chunked(connection: Any) -> None:
    body = b'{"action": "stop", "time": "2017-09-18T08:22:00Z"}'
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection.sendall(b"%s%x\r\n%s\r\n0\r\n\r\n" % (head, len(body), body))
    time.sleep(1)  # it does not close the connection


def hang(_: Any) -> None:
    time.sleep(3)


class StandIn:
    """A metadata service that answers each path as it is told; any other one with 404."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.answers = answers
        self.requests: list[str] = []
        stand_in = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                lines = []
                while (line := self.rfile.readline().decode().strip()) != "":
                    lines.append(line)
                stand_in.requests.append("\n".join(lines))
                path = lines[0].split()[1]
                with suppress(OSError):
                    stand_in.answers.get(path, reply("", "404 Not Found"))(self.connection)

        class Server(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6
            daemon_threads = True

        self.server = Server(("", 0), Handler)  # of IPv4, too
        self.port = self.server.server_address[1]
        self.address = f"127.0.0.1:{self.port}"


@contextmanager
def stand_in(**answers: Answer) -> Iterator[StandIn]:
    paths = {"aws": AWS, "token": TOKEN, "azure": AZURE, "name": NAME}
    found = StandIn({paths[name]: answer for name, answer in answers.items()})
    threading.Thread(target=found.server.serve_forever, daemon=True).start()
    try:
        yield found
    finally:
        found.server.shutdown()
        found.server.server_close()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_notices, "_TIMEOUT", 0.5)


def test_notice_of_a_spot_instance_uses_the_token() -> None:
    with stand_in(token=reply("TOKEN=="), aws=reply('{"action": "terminate"}')) as found:
        assert aws_notice(MetadataService(found.address)) == "AWS spot notice terminate"
    put, get = found.requests
    assert put.startswith(f"PUT {TOKEN} HTTP/1.1\n")
    assert "X-aws-ec2-metadata-token: TOKEN==" in get.splitlines()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
@pytest.mark.parametrize("host", ["[::1]", "::1"])
def test_service_has_an_ipv6_address(host: str) -> None:
    with stand_in(token=reply("T"), aws=reply('{"action": "stop"}')) as found:
        service = MetadataService(f"{host}:{found.port}")
        assert aws_notice(service) == "AWS spot notice stop"


@pytest.mark.parametrize(
    "token",
    [reply("", "403 Forbidden"), hang, reply("a\r\nHost: b"), reply("x" * 2000)],
    ids=["refused", "hangs", "injects", "long"],
)
def test_spot_notice_is_read_without_a_token(token: Answer) -> None:
    with stand_in(token=token, aws=chunked) as found:
        assert aws_notice(MetadataService(found.address)) == "AWS spot notice stop"
    assert "token" not in found.requests[-1]


def test_no_notice_is_the_usual_answer() -> None:
    with stand_in(token=reply("TOKEN"), name=reply("vmss_3"), azure=reply('{"Events": []}')) as one:
        service = MetadataService(one.address)
        assert aws_notice(service) is None
        assert azure_notice(service) is None


@pytest.mark.parametrize(
    ("kind", "resource", "expected"),
    [
        ("Preempt", "vmss_3", "Azure scheduled event Preempt"),
        ("Terminate", "_VMSS_3", "Azure scheduled event Terminate"),
        ("Redeploy", "vmss_3", "Azure scheduled event Redeploy"),
        ("Freeze", "vmss_3", None),
        ("Preempt", "vmss_4", None),  # another machine of the scale set
    ],
)
def test_scheduled_event_is_for_this_machine(
    kind: str, resource: str, expected: str | None
) -> None:
    with stand_in(name=reply("vmss_3"), azure=events(kind, "vmss_9", resource)) as found:
        assert azure_notice(MetadataService(found.address)) == expected
    assert all("Metadata: true" in request.splitlines() for request in found.requests)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (hang, "no answer within 0.5 s"),
        (drip, "the answer is not complete HTTP"),
        (endless, "the answer has more than 64 kB"),
        (reply("", "302 Found", "Location: http://127.0.0.1:1/\r\n"), "status 302"),
        (reply("", "500 Oops"), "status 500"),
        (lambda connection: connection.sendall(b"\xff\0" * 99), "the answer is not complete HTTP"),
        (reply("[" * 60000), "the answer is not valid JSON"),
        (reply("{"), "the answer is not valid JSON"),
        (reply("[1]"), "the answer is not a JSON object"),
        (reply('{"Events": 1, "action": "\\u001b[2J"}'), "the answer "),
    ],
    ids=["hang", "drip", "endless", "redirect", "error", "garbage", "deep", "half", "list", "odd"],
)
@pytest.mark.parametrize("provider", ["aws", "azure"])
def test_other_answer_is_bounded_and_warned_of(
    monkeypatch: pytest.MonkeyPatch, provider: str, answer: Answer, why: str
) -> None:
    monkeypatch.setitem(
        stop_notices.PROVIDERS,
        provider,
        stop_notices.PROVIDERS[provider]._replace(interval=0.01),
    )
    said: list[str] = []
    asked: list[str] = []
    over = threading.Event()
    with stand_in(token=reply("T"), name=reply("vm"), aws=answer, azure=answer) as found:
        watch(provider, found.address, asked.append, said.append, over)
        until(lambda: said, 20)
        over.set()
    assert said[0].startswith(f"warning: DISTBOOT_STOP_NOTICE={provider}: no notice can be read")
    assert why in said[0]
    assert said[0].isprintable()
    assert not asked
    assert not any("Location" in request for request in found.requests)


@pytest.mark.parametrize("before", [(), ("-m", "distboot")], ids=["init", "wrapper"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("provider", ["aws", "azure"])
def test_all_ranks_stop_at_a_notice(
    run_ranks: RunRanks, before: tuple[str, ...], count: int, provider: str
) -> None:
    script = """
import sys, time, distboot
ctx = distboot.init("none", join_timeout=60)
end = time.monotonic() + 40
step = 0
while not ctx.preempted and time.monotonic() < end:
    step += 1
    ctx.barrier()
    time.sleep(0.01)
print("stopped", step, flush=True)
sys.exit(time.monotonic() > end)
"""
    with stand_in(
        token=reply("T"),
        aws=reply('{"action": "hibernate"}'),
        name=reply("vmss_3"),
        azure=events("Preempt", "vmss_3"),
    ) as found:
        ended = run_ranks(
            script,
            before=(sys.executable, *before),
            places=[{}] * count,
            DISTBOOT_STOP_NOTICE=provider,
            DISTBOOT_NOTICE_ADDRESS=found.address,
        )
    assert [rank.code for rank in ended] == [0] * count, [rank.err for rank in ended]
    assert len({rank.out for rank in ended}) == 1
    asked = sum("instance-action" in each or "scheduled" in each for each in found.requests)
    assert asked == 1  # one agent of the node


def test_job_goes_on_beside_a_service_that_hangs(run_ranks: RunRanks) -> None:
    script = """
import time, distboot
with distboot.init("none", join_timeout=60) as ctx:
    begin = time.monotonic()
    for _ in range(20):
        assert not ctx.preempted
        ctx.barrier()
print(time.monotonic() - begin < 3)
"""
    with stand_in(token=hang, aws=hang) as found:
        ended = run_ranks(
            script,
            places=[{}] * 2,
            DISTBOOT_STOP_NOTICE="aws",
            DISTBOOT_NOTICE_ADDRESS=found.address,
        )
    assert [(rank.out, rank.code) for rank in ended] == [("True\n", 0)] * 2
