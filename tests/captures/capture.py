"""Capture a run of a launcher: its environments, and what is really so beside them, as README.md here says.

In every process, with a folder that all hosts see, and the variable that has the rank:

    somelauncher -n 4 python tests/captures/capture.py process FOLDER SOME_RANK

then in the shell that launched it, whose own variables are left out:

    python tests/captures/capture.py save FOLDER tests/captures/somelauncher-1.0/uneven_3_1.json

Look for names and paths of your own in the file before you commit it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

_NOISE = (
    "_",
    "HOME",
    "LANG",
    "LC_CTYPE",
    "LOGNAME",
    "OLDPWD",
    "PATH",
    "PWD",
    "PYTHONPATH",
    "SHELL",
    "SHLVL",
    "TERM",
    "USER",
)


def process(folder: Path, rank: str) -> None:
    """Write down what this process has."""
    found = {"env": dict(os.environ), "hostname": socket.gethostname()}
    (folder / f"{int(os.environ[rank])}.json").write_text(json.dumps(found))


def save(folder: Path, file: Path) -> None:
    """Write the capture: a node is a host, and is counted when a rank first reaches it."""
    found = [
        json.loads(path.read_text())
        for path in sorted(folder.glob("*.json"), key=lambda path: int(path.stem))
    ]
    hosts = [each["hostname"] for each in found]
    nodes = list(dict.fromkeys(hosts))
    ranks = [
        {
            "env": {
                k: v for k, v in each["env"].items() if k not in _NOISE and os.environ.get(k) != v
            },
            "inherited": {},
            "hostname": host,
            "expected": {
                "rank": rank,
                "size": len(found),
                "local_rank": hosts[:rank].count(host),
                "local_size": hosts.count(host),
                "node_rank": nodes.index(host),
                "nnodes": len(nodes),
                "rank0_host": hosts[0],
                "source": "host of each process, in the order of ranks",
            },
        }
        for rank, (each, host) in enumerate(zip(found, hosts, strict=True))
    ]
    launcher, _, version = file.parent.name.rpartition("-")
    head = {
        "launcher": launcher,
        "version": version,
        "command": "",
        "shape": file.stem,
        "nprocs": len(found),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**head, "notes": "", "ranks": ranks}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "process":
        process(Path(sys.argv[2]), sys.argv[3])
    else:
        save(Path(sys.argv[2]), Path(sys.argv[3]))
