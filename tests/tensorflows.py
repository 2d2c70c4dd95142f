"""Ranks of TensorFlow started side by side, by hand or with a `TF_CONFIG` each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import pytest
from lifelines import until

from distboot.rendezvous import free_port

needs_tensorflow = pytest.mark.skipif(
    not any(Path(path, "tensorflow").is_dir() for path in sys.path), reason="tensorflow is not installed"
)

LIMIT = 180  # seconds for a job, on a machine that has other work, too
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}  # errors only


class Ranks:
    """Processes started side by side in one folder, each with its output in a file."""

    def __init__(self, folder: Path, command: Sequence[str], environs: Sequence[Mapping[str, str]]) -> None:
        self.folder = folder
        self.processes = []
        for rank, environ in enumerate(environs):
            with open(folder / f"output-{rank}", "wb") as output:
                self.processes.append(
                    subprocess.Popen(
                        command, env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                        start_new_session=True,
                    )
                )  # fmt: skip

    def wait_for(self, name: str) -> None:
        """Wait for a file that a script makes."""
        path = self.folder / name
        until(lambda: path.exists() or any(process.poll() is not None for process in self.processes), LIMIT)
        assert path.exists(), "\n".join(self.output(rank) for rank in range(len(self.processes)))

    def codes(self) -> list[int]:
        return [process.wait(LIMIT) for process in self.processes]

    def output(self, rank: int) -> str:
        return (self.folder / f"output-{rank}").read_text(errors="replace")

    def lines(self) -> list[dict[str, Any]]:
        """The JSON lines of ranks that must all have ended well."""
        codes = self.codes()
        outputs = [self.output(rank) for rank in range(len(codes))]
        assert codes == [0] * len(codes), "\n".join(outputs)
        found = [json.loads(line) for text in outputs for line in text.splitlines() if line.startswith("{")]
        return sorted(found, key=lambda line: int(line["rank"]))


class ByHand(Protocol):
    """Starts a script in several ranks, with `RANK` and its like or with what `each` of them is to have."""

    def __call__(
        self,
        script: str,
        ranks: int = 2,
        *,
        env: Mapping[str, str] = ...,
        each: Sequence[Mapping[str, str]] = ...,
        wrapper: Sequence[str] = ...,
    ) -> Ranks: ...


@contextmanager
def started(ranks: Ranks) -> Iterator[Ranks]:
    try:
        yield ranks
    finally:
        for process in ranks.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def by_rank(ranks: int) -> list[dict[str, str]]:
    return [
        {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        for rank in range(ranks)
    ]


def tasks(**cluster: int) -> list[dict[str, str]]:
    """A TF_CONFIG for each task of a cluster on this host: the number of tasks by type."""
    ports: set[int] = set()
    while len(ports) < sum(cluster.values()):
        ports.add(free_port())
    free = iter(ports)
    addresses = {kind: [f"127.0.0.1:{next(free)}" for _ in range(count)] for kind, count in cluster.items()}
    tasks = [{"type": kind, "index": index} for kind, count in cluster.items() for index in range(count)]
    return [{"TF_CONFIG": json.dumps({"cluster": addresses, "task": task})} for task in tasks]
