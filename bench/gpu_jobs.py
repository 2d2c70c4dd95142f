"""Processes that `gpu.py` starts: each has its own variables and a time limit, and is ended by its id."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import ROOT, clean_environ, last_line

# Seconds, for one job: the first import of torch on a new machine may take half of them
_LIMIT = 90
RANK = str(Path(__file__).parent / "gpu_ranks.py")


class FailedError(Exception):
    """What is not as it has to be, in a few words."""


@dataclass(frozen=True)
class Process:
    """One process, and the files that hold what it has printed."""

    rank: int
    popen: subprocess.Popen[bytes]
    folder: Path

    @property
    def out(self) -> str:
        return (self.folder / f"{self.rank}.out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.folder / f"{self.rank}.err").read_text(errors="replace")

    @property
    def has_ended(self) -> bool:
        return self.popen.poll() is not None

    def lines(self) -> list[dict[str, Any]]:
        """The lines of JSON that it has printed, having ended well.

        Raises:
            FailedError: it has not, or there are none.
        """
        lines = [line for line in self.out.splitlines() if line.startswith("{")]
        if self.popen.returncode or not lines:
            said = last_line(self.err or self.out)
            raise FailedError(f"rank {self.rank}: exit code {self.popen.returncode}: {said}")
        return [json.loads(line) for line in lines]

    def line(self) -> dict[str, Any]:
        """The first of them."""
        return self.lines()[0]


class Jobs:
    """Starts jobs.

    Args:
        folder: for what they print.
        seconds: that all of them together may take.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self._end = folder, time.monotonic() + seconds

    @contextmanager
    def started(
        self, words: Sequence[str], places: Sequence[Mapping[str, str]]
    ) -> Iterator[list[Process]]:
        """`python` with these words, once for each of the places, which are variables; ended with the block."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = clean_environ(PYTHONPATH=os.pathsep.join(paths))
        with ExitStack() as stack:
            processes = []
            for rank, place in enumerate(places):
                out, err = (
                    stack.enter_context(open(folder / f"{rank}.{name}", "wb"))
                    for name in ("out", "err")
                )
                popen = subprocess.Popen(
                    [sys.executable, *words], env={**environ, **place}, cwd=folder, stdin=subprocess.DEVNULL,
                    stdout=out, stderr=err, start_new_session=True,
                )  # fmt: skip
                stack.callback(_end, popen)
                processes.append(Process(rank, popen, folder))
            yield processes

    def run(
        self, words: Sequence[str], places: Sequence[Mapping[str, str]] = ({},)
    ) -> list[Process]:
        """The same, when all of them have ended.

        Raises:
            FailedError: they do not end in time.
        """
        with self.started(words, places) as processes:
            self.until(lambda: all(each.has_ended for each in processes), processes, "did not end")
        return processes

    def until(
        self,
        there: Callable[[], bool],
        processes: Sequence[Process],
        otherwise: str,
        limit: float = _LIMIT,
    ) -> None:
        """Wait for a condition.

        Raises:
            FailedError: it is not there in time.
        """
        begin = time.monotonic()
        end = min(begin + limit, self._end)
        while not there():
            if time.monotonic() > end:
                late = next((each for each in processes if not each.has_ended), processes[0])
                seconds = max(end - begin, 0)
                raise FailedError(
                    f"rank {late.rank} {otherwise} within {seconds:.0f} s: {last_line(late.err)}"
                )
            time.sleep(0.01)


def ranks(count: int, **variables: str) -> list[dict[str, str]]:
    """Variables of so many ranks on this host; of one rank: none, as nothing launches it."""
    if count == 1:
        return [variables]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    job = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **variables}
    return [{**job, "RANK": str(rank)} for rank in range(count)]


def _end(popen: subprocess.Popen[bytes]) -> None:
    """End a process, and what it started in its session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()
