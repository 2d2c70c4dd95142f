"""Ranks that are started by hand, each with its own variables, and run one script to its end."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRAPPER = [sys.executable, "-m", "distboot", "run"]

# What a script may begin with.
BEGIN = """
import json, os, socket, subprocess, sys, time
from pathlib import Path
import distboot
def say(*words, **line):
    sys.stdout.write((json.dumps(line) if line else " ".join(map(str, words))) + "\\n")
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
# What a rank that `init` has met the others as says of its place, without any framework.
SAY_PLACE = """
import json, os, sys
import distboot
with distboot.init("none", join_timeout=60) as ctx:
    place = [ctx.rank, ctx.world_size, ctx.local_rank, ctx.local_world_size, ctx.node_rank, ctx.num_nodes]
    line = {"launcher": ctx.launcher, "rank": ctx.rank, "place": place, "NODE_RANK": os.environ["NODE_RANK"]}
    os.write(1, (json.dumps(line) + "\\n").encode())
"""
# What a script begins with that is not to find a module.
HIDE = """
import sys
import importlib.util as u
sys.modules["{module}"], find = None, u.find_spec
u.find_spec = lambda name, *a: None if name == "{module}" else find(name, *a)
"""
# What rank 0 says at the end of a job, and while it waits on a busy machine.
_BY_THE_WAY = re.compile(
    r"distboot: rank \d+ on .*(: summary: |; giving up in \d+ s|; trying for \d+ s more).*\n"
)


@dataclass(frozen=True)
class Rank:
    code: int
    out: str
    err: str
    pid: int = 0

    def line(self) -> dict[str, Any]:
        """The one line of JSON that it has printed, having ended well."""
        assert self.code == 0, self.out + self.err
        (found,) = [line for line in self.out.splitlines() if line.startswith("{")]
        line: dict[str, Any] = json.loads(found)
        return line


RunRanks = Callable[..., list[Rank]]


Ranks = Callable[..., list[tuple[str, int]]]


def run_ranks(environ: Mapping[str, str], port: int, folder: Path) -> RunRanks:
    """Run a script as one job, one rank for each of the places, which are its variables besides RANK."""

    def run(
        script: str,
        *arguments: str,
        before: Sequence[str] = (sys.executable,),
        places: Sequence[Mapping[str, str]] = ({}, {}),
        stderr: int = subprocess.PIPE,
        **env: str,
    ) -> list[Rank]:
        (folder / "train.py").write_text(script)
        job = {
            "WORLD_SIZE": str(len(places)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **env,
        }
        started = [
            subprocess.Popen(
                [*before, str(folder / "train.py"), *arguments],
                env={**environ, **job, "RANK": str(rank), **place},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
            for rank, place in enumerate(places)
        ]
        try:
            said = [process.communicate(timeout=180) for process in started]
            pairs = zip(started, said, strict=True)
            return [
                Rank(process.returncode, out, err or "", process.pid)
                for process, (out, err) in pairs
            ]
        finally:
            for process in started:
                process.kill()
                process.wait(10)

    return run


def runner(run: RunRanks) -> Ranks:
    """Run BEGIN and a script as so many ranks: what each printed, errors included, and its exit code."""

    def run_them(script: str, count: int = 2, *before: str, **env: str) -> list[tuple[str, int]]:
        before = (sys.executable, *before)
        ended = run(
            BEGIN + script, before=before, places=[{}] * count, stderr=subprocess.STDOUT, **env
        )
        return [(_BY_THE_WAY.sub("", rank.out), rank.code) for rank in ended]

    return run_them
