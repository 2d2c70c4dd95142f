"""Ranks without any framework that wait for each other, in scripts that say what became of it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

BEGIN = """
import json, os, socket, sys, time
from pathlib import Path
import distboot
def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()
def until(*names):
    end = time.monotonic() + 60
    while not all(Path(name).exists() for name in names):
        assert time.monotonic() < end, names
        time.sleep(0.01)
def touch(name):
    Path(name).touch()
def attempt(step):
    try:
        step()
    except distboot.DistbootError as error:
        say(error.code, error.message, "|", error.hint)
"""
Ranks = Callable[..., list[tuple[str, int]]]


def runner(environ: dict[str, str], port: int, folder: Path) -> Ranks:
    """Run a script as so many ranks in one folder: what each printed, errors included, and its exit code."""

    def run_them(script: str, count: int = 2, *before: str, **env: str) -> list[tuple[str, int]]:
        (folder / "script.py").write_text(BEGIN + script)
        job = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **env}
        processes = [
            subprocess.Popen(
                [sys.executable, *before, "script.py"], env={**environ, **job, "RANK": str(rank)}, cwd=folder,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(count)
        ]  # fmt: skip
        try:
            outputs = [process.communicate(timeout=120)[0] for process in processes]
            # What rank 0 says at the end of a job.
            outputs = [re.sub(r"distboot: rank 0 on .*: summary: .*\n", "", text) for text in outputs]
            return [(output, process.returncode) for output, process in zip(outputs, processes, strict=True)]
        finally:
            for process in processes:
                process.kill()
                process.wait(10)

    return run_them
