"""Jobs in which two ranks on a node are many, the relays that they start, and who has a connection to whom.

What is large is set to two ranks by a `sitecustomize` in every rank (the fixture `large`).
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's")

LARGE = "import distboot.rollcall.node as node\nnode.RELAYS_FROM = 2\n"


def relays(folder: Path) -> list[int]:
    """The relays that ranks in this folder have started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_leader = os.getsid(int(path.name)) == int(path.name)  # else it is the one that starts it, and ends
            if is_leader and b"distboot.lifeline.relay" in (path / "cmdline").read_bytes():
                found += [int(path.name)] if os.readlink(path / "cwd") == str(folder.resolve()) else []
    return found


def connections(pid: int) -> int:
    """How many TCP connections a process has open."""
    files = Path(f"/proc/{pid}/fd").iterdir()
    ours = set()
    for file in files:
        with suppress(OSError):
            ours.add(os.readlink(file))
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    table = [line.split() for lines in tables for line in lines]
    return sum(1 for fields in table if fields[3] == "01" and f"socket:[{fields[9]}]" in ours)
