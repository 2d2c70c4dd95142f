"""`python -m distboot --nproc-per-node`: a rank that the agent of its node has started.

The agent is not a daemon of another launcher: what started the agent is further out.
"""

from __future__ import annotations

from ...base.internal_variables import RANK
from . import Launcher, Numbers

DISTBOOT = Launcher(
    name="distboot",
    title="python -m distboot --nproc-per-node",
    source="captures of 0.1.0; distboot/cli/rounds.py",
    sample=(
        "DISTBOOT_RANK={rank} DISTBOOT_WORLD_SIZE={size} DISTBOOT_LOCAL_RANK={local} "
        "DISTBOOT_LOCAL_WORLD_SIZE={per_node} DISTBOOT_NODE_RANK={node} DISTBOOT_NUM_NODES={nodes}"
    ),
    markers=RANK[:2],
    numbers=Numbers(*RANK),
    mpi="no",
)
