"""What went wrong in a launch that `try` has observed. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..base.table import first_that_holds
from ..base.text import counted, ranks_said
from .trial import Launch

_LOOPBACK = ("localhost", "127.", "tcp://localhost", "tcp://127.")
_MOST_LINES = 20  # of the output of a launch that failed
HEAD = ("runs", "device", "hangs", "ends")
_HANGS = {True: "yes", False: "no"}
_ENDS = {True: "apart", False: "together"}


class Note(NamedTuple):
    """What the hook wrote down about a rank."""

    rank: int
    # "device" and "visible", "meets", "size" or "mpi"; "at": place in the script
    facts: Mapping[str, Any]


class Observed(NamedTuple):
    """One launch that has ended, or was ended."""

    launch: Launch
    codes: Sequence[int | None]  # exit codes by rank; None: not ended within the time limit
    seconds: float
    output: str
    report: Mapping[str, Any]  # the job's report; empty if there is none
    notes: Sequence[Note]

    def notes_with(self, fact: str) -> list[Note]:
        """The notes that have a fact."""
        found = filter(lambda note: note.facts.get(fact) is not None, self.notes)
        return list(found)


class Verdict(NamedTuple):
    """What is said of a launch."""

    is_good: bool | None  # None: it cannot be tried
    columns: Sequence[str]  # as `HEAD` has them
    problems: Sequence[str]


def judge(seen: Observed) -> Verdict:
    """Whether a launch went well, and what is to be said of it."""
    if seen.notes_with("mpi"):
        why = (
            "not tried: the script calls MPI_Init, for which the real mpirun (or srun --mpi=…) "
            "is needed"
        )
        return Verdict(None, ["-"] * len(HEAD), [why])
    failure = _first_failure(seen)
    hangs = _hangs(seen, failure)
    separate = _separate(seen, failure)
    device = _wrong_device(seen)
    loopback = _loopback(seen)
    columns = [
        _runs_column(seen, loopback),
        _device_column(seen, device),
        _HANGS[bool(hangs)],
        _ENDS[bool(separate)],
    ]
    problems = [failure, hangs, separate, device, loopback]
    listed = list(dict.fromkeys(filter(None, problems)))
    has_failed = any(seen.codes)
    if has_failed and not listed:  # only the output tells
        listed = seen.output.splitlines()[-_MOST_LINES:]
    is_good = not any((has_failed, hangs, separate, device, loopback))
    return Verdict(is_good, columns, listed)


def _first_failure(seen: Observed) -> str:
    failure = seen.report.get("first_failure")
    if failure is None:
        return ""
    return str(failure.get("text", ""))


def _runs_column(seen: Observed, loopback: str) -> str:
    return first_that_holds(
        (loopback != "", "no"),
        (set(seen.codes) != {0}, "no"),
        (True, f"{seen.seconds:.0f} s"),
    )


def _device_column(seen: Observed, wrong: str) -> str:
    return first_that_holds(
        (wrong != "", "wrong"),
        (seen.notes_with("device") != [], "ok"),
        (True, "-"),
    )


def _hangs(seen: Observed, failure: str) -> str:
    states = [rank.get("state") for rank in seen.report.get("ranks", ())]
    return first_that_holds(
        (None in seen.codes, "no end within the time limit"),
        ("late" in states, failure),
        (True, ""),
    )


def _separate(seen: Observed, failure: str) -> str:
    """Ranks that do not end together, or whose process groups do not have all ranks."""
    if "exited with code 0 " in failure:
        return failure
    ranks_by_size: defaultdict[int, list[int]] = defaultdict(list)
    for rank, facts in seen.notes_with("size"):
        size = facts["size"]
        ranks_by_size[size].append(rank)
    ranks_by_size.pop(len(seen.codes), None)
    groups = []
    for size, ranks in ranks_by_size.items():
        groups.append(f"{ranks_said(ranks)} trained in a group of {size}")
    return "; ".join(groups)


def _wrong_device(seen: Observed) -> str:
    """A rank that takes a device that its node does not have, or that is already taken there."""
    taken: dict[tuple[int, object, int], int] = {}
    for note in seen.notes_with("device"):
        device = note.facts["device"]
        place = note.facts["at"]
        count = _devices_of(note, seen.launch)
        if device >= count:
            has = counted(count, "accelerator")
            return (
                f"rank {note.rank} takes device {device} of a node that has {has} ({place}): "
                "use the local rank"
            )
        node = note.rank // seen.launch.per_node
        key = (node, note.facts.get("visible"), device)
        first = taken.setdefault(key, note.rank)
        is_shared = first != note.rank
        if is_shared and count > 1:
            both = f"ranks {first} and {note.rank} of node {node}"
            return f"{both} both take device {device} ({place})"
    return ""


def _devices_of(note: Note, launch: Launch) -> int:
    """How many devices a rank sees."""
    visible = note.facts.get("visible")
    if visible:
        return len(visible.split(","))
    return launch.per_node


def _loopback(seen: Observed) -> str:
    """A rank that connects to rank 0 at its own node, where there are others."""
    if seen.launch.nodes == 1:
        return ""
    for rank, facts in seen.notes_with("meets"):
        address = facts["meets"]
        place = facts["at"]
        if address.startswith(_LOOPBACK):
            where = f"rank {rank} looks for rank 0 at {address}"
            return f"{where}, which works on one node only ({place})"
    return ""
