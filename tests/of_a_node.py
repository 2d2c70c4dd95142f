"""Launches of one process a node, as the files and pages show them: how many ranks each starts, and what it knows."""

from __future__ import annotations

from distboot import Placement
from distboot.nodes import refuse_several_here

ENTRYPOINT = ["python", "-m", "distboot", "run"]


def processes_a_node(command: list[str]) -> int:
    """What a command of ours says that each node is to run."""
    assert command[:4] == ENTRYPOINT
    return int(next(word for word in command if word.startswith("--nproc-per-node=")).partition("=")[2])


def stands_for_a_node(placement: Placement, environ: dict[str, str]) -> tuple[object, ...]:
    """What the agents that --nproc-per-node starts get to know."""
    refuse_several_here(placement, environ)
    return placement.rank, placement.world_size, placement.master_addr, placement.master_port
