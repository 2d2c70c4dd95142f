"""The wrapper with real children and real pipes, and the log files of its ranks."""

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from inside import proc_stat

HOST = os.uname().nodename
PREFIX = f"[rank 0 {HOST}] ".encode()
PREFIXED = ["--log-prefix", "--"]


@contextmanager
def wrapped(
    env: dict[str, str], folder: Path, *arguments: str, stdout: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[bytes]]:
    """The wrapper, with its standard error in a file; ended with its child when the block ends."""
    with open(folder / "stderr", "ab") as stderr:
        wrapper = subprocess.Popen(
            [sys.executable, "-m", "distboot", "run", *arguments],
            env=env,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        yield wrapper
    finally:
        wrapper.kill()
        wrapper.wait(20)
        for stream in (wrapper.stdin, wrapper.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def python(text: str) -> list[str]:
    """What runs a script that needs no imports."""
    return [sys.executable, "-c", f"import os, signal, sys, time\n{text}"]


def read_from(wrapper: subprocess.Popen[bytes], size: int, seconds: float = 60) -> bytes:
    """So many bytes of standard output, bounded in time."""
    assert wrapper.stdout is not None
    data = b""
    end = time.monotonic() + seconds
    while len(data) < size:
        ready, _, _ = select.select([wrapper.stdout], [], [], max(end - time.monotonic(), 0))
        assert ready, f"only {data[-200:]!r}"
        more = os.read(wrapper.stdout.fileno(), size - len(data))
        assert more, f"ended after {data[-200:]!r}"
        data += more
    return data


def type_in(wrapper: subprocess.Popen[bytes], text: str = "\n") -> None:
    """What a user types for the child."""
    assert wrapper.stdin is not None
    wrapper.stdin.write(text.encode())
    wrapper.stdin.flush()


def alive(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    return proc_stat(pid)[:1] not in ([], ["Z"])


def log_of(folder: Path, rank: int = 0) -> list[str]:
    """The lines of a log file, without those that begin and end an attempt."""
    lines = (folder / f"rank-{rank}.log").read_text().splitlines()
    own = f"distboot: rank {rank} on {HOST}, "
    return [
        line for line in lines if not line.startswith((f"{own}started at 20", f"{own}ended at 20"))
    ]


def ends_of(folder: Path, rank: int = 0) -> list[str]:
    """How each attempt of a rank has ended, in its log file."""
    text = (folder / f"rank-{rank}.log").read_text()
    begin = f"^distboot: rank {rank} on {re.escape(HOST)}, ended at 20"
    return re.findall(rf"{begin}.* UTC: (.+)$", text, re.MULTILINE)
