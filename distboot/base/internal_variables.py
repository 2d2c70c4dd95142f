"""Variables that one process of distboot sets for another; not for users."""

from __future__ import annotations

from typing import NamedTuple

# What the agent of a node sets for each of its ranks
RANK = (
    "DISTBOOT_RANK",
    "DISTBOOT_WORLD_SIZE",
    "DISTBOOT_LOCAL_RANK",
    "DISTBOOT_LOCAL_WORLD_SIZE",
    "DISTBOOT_NODE_RANK",
    "DISTBOOT_NUM_NODES",
)


class Internal(NamedTuple):
    """A variable as the reference describes it."""

    written: str  # by what, and for what
    help: str


INTERNAL = {
    "DISTBOOT_AGENT": Internal(
        "by the wrapper, for `init()` in its child",
        "the address of its agent, and the token for it",
    ),
    "DISTBOOT_CRASH_HOOKS": Internal(
        "by the wrapper, for Python in its child",
        "the pipe to which an uncaught exception is reported",
    ),
    "DISTBOOT_HOST": Internal(
        "by `try` and by the plugin for pytest",
        "the node name that a rank reports instead of the host's",
    ),
    "DISTBOOT_PLACEMENT": Internal(
        "by distboot, for an inner distboot",
        "the placement that was detected, and which variables were set. Do not set it",
    ),
    "DISTBOOT_PYTEST": Internal(
        "by the plugin for pytest, for the ranks of a test, whose `PYTEST_ADDOPTS` is empty",
        "the folder for their reports",
    ),
    "DISTBOOT_RESTART_COUNT": Internal(
        "by the wrapper, for the script",
        "how often the command was started again, the same on all ranks",
    ),
    "DISTBOOT_TRY": Internal(
        "by `try`",
        "the folder in which its hook records the device that each rank takes",
    ),
}
