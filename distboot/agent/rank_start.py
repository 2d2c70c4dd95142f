"""What the wrapper holds for a rank before its process runs: the pipe of its crash hooks, its CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable

from ..script.crash_hooks import out_of_the_way


class RankStart:
    """One rank that the wrapper is to start."""

    def __init__(self, cpus: str) -> None:
        self.cpus = cpus  # to which it is bound: "0-3,8"; empty: to none
        # Whether its output has been passed on, where that goes through this process
        self.has_passed_on: Callable[[], bool] = lambda: True
        # Of the pipe of its crash hooks: our end, and the one that its process has to inherit
        self.reports, file = os.pipe()
        self.hooks = out_of_the_way(file)
        os.set_blocking(self.hooks, False)  # whatever this agent does, the child can end
        self._is_inheritable = True

    def close_hooks(self) -> None:
        """Close the end of the process: it has that, or never runs."""
        if self._is_inheritable:
            self._is_inheritable = False
            os.close(self.hooks)

    def variable(self) -> str:
        """How its process finds the pipe, and knows that it is this one."""
        inode = os.fstat(self.hooks).st_ino
        return f"{self.hooks}:{inode}"
