"""The image of docker/Dockerfile in containers: its ENTRYPOINT against tini, `podman stop`, and what distboot adds.

    python bench/container.py [--runs N]

Both sides run the same image with the same command, in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests")]

from podman import Podman, history, missing  # noqa: E402 - shared with the tests

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

    def start(self, runs: int) -> tuple[bool, str]:
        """From `podman run` to the first line of the child, with our ENTRYPOINT and with tini."""
        rounds = [(self._started(_OURS), self._started(_TINIS)) for _ in range(runs + 1)][1:]
        ours, tinis = zip(*rounds, strict=True)
        more = statistics.median(ours) - statistics.median(tinis)
        pairs = statistics.median(our - tini for our, tini in rounds)
        said = f"{more * 1e3:+.0f} ms (pairwise {pairs * 1e3:+.0f} ms): {_spread(ours)} against {_spread(tinis)} ms"
        return more <= MOST_START, said

    def stop(self, runs: int) -> tuple[bool, str]:
        """From `podman stop` to the end of a container whose child ends at once by TERM."""
        rounds = [(self._stopped(_OURS), self._stopped(_TINIS)) for _ in range(runs + 1)][1:]
        ours, tinis = zip(*rounds, strict=True)
        said = f"{statistics.median(ours):.3f} s: {_spread(ours)} ms, with tini {_spread(tinis)} ms"
        return statistics.median(ours) <= MOST_STOP, said

    def added(self) -> tuple[bool, str]:
        """What an image is larger than its base, where torch is in the base."""
        layers = [int(str(layer["size"])) for layer in history(self._podman, self._image)]
        return sum(layers[:-1]) <= MOST_ADDED, f"{sum(layers[:-1]) / 1e6:.1f} MB on {layers[-1] / 1e6:.0f} MB"

    def _started(self, options: tuple[str, ...]) -> float:
        begin = time.time()
        return float(self._podman.run(self._image, *_CLOCK, options=options).stdout) - begin

    def _stopped(self, options: tuple[str, ...]) -> float:
        offline = ("--network=none", *options)
        with self._podman.container(self._image, "python", "-c", _HANDLES_TERM, options=offline) as container:
            container.wait_for("READY")
            begin = time.time()
            self._podman("stop", "--time=100", container.name)
            ended = self._podman("inspect", "--format={{.State.FinishedAt.UnixNano}}", container.name).stdout
            assert container.exit_code() == 7
        return int(ended) / 1e9 - begin


CASES = {
    "start": ("ENTRYPOINT over tini, container start to the first line of the child", "≤ 80 ms more"),
    "stop": ("`podman stop` to exit, with a child that handles TERM at once", "≤ 0.2 s"),
    "added": ("layers that distboot adds to its base", "≤ 5 MB"),
}


def impossible() -> str | None:
    """Why nothing can be measured here."""
    return missing() or (None if TINI.exists() else "no tini-static (see tests/cluster/packages.txt)")


def measured(case: str, runs: int) -> tuple[bool, str]:
    """Whether the limit was reached, and a text; one round before counts for nothing."""
    with tempfile.TemporaryDirectory() as scratch:
        containers = Containers(Path(scratch))
        if case == "added":
            return containers.added()
        return containers.start(runs) if case == "start" else containers.stop(runs)


def _spread(times: tuple[float, ...]) -> str:
    """Median and quartiles, in milliseconds."""
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle * 1e3:.0f} ({low * 1e3:.0f} to {high * 1e3:.0f})"


def main() -> int:
    """Measure; 1 when a limit was not reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15, help="rounds (default: 15)")
    runs = parser.parse_args().runs
    if why := impossible():
        raise SystemExit(f"not measured: {why}")
    reached = True
    for case, (what, _) in CASES.items():
        good, said = measured(case, runs)
        print(f"{what}: {said}, at load {os.getloadavg()[0]:.1f}", flush=True)
        reached &= good
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
