"""Which GPUs TensorFlow sees in a rank: by default it takes all of the node, in every process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..accelerators import own_index
from ..errors import DistbootError
from ..rollcall.meeting import Meeting
from ._options import Options
from ._tf_cluster import PARAMETER_SERVER, Plan


def own_gpus(tf: Any, meeting: Meeting, plan: Plan, options: Options, environ: Mapping[str, str]) -> list[int]:
    """Leave this rank all GPUs of its node, or one of them if several of the ranks there use some.

    Args:
        tf: TensorFlow, whose runtime is not up yet.
        meeting: of all ranks.
        plan: of the cluster.
        options: of the caller of `init`.
        environ: the environment as the launcher or the user gave it.

    Returns:
        Their indexes.

    Raises:
        DistbootError: `too-few-accelerators`.
    """
    found = tf.config.list_physical_devices("GPU")
    own = list(range(len(found)))
    if not found or plan.is_alone:
        return own
    # The chief of parameter servers does not compute, and variables are on the CPU of a ps.
    idle = ("chief", "ps") if options.strategy == PARAMETER_SERVER else ()
    users = [rank for rank in _here(meeting) if plan.kinds[rank] not in idle]
    rank = meeting.placement.rank
    if rank not in users:
        own = []
    elif len(users) > 1:
        index = own_index(len(found), environ, users.index(rank))
        if index is None:
            raise DistbootError(
                "too-few-accelerators",
                f"{len(users)} ranks of this node use GPUs, and this one sees {len(found)}",
                "start fewer processes a node (TensorFlow uses all GPUs of a node in one), or show them more devices; "
                "CUDA_VISIBLE_DEVICES= trains on the CPU",
            )
        own = [index]
    if len(own) < len(found):
        tf.config.set_visible_devices([found[index] for index in own], "GPU")
    return own


def _here(meeting: Meeting) -> list[int]:
    """The ranks of this node, in the order of local ranks."""
    placement, roster = meeting.placement, meeting.roster
    if roster is not None:
        return list(roster.nodes[roster.node_of()[placement.rank]])
    # The roll call is off, and these are the numbers of TF_CONFIG, or of a launcher that counts nodes one by one.
    first = placement.rank - (placement.local_rank or 0)
    return list(range(first, first + (placement.local_world_size or 1)))
