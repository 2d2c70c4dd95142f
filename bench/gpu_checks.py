"""The checks of `gpu.py`. Each returns what it has seen, or raises why it failed or why it cannot be made here."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gpu_jobs import RANK, FailedError, Jobs, ranks
from measure import Series, UnmeasuredError, last_line

# Of the CPU's loss. A GPU adds in another order; with a rank that trains alone, the loss is off by a third.
_TOLERANCE = 1e-4
# Seconds, in which the others have to stop: more than DISTBOOT_GRACE, to see how long it takes
_STOPPED = 60
_ABOUT_GPUS = ("accelerators", "visible-devices", "driver")  # findings of `doctor`


@dataclass
class Here:
    """The machine, and the jobs that run on it.

    Attributes:
        jobs: starts them.
        rounds: how often a time is taken.
        torch: what torch says of itself, and of the GPUs that it sees.
        gpus: UUIDs of the driver's GPUs, in its order; empty where nvidia-smi does not say.
        mig: UUIDs of their MIG devices.
    """

    jobs: Jobs
    rounds: int
    torch: dict[str, Any]
    gpus: list[str]
    mig: list[str]
    _trained: dict[int, list[dict[str, Any]] | FailedError] = field(default_factory=dict)

    def count(self, *, of_all: bool) -> int:
        """How many ranks: one, or one on each of several GPUs."""
        count = len(self.torch["gpus"])
        if of_all and count == 1:
            raise UnmeasuredError("one GPU only")
        return count if of_all else 1

    def train(self, count: int) -> list[dict[str, Any]]:
        """What the ranks of a job say that starts with `init()` and trains."""
        return [process.line() for process in self.jobs.run([RANK, "train"], ranks(count))]

    def trained(self, count: int) -> list[dict[str, Any]]:
        """The same, of one job that several checks look at."""
        if count not in self._trained:
            try:
                self._trained[count] = self.train(count)
            except FailedError as error:
                self._trained[count] = error
        found = self._trained[count]
        if isinstance(found, FailedError):
            raise found
        return found


def _same(what: str, seen: object, wanted: object) -> None:
    if seen != wanted:
        raise FailedError(f"{what}: {seen}, not {wanted}")


def device(here: Here, *, of_all: bool) -> str:
    """`init()` takes the GPU of the local rank, and NCCL."""
    return _devices(here.trained(here.count(of_all=of_all)))


def collective(here: Here, *, of_all: bool) -> str:
    """The group works."""
    return _sums(here.trained(here.count(of_all=of_all)))


def loss(here: Here, *, of_all: bool) -> str:
    """Training is that of the CPU."""
    found = here.trained(here.count(of_all=of_all))
    return agreement([its["loss"] for its in found], found[0]["loss_on_cpu"])


def _devices(found: list[dict[str, Any]]) -> str:
    for rank, its in enumerate(found):
        _same(f"device of rank {rank}", its["device"], f"cuda:{rank}")
        _same(f"current device of rank {rank}", its["current"], rank)
        _same(f"backend of rank {rank}", its["backend"], "nccl")
    return f"{', '.join(its['device'] for its in found)}; NCCL"


def _sums(found: list[dict[str, Any]]) -> str:
    for rank, its in enumerate(found):
        _same(f"sum on rank {rank}", its["sum"], len(found) * (len(found) + 1) / 2)
    return f"the sum is right on {len(found)} of {len(found)}"


def agreement(losses: list[float], expected: float) -> str:
    """How far the losses of the ranks are from that of the CPU.

    Raises:
        FailedError: too far.
    """
    for rank, its in enumerate(losses):
        if not abs(its - expected) <= _TOLERANCE * expected:  # NaN agrees with nothing
            raise FailedError(f"loss on rank {rank}: {its:.6f}, and {expected:.6f} on the CPU")
    off = max(abs(its - expected) / expected for its in losses)
    return f"{losses[0]:.6f}, {expected:.6f} on the CPU: {off:.0e} off, {_TOLERANCE:.0e} allowed"


def first(here: Here, *, of_all: bool) -> str:
    """Time from `init()` to the first collective."""
    count = here.count(of_all=of_all)
    rounds = [here.trained(count), *(here.train(count) for _ in range(here.rounds - 1))]
    slowest = {
        name: Series(tuple(max(its[name] for its in each) for each in rounds))
        for name in ("first", "init")
    }
    return f"{slowest['first'].said()}; of it in `init()`: {slowest['init'].said()}. torch was imported before"


def shared(here: Here) -> str:
    """Two ranks that are shown one GPU are refused."""
    only = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    for process in here.jobs.run(
        ["-c", "import distboot; distboot.init()"], ranks(2, CUDA_VISIBLE_DEVICES=only)
    ):
        if process.popen.returncode == 0 or "error[shared-accelerator]" not in process.err:
            raise FailedError(
                f"rank {process.rank}: exit code {process.popen.returncode}: {last_line(process.err)}"
            )
    return "both are refused: error[shared-accelerator]"


def choices(here: Here) -> Iterator[tuple[str, str, list[str]]]:
    """Kinds of the variable: what it is called, its value, and the devices that it shows."""
    yield "nothing", "", []
    if here.mig:  # how CUDA counts where there are some is not documented
        yield "a MIG UUID", here.mig[0], here.mig[:1]
        return
    count, last = len(here.gpus), here.gpus[-1]
    yield "an index", str(count - 1), [last]
    yield "a UUID", last, [last]
    yield "the beginning of a UUID", last[:12], [last]
    yield "an index out of range", str(count), []
    yield "two indexes, the first out of range", f"{count},0", []
    yield "two indexes, the second out of range", f"0,{count}", here.gpus[:1]
    if count > 1:
        yield "all indexes backwards", ",".join(map(str, reversed(range(count)))), here.gpus[::-1]


def visible(here: Here) -> str:
    """What distboot says before torch is imported, what torch sees, and what `init()` takes."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        raise UnmeasuredError("CUDA_VISIBLE_DEVICES is set around this run")
    if not here.gpus:
        raise UnmeasuredError("nvidia-smi is not here to say the UUIDs")
    chosen = list(choices(here))
    (process,) = here.jobs.run([RANK, "visible", *(value for _, value, _ in chosen)])
    found = {each["choice"]: each for each in process.lines()}
    for kind, value, wanted in chosen:
        if value not in found:
            raise FailedError(f"{kind}: {last_line(process.err)}")
        _as_chosen(found[value], kind, wanted)
    said = ["; ".join(f"{kind}: {len(wanted)}" for kind, _, wanted in chosen)]
    said += (
        []
        if found[""]["driver"]
        else ["/proc/driver/nvidia is not here, so distboot knows them by torch alone"]
    )
    return ". ".join(said if here.mig else [*said, "No MIG device here"])


def _as_chosen(found: dict[str, Any], kind: str, wanted: list[str]) -> None:
    _same(f"{kind}: devices in torch", len(found["seen"]), len(wanted))
    # torch has no UUIDs before 2.6, and may have that of the GPU for a MIG device.
    if not any(
        seen is None or each.startswith("MIG-")
        for seen, each in zip(found["seen"], wanted, strict=True)
    ):
        _same(f"{kind}: UUIDs in torch", found["seen"], wanted)
    if found["driver"]:
        _same(f"{kind}: UUIDs in distboot", found["told"], wanted)
    _same(f"{kind}: device", found["device"], "cuda:0" if wanted else "cpu")
    _same(f"{kind}: backend", found["backend"], "nccl" if wanted else "gloo")


def killed(here: Here) -> str:
    """The last rank is killed while all of them are in an all-reduce: the others name it, and stop."""
    count = here.count(of_all=True)
    with here.jobs.started([RANK, "reduce"], ranks(count)) as processes:
        here.jobs.until(
            lambda: all(each.out or each.has_ended for each in processes),
            processes,
            "did not reduce",
        )
        early = next((each for each in processes if each.has_ended), None)
        if early is not None:
            raise FailedError(
                f"rank {early.rank} ended before it was killed: {last_line(early.err)}"
            )
        *others, last = processes
        begin = time.monotonic()
        os.kill(last.popen.pid, signal.SIGKILL)
        here.jobs.until(
            lambda: all(each.has_ended for each in others), others, "did not stop", _STOPPED
        )
        seconds = time.monotonic() - begin
        named = re.compile(rf"rank {last.rank} failed first: .*SIGKILL")
        for process in others:
            if process.popen.returncode == 0 or not named.search(process.err):
                said = f"exit code {process.popen.returncode}: {last_line(process.err)}"
                raise FailedError(f"rank {process.rank} does not fail for rank {last.rank}: {said}")
    return (
        f"{len(others)} of {len(others)} others name it, and all have stopped {seconds:.1f} s later"
    )


def doctor(here: Here) -> str:
    """Its findings on a real driver."""
    (process,) = here.jobs.run(["-m", "distboot", "doctor", "--json"])
    try:
        said = json.loads(process.out)
    except ValueError:
        raise FailedError(
            f"exit code {process.popen.returncode}: {last_line(process.err)}"
        ) from None
    _same("exit code", process.popen.returncode, 0 if said["ready"] else 78)
    findings = said["findings"]
    for finding in findings:
        broken = finding["seen"].startswith("the check itself failed")
        if broken or (finding["name"] in _ABOUT_GPUS and finding["status"] != "ok"):
            raise FailedError(f"{finding['name']}: {finding['status']}: {finding['seen']}")
    about = [f"{each['name']}: {each['seen']}" for each in findings if each["name"] in _ABOUT_GPUS]
    others = [each["status"] for each in findings if each["name"] not in _ABOUT_GPUS]
    counts = [f"{others.count(status)} {status}" for status in dict.fromkeys(others)]
    return f"{'; '.join(about)}; of the other findings: {', '.join(counts)}"


def wrapper(here: Here) -> str:
    """A script that knows nothing of distboot runs on all GPUs."""
    processes = here.jobs.run(["-m", "distboot", RANK, "plain"], ranks(len(here.torch["gpus"])))
    found = [process.line() for process in processes]
    return f"{_devices(found)}; {_sums(found)}"
