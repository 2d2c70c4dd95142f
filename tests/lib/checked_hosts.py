"""A job on four hosts, one rank each, and what its check of all nodes has found; links may be bad."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hosts import Hosts, side_by_side

if TYPE_CHECKING:
    from collections.abc import Mapping

NAMES = ("one", "two", "three", "four")
ADDRESS_OF_TWO = "10.77.0.11"
# What makes the links of host three bad; with the hosts whose links have to be named
BAD: dict[str, dict[str, Any]] = {
    "slow": {"rate": 1e6},  # far below what a busy machine leaves of the others
    "far": {"delay": 0.02},
    "lossy": {"loss": 0.15},
    "one way": {"deaf_to": ADDRESS_OF_TWO},
}
_SCRIPT = "import distboot; distboot.init('none')"


@contextmanager
def four_hosts() -> Iterator[Hosts]:
    with Hosts.up(NAMES) as hosts:
        yield hosts


def check(hosts: Hosts, port: int, **more: str) -> Check:
    """Run a job that calls `init` and ends, under the wrapper."""
    report = hosts.shared / f"job-{port}.json"
    commands: list[tuple[list[str], Mapping[str, str]]] = []
    for rank, name in enumerate(hosts.names):
        environ = hosts.environment(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(hosts.names)),
                "LOCAL_RANK": "0",
                "MASTER_ADDR": "10.77.0.10",
                "MASTER_PORT": str(port),
                "DISTBOOT_REPORT": str(report),
                **more,
            }
        )
        run = [sys.executable, "-m", "distboot", "run", "--", sys.executable, "-c", _SCRIPT]
        commands.append((hosts.command(name, run), environ))
    ends = side_by_side(commands, 60)
    return Check(ends, report)


class Check:
    """What a job has found."""

    def __init__(self, ends: list[tuple[int, str]], report: Path) -> None:
        self.codes = [code for code, _ in ends]
        self.output = ends[0][1]
        self.report: dict[str, Any] = json.loads(report.read_text())
        self.seconds: float = -1.0
        self.findings: list[str] = []
        for line in report.with_suffix(".jsonl").read_text().splitlines():
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "checked":
                self.seconds = event["details"]["seconds"]
                self.findings = event["details"]["findings"]
