"""How the ranks meet at the store of torch.distributed: all are there, the roster is drawn up, nobody goes on alone.

The store is env://'s own, so that the one of torchrun's agent is used where there is one.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from ..errors import DistbootError
from ..placement import Placement
from ..rendezvous import wait_until_open
from ..roster import Record, Roster, own_record, roster_of


@contextmanager
def joining(placement: Placement) -> Iterator[None]:
    """Turns torch's errors while the ranks meet into ours."""
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:  # torch's DistError and all of its kinds are RuntimeErrors
        where = f"{placement.master_addr}:{placement.master_port}"
        text = first_line(error)
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise DistbootError(
                "port-taken",
                f"rank 0 cannot listen on {where}, somebody else has that port: {text}",
                "set MASTER_PORT to a free port for all processes, end the program that has it, or look for a second "
                "process with RANK=0",
            ) from None
        raise DistbootError(
            "join-timeout",
            f"the {placement.world_size} ranks did not all meet at {where} "
            f"(from {placement.sources.get('master_addr')}), given up after {time.monotonic() - start:.1f} s; "
            f"torch says: {text}",
            "look for a rank that ended early or never started (its own output says why), or for a firewall",
        ) from None


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def meet(torch: Any, placement: Placement, join_timeout: float) -> Any:
    """The store of torch, with all ranks connected to it."""
    from torch.distributed.rendezvous import rendezvous

    end = time.monotonic() + join_timeout
    if placement.rank > 0:
        # torch's own client may take more than twice its timeout to say that nobody listens.
        wait_until_open(placement, join_timeout)
    left = max(end - time.monotonic(), 1.0)
    store = _bounded(placement, left, lambda: next(rendezvous("env://", timeout=timedelta(seconds=left)))[0])
    store = torch.distributed.PrefixStore("distboot", store)
    return torch.distributed.PrefixStore(_fresh_name(placement, store, end), store)


def _bounded(placement: Placement, limit: float, connect: Callable[[], Any]) -> Any:
    """What `connect` returns. torch waits for ever when somebody listens who never answers, whatever its timeout."""
    done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put((connect(), None))
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread of the caller
            done.put((None, error))

    threading.Thread(target=work, name="distboot-join", daemon=True).start()
    try:
        store, error = done.get(timeout=limit + 2.0)  # torch's own message is better, where it has one
    except queue.Empty:
        raise DistbootError(
            "join-timeout",
            f"somebody listens at {placement.master_addr}:{placement.master_port} and does not answer as torch's store",
            "look for another program on that port of rank 0's host, or set MASTER_PORT to a free one",
        ) from None
    if error is not None:
        raise error
    return store


def _fresh_name(placement: Placement, store: Any, end: float) -> str:
    """A name that all ranks agree on and that was never used before in this store.

    The store of torchrun's agent outlives a restart of the ranks, with the keys of their earlier life in it, and
    nothing in the environment numbers the lives alike on all nodes. So rank 0 invents a name, and each of the others
    looks for the latest one until it finds its own word repeated there.
    """
    own, others = os.urandom(8).hex(), range(1, placement.world_size)
    if placement.rank == 0:
        store.set("life", own)
        words = [word.decode() for word in store.multi_get([f"{own}/{other}" for other in others])] if others else []
        store.set(f"{own}/all", json.dumps(words))
        return own
    pause = 0.005
    while time.monotonic() < end:
        life: str = store.get("life").decode()
        store.set(f"{life}/{placement.rank}", own)
        if store.check([f"{life}/all"]) and own in json.loads(store.get(f"{life}/all")):
            return life
        time.sleep(pause)
        pause = min(pause * 1.5, 1.0)
    raise RuntimeError("rank 0 did not answer in time")


def complete(placement: Placement, store: Any) -> tuple[Placement, tuple[str, ...]]:
    """The exact placement and the host of each node, worked out by rank 0 from the records of all ranks."""
    roster = Roster.from_message(_exchange(placement, store, "record", own_record(placement).as_message(), _roster))
    return placement.with_fields("roster: all ranks together", asdict(roster.seat(placement.rank))), roster.hosts


def all_or_none(placement: Placement, store: Any, step: Callable[[], Any]) -> Any:
    """Take a step that may fail on some ranks only, and fail on all of them with the first failure of any."""
    result, failure = None, None
    try:
        result = step()
    except DistbootError as error:
        failure = (error.code, f"rank {placement.rank}: {error.message}", error.hint)
    except Exception as error:  # noqa: BLE001 - whatever a driver says, the other ranks must hear of it
        failure = (
            "device-failed",
            f"rank {placement.rank}: {first_line(error)}",
            "look at that rank's device and driver",
        )
    _exchange(placement, store, "step", failure, lambda failures: {"error": next(filter(None, failures), None)})
    return result


def _exchange(
    placement: Placement, store: Any, name: str, own: Any, conclude: Callable[[list[Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Every rank says something, rank 0 draws the conclusion, every rank gets it. An error in it is raised by all."""
    rank, others = placement.rank, range(1, placement.world_size)
    store.set(f"{name}/{rank}", json.dumps(own))
    if rank == 0:
        said = [json.loads(text) for text in store.multi_get([f"{name}/{each}" for each in (0, *others)])]
        store.set(f"{name}/all", json.dumps(conclude(said)))
    concluded: dict[str, Any] = json.loads(store.get(f"{name}/all"))
    if not concluded.get("error"):
        return concluded
    store.set(f"{name}/seen/{rank}", "")
    if rank == 0:  # the store ends with this process: not before everybody has read why
        with suppress(RuntimeError):
            store.wait([f"{name}/seen/{other}" for other in others], timedelta(seconds=5))
    raise DistbootError(*concluded["error"])


def _roster(said: list[dict[str, Any]]) -> dict[str, Any]:
    try:
        records = [Record.from_message(each) for each in said]
    except (TypeError, ValueError):
        message = "the ranks run different versions of distboot, which do not understand each other"
        return {"error": ("roster-mismatch", message, "install the same version on all nodes")}
    try:
        return roster_of(records).as_message()
    except DistbootError as error:
        return {"error": (error.code, error.message, error.hint)}
