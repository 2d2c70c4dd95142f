"""`DistbootEnvironment`: PyTorch Lightning's Trainer and Fabric under every launcher of distboot.

    from distboot.lightning import DistbootEnvironment
    trainer = Trainer(plugins=[DistbootEnvironment()], devices=4, num_nodes=2)

Lightning chooses the devices and starts the process group itself. This plugin tells it the numbers
of all ranks, once they have met. Under the wrapper (`python -m distboot train.py`) no plugin is
needed. There, and after `init`, a Trainer of a different size than the job is refused, too:
Lightning calls the `callbacks` below, because pyproject.toml has an entry point for them.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .base.errors import DistbootError
from .base.text import counted, log_line
from .context import Context, who_of
from .detection import inherited
from .detection.placement import OFF
from .frameworks._process_group import end_gloo_group
from .initialize import current, init
from .script.sys_exit import at_end

# The same code in two packages: `lightning`, and `pytorch_lightning` with `lightning_fabric`.
_HOMES = ("lightning.fabric.plugins.environments", "lightning_fabric.plugins.environments")
_TRAINERS = ("lightning.pytorch", "pytorch_lightning")

_WITH_GROUP = ("torch", "deepspeed")  # frameworks that have started a group for Lightning


class DistbootEnvironment:
    """A `ClusterEnvironment` of Lightning, with the exact numbers of all ranks.

    It uses the context of an earlier `distboot.init("torch")`, and its process group; without one
    it calls `init("none")`.

    Attributes:
        context: this process's place in the job.

    Raises:
        DistbootError: as `init`; or, from Lightning, `usage`: `devices` and `num_nodes` are not
            those of the job.
    """

    def __init__(self) -> None:
        _register()
        context = current()
        if context is None or context.framework not in _WITH_GROUP:
            context = init("none")
        self.context: Context = context
        self._knows_size = False  # whether Lightning has named its number of ranks
        if self.context.world_size > 1:
            at_end(
                well=self._leave,
                exited=self._leave,
            )

    @property
    def creates_processes_externally(self) -> bool:
        """Lightning need not start any."""
        return True

    @property
    def main_address(self) -> str:
        return self.context.master_addr

    @property
    def main_port(self) -> int:
        return self.context.master_port

    @staticmethod
    def detect() -> bool:
        """Whether Lightning uses this plugin without a request."""
        return False

    def world_size(self) -> int:
        return self.context.world_size

    def set_world_size(self, size: int) -> None:
        """Compare the number of ranks that Lightning is set up for."""
        self._knows_size = True
        if size != self.context.world_size:
            raise self._mismatch(f"devices × num_nodes = {size}")

    def global_rank(self) -> int:
        return self.context.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignore the rank of Lightning, which counts as if every node had the same number."""

    def local_rank(self) -> int:
        return self.context.local_rank

    def node_rank(self) -> int:
        return self.context.node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuse a size that is not the job's.

        Lightning would wait for ranks that do not exist, or leave some out.
        """
        given = f"devices={num_devices} on each of num_nodes={num_nodes}"
        if num_devices < self.context.local_world_size:
            raise self._mismatch(given)
        if num_devices * num_nodes != self.context.world_size:
            raise self._mismatch(given)

    def teardown(self) -> None:
        """Keep everything: the Trainer may go on to test the model that it has trained."""

    def _mismatch(self, given: str) -> DistbootError:
        nodes = counted(self.context.num_nodes, "node")
        problem = (
            f"{given} are not the ranks of this job: the job has {self.context.world_size} on "
            f"{nodes}"
        )
        error = DistbootError(
            "usage",
            problem,
            self._remedy(),
        )
        return error.of(who_of(self.context))

    def _remedy(self) -> str:
        """The arguments that fit the job."""
        local_world_size = self.context.local_world_size
        num_nodes = self.context.num_nodes
        world_size = self.context.world_size
        if local_world_size * num_nodes == world_size:
            return (
                f"Trainer(devices={local_world_size}, num_nodes={num_nodes}), or start another "
                "number of ranks"
            )
        return (
            "start as many ranks on every node as on any other; on CPUs "
            f"devices={world_size}, num_nodes=1 does, too"
        )

    def _leave(self) -> None:
        context = self.context
        # With one device Lightning never asks for the other ranks
        is_set_up_for_one = not self._knows_size
        if is_set_up_for_one and context.is_main:
            log_line(
                who_of(context),
                "warning: Lightning was set up for one device, and each of the "
                f"{context.world_size} ranks worked alone: {self._remedy()}",
            )
        # Lightning leaves its group on Gloo as it is, and one of eight short scripts on torch 2.13
        # was aborted at its end
        end_gloo_group()


def callbacks() -> list[object]:
    """What Lightning adds to every Trainer: in a job of distboot, a check of its size.

    With one device, or with FSDP, Lightning compares nothing itself: each rank would train a model
    of its own, or with the batches of a different number of ranks.
    """
    home: Any = next(filter(None, map(sys.modules.get, _TRAINERS)), None)
    job = _job()
    if home is None or not job:
        return []

    class SizeCheck(home.Callback):  # type: ignore[misc]
        def setup(self, trainer: Any, module: object, stage: str) -> None:
            del module  # Lightning passes it
            # Lightning recommends to test on one device
            if stage == "fit":
                _refuse_size(trainer.num_devices * trainer.num_nodes, job)

    return [SizeCheck()]


def _job() -> dict[str, Any]:
    """The numbers that distboot exported; empty without it, or below a further launcher."""
    _, outer = inherited.restored(os.environ)
    # A different WORLD_SIZE is that of a launcher further in
    if os.environ.get("WORLD_SIZE") != str(outer.fields.get("world_size")):
        return {}
    return dict(outer.fields)


def _refuse_size(size: int, job: dict[str, Any]) -> None:
    if size == job["world_size"]:
        return
    who = None
    if job["world_size"] != 1:
        who = f"rank {job['rank']}"
    raise DistbootError(
        "usage",
        f"devices × num_nodes = {size} are not the ranks of this job, which has "
        f"{job['world_size']}",
        f"Trainer(devices={job.get('local_world_size')}, num_nodes={job.get('num_nodes')}), or "
        f"start another number of ranks; DISTBOOT_LAUNCHER={OFF} for separate training runs",
    ).of(who)


def _is_installed(home: str) -> bool:
    return find_spec(home.partition(".")[0]) is not None


def _register() -> None:
    """Make this class a `ClusterEnvironment` of the Lightning that the script has imported.

    If it has imported none yet: of all that are installed.
    """
    homes = list(filter(sys.modules.__contains__, _HOMES))
    if not homes:
        homes = list(filter(_is_installed, _HOMES))
    if not homes:
        raise DistbootError(
            "framework-not-installed",
            "Lightning is not installed in this Python",
            "pip install lightning",
        )
    for home in homes:
        import_module(home).ClusterEnvironment.register(DistbootEnvironment)
