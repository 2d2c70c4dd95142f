"""The image of docker/Dockerfile in containers: its ENTRYPOINT against tini, `podman stop`, and what distboot adds.

Both sides run the same image with the same command, in turn.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from measure import Contender, Effort, Series, interleaved
from page import Limit, Section, Table, promise
from podman import Podman, history, missing

TINI = Path("/usr/bin/tini-static")  # of Debian's package
MOST_START, MOST_STOP, MOST_ADDED = 0.08, 0.2, 5e6  # seconds more than tini, seconds, bytes

_OURS: tuple[str, ...] = ()
_TINIS = (f"--volume={TINI}:/tini:ro", '--entrypoint=["/tini", "--"]')
_CLOCK = ("date", "+%s.%N")
_HANDLES_TERM = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
print("READY", flush=True)
signal.pause()
"""


class Containers:
    """The image, and podman to run it."""

    def __init__(self, scratch: Path) -> None:
        self._podman = Podman(scratch)
        self._image = self._podman.build("Dockerfile", PACKAGES="")

    def start(self, rounds: int) -> tuple[Series, Series]:
        """From `podman run` to the first line of the child, with our ENTRYPOINT and with tini."""
        return self._both(self._started, rounds)

    def stop(self, rounds: int) -> tuple[Series, Series]:
        """From `podman stop` to the end of a container whose child ends at once by TERM."""
        return self._both(self._stopped, rounds)

    def added(self) -> tuple[int, int]:
        """Bytes of the layers on top of the base, where torch is in the base; and of the base."""
        layers = [int(str(layer["size"])) for layer in history(self._podman, self._image)]
        return sum(layers[:-1]), layers[-1]

    @staticmethod
    def _both(measure: Callable[[tuple[str, ...]], float], rounds: int) -> tuple[Series, Series]:
        sides = [
            Contender("ours", partial(measure, _OURS)),
            Contender("tini", partial(measure, _TINIS)),
        ]
        found = interleaved(sides, rounds)
        return found["ours"], found["tini"]

    def _started(self, options: tuple[str, ...]) -> float:
        begin = time.time()
        return float(self._podman.run(self._image, *_CLOCK, options=options).stdout) - begin

    def _stopped(self, options: tuple[str, ...]) -> float:
        offline = ("--network=none", *options)
        with self._podman.container(
            self._image, "python", "-c", _HANDLES_TERM, options=offline
        ) as container:
            container.wait_for("READY")
            begin = time.time()
            self._podman("stop", "--time=100", container.name)
            ended = self._podman(
                "inspect", "--format={{.State.FinishedAt.UnixNano}}", container.name
            ).stdout
            assert container.exit_code() == 7
        return int(ended) / 1e9 - begin


def section(effort: Effort) -> Section:
    """All three; or why not."""
    start = "ENTRYPOINT over tini, container start to the first line of the child"
    stop = "`podman stop` to exit, with a child that handles TERM at once"
    added = "layers that distboot adds to its base"
    most = ("≤ 80 ms", "≤ 0.2 s", "≤ 5 MB")
    why = missing() or (
        None if TINI.exists() else "no tini-static (see tests/cluster/packages.txt)"
    )
    if why:
        pairs = zip((start, stop, added), most, strict=True)
        return Section(
            limits=[Limit(what, f"not measured: {why}", limit, None) for what, limit in pairs]
        )
    with tempfile.TemporaryDirectory() as scratch:
        containers = Containers(Path(scratch))
        starts, stops = containers.start(effort.rounds(12)), containers.stop(effort.rounds(8))
        layers, base = containers.added()
    limits = [
        promise(
            start, starts[0].less(starts[1]), MOST_START, most[0], unit="ms", digits=0, more=True
        ),
        promise(stop, stops[0], MOST_STOP, most[1], digits=3),
        Limit(
            added, f"{layers / 1e6:.1f} MB on {base / 1e6:.0f} MB", most[2], layers <= MOST_ADDED
        ),
    ]
    rows = [
        ("`podman run` to the first line", *(each.said("ms", 0) for each in starts)),
        ("`podman stop` to exit", *(each.said("ms", 0) for each in stops)),
    ]
    meaning = (
        "An image whose ENTRYPOINT is distboot pays this once a container. What it does otherwise as process 1, "
        "forwarding, reaping, exit codes, is what tini does; the tests compare the two."
    )
    return Section(
        [Table("As process 1 of a container", ("what", "distboot", "tini"), rows, meaning)], limits
    )
