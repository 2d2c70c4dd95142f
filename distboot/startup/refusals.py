"""The processes in which `init` must not join the job as a rank; and ranks that are not able to."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from ..base.errors import DistbootError, already_joined
from ..base.settings import join_timeout_setting, rendezvous_setting, without_invalid
from ..detection import inherited
from ..detection.detect import refuse_unless_rank
from ..detection.order import LAUNCHERS
from ..detection.placement import Placement

# What the processes that multiprocessing starts below each rank lead to, if they call `init`
_OF_RANKS = ("duplicate-rank", "missing-rank")
_CALL_ABOVE = (
    "multiprocessing started this process: if the launcher gave its rank to the process above it, "
    "call init() there"
)


def refuse_process(placement: Placement, outer: inherited.InheritedEnv) -> None:
    """Refuse a process that is not, or need not be, the rank that its environment says."""
    if placement.world_size > 1 and not _is_of_rank(outer):
        # A DataLoader worker or a subprocess, which inherits the environment of its rank
        raise already_joined(outer.joined, ", which started this one")
    launcher = LAUNCHERS[placement.launcher]
    if launcher.unsupported_reason:
        raise DistbootError(
            "unsupported-launcher",
            f"distboot.init() does not work under {launcher.title}: the other processes do not "
            "exist yet",
            launcher.unsupported_reason,
        )
    refuse_unless_rank(placement)


def _is_of_rank(outer: inherited.InheritedEnv) -> bool:
    """Whether no other process has joined as the rank that this one inherits."""
    return outer.joined in (0, os.getpid())


def tell_others(
    error: DistbootError, placement: Placement, environ: Mapping[str, str], ranks: int = 0
) -> None:
    """Let the ranks that join learn why this one, or this agent of `ranks`, does not.

    Nothing happens where this process is alone, or must not or cannot join.
    """
    outer = inherited.about(placement, environ)
    if placement.world_size == 1 or outer.met or not _is_of_rank(outer):
        return
    from ..agent.joining import join_here  # here and below, as most ranks start
    from ..detection.export import require_master

    with suppress(DistbootError, OSError):
        if not ranks:
            refuse_unless_rank(placement)
        environ = without_invalid(environ)
        if not rendezvous_setting(environ):
            return
        with join_here(
            require_master(placement),
            environ,
            join_timeout_setting(environ),
            framework="none",
            on_cpu=True,
            problem=error,
            ranks=ranks,
        ):
            pass


def refuse_spawned(placement: Placement) -> None:
    """Refuse a child of multiprocessing without a rank: each of them would be rank 0 of 1."""
    if placement.has_launcher:
        return
    if _is_of_multiprocessing():
        raise DistbootError(
            "spawned-process",
            "multiprocessing started this process without a rank: it would be rank 0 of 1",
            "start the ranks with python -m distboot --nproc-per-node N script.py, without "
            "mp.spawn; or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each process before "
            "init(); or DISTBOOT_LAUNCHER=none where each is to be alone",
        )


@contextmanager
def with_hint_at_multiprocessing() -> Iterator[None]:
    """Errors in this block because of ranks that are there twice, or not at all, have its hint."""
    try:
        yield
    except DistbootError as error:
        if error.code not in _OF_RANKS or not _is_of_multiprocessing():
            raise
        hint = f"{_CALL_ABOVE}; or {error.hint}"
        raise DistbootError(error.code, error.message, hint).of(error.who) from None


def _is_of_multiprocessing() -> bool:
    """Whether multiprocessing has started this process."""
    multiprocessing = sys.modules.get("multiprocessing")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


def refuse_ray_worker(placement: Placement) -> None:
    """Refuse a worker of Ray Train without a rank: each of them would be rank 0 of 1.

    TorchTrainer sets RANK, WORLD_SIZE and the others in each worker. DataParallelTrainer sets nothing, and only
    Ray's own context has the number of workers (ray 2.60, ray/train/v2/api/context.py).
    """
    if placement.has_launcher:
        return
    world_size = _ray_workers()
    if world_size > 1:
        raise DistbootError(
            "not-alone",
            f"no launcher numbers this process, and Ray Train says that it is one of {world_size} "
            "workers",
            "use TorchTrainer with distboot.init('none'); or set RANK and WORLD_SIZE from "
            "ray.train.get_context(), and MASTER_ADDR and MASTER_PORT, in each worker before "
            "init(); or DISTBOOT_LAUNCHER=none where each is to be alone",
        )


def _ray_workers() -> int:
    """The workers of the training function of Ray Train that this process runs; 1: it runs none."""
    train = sys.modules.get("ray.train")
    if train is None:
        return 1
    world_size: object = None
    with suppress(Exception):  # outside of a training function; in one of Ray Tune; half imported
        world_size = train.get_context().get_world_size()
    if isinstance(world_size, int):
        return world_size
    return 1
