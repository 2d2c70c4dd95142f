"""`DistbootEnvironment`: PyTorch Lightning's Trainer and Fabric under every launcher that distboot knows.

    from distboot.lightning import DistbootEnvironment
    trainer = Trainer(plugins=[DistbootEnvironment()], devices=4, num_nodes=2)

Lightning chooses the devices and starts the process group itself; this says who is who, once all ranks have met.
Under the wrapper (`python -m distboot train.py`) no plugin is needed. With it, and after `init`, too, a Trainer of
another size than the job is refused: Lightning looks for callbacks in what is installed, and finds ours.
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
from .detection.detect import OFF
from .frameworks._base import at_end
from .frameworks._process_group import end_group
from .initialize import current, init

# One and the same code in two packages: `lightning`, and `pytorch_lightning` with `lightning_fabric`.
_HOMES = ("lightning.fabric.plugins.environments", "lightning_fabric.plugins.environments")
_TRAINERS = ("lightning.pytorch", "pytorch_lightning")


class DistbootEnvironment:
    """A `ClusterEnvironment` of Lightning, with the exact numbers of all ranks.

    It uses the context of a `distboot.init("torch")` before it, and its process group; else it calls `init("none")`.

    Attributes:
        context: this process's place in the job.

    Raises:
        DistbootError: as `init`; or, from Lightning, `usage`: `devices` and `num_nodes` are not those of the job.
    """

    def __init__(self) -> None:
        _register()
        context = current()
        # Which have a group for Lightning
        if context is None or context.framework not in ("torch", "deepspeed"):
            context = init("none")
        self.context: Context = context
        self._is_asked = False
        if self.context.world_size > 1:
            at_end(well=self._leave, exited=self._leave)

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
        """Lightning is to use it on request only."""
        return False

    def world_size(self) -> int:
        return self.context.world_size

    def set_world_size(self, size: int) -> None:
        """Lightning says how many ranks it is set up for."""
        self._is_asked = True
        if size != self.context.world_size:
            raise self._mismatch(f"devices × num_nodes = {size}")

    def global_rank(self) -> int:
        return self.context.rank

    def set_global_rank(self, rank: int) -> None:
        """Lightning counts as if every node had the same number of ranks, in order. We know better."""

    def local_rank(self) -> int:
        return self.context.local_rank

    def node_rank(self) -> int:
        return self.context.node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuse what does not fit the job: Lightning would wait for ranks that do not exist, or leave some out."""
        enough = num_devices >= self.context.local_world_size
        if num_devices * num_nodes != self.context.world_size or not enough:
            raise self._mismatch(f"devices={num_devices} on each of num_nodes={num_nodes}")

    def teardown(self) -> None:
        """Nothing: the Trainer may go on to test what it has trained."""

    def _mismatch(self, given: str) -> DistbootError:
        found = (
            f"the job has {self.context.world_size} on {counted(self.context.num_nodes, 'node')}"
        )
        problem = f"{given} are not the ranks of this job: {found}"
        return DistbootError("usage", problem, self._fitting()).of(who_of(self.context))

    def _fitting(self) -> str:
        """What fits the job, as a hint."""
        each, nodes, world_size = (
            self.context.local_world_size,
            self.context.num_nodes,
            self.context.world_size,
        )
        if each * nodes == world_size:
            return f"Trainer(devices={each}, num_nodes={nodes}), or start another number of ranks"
        return f"start as many ranks on every node as on any other; on CPUs devices={world_size}, num_nodes=1 does, too"

    def _leave(self) -> None:
        context = self.context
        # With one device Lightning never asks for the other ranks
        if not self._is_asked and context.is_main:
            problem = f"Lightning was set up for one device, and each of the {context.world_size} ranks worked alone"
            log_line(who_of(context), f"warning: {problem}: {self._fitting()}")
        dist = sys.modules.get("torch.distributed")
        # Lightning leaves its group on Gloo as it is, and one of eight short scripts on torch 2.13 was then aborted.
        if (
            dist is not None
            and dist.is_available()
            and dist.is_initialized()
            and dist.get_backend() == "gloo"
        ):
            end_group(dist, dist.destroy_process_group)


def callbacks() -> list[object]:
    """What Lightning adds to every Trainer (the entry points in pyproject.toml): a check of its size, in a job of ours.

    With one device, or with FSDP, Lightning compares nothing itself: each rank would train a model of its own, or with
    the batches of another number of ranks.
    """
    _, ours = inherited.strip(os.environ)
    home = next((sys.modules[name] for name in _TRAINERS if name in sys.modules), None)
    # Another WORLD_SIZE is that of a launcher further in.
    job = ours.fields
    if not job or home is None or os.environ.get("WORLD_SIZE") != str(job["world_size"]):
        return []

    class SizeCheck(home.Callback):  # type: ignore[name-defined, misc]
        def setup(self, trainer: Any, module: object, stage: str) -> None:  # noqa: ARG002 - as Lightning calls it
            size = trainer.num_devices * trainer.num_nodes
            # To test on one device is what Lightning recommends
            if size != job["world_size"] and stage == "fit":
                raise DistbootError(
                    "usage",
                    f"devices × num_nodes = {size} are not the ranks of this job, which has {job['world_size']}",
                    f"Trainer(devices={job.get('local_world_size')}, num_nodes={job.get('num_nodes')}), or start "
                    f"another number of ranks; DISTBOOT_LAUNCHER={OFF} for separate training runs",
                ).of(None if job["world_size"] == 1 else f"rank {job['rank']}")

    return [SizeCheck()]


def _register() -> None:
    """Make it what Lightning looks for, in the one that the script has imported; or in all, if none yet."""
    loaded = [home for home in _HOMES if home in sys.modules]
    homes = loaded or [home for home in _HOMES if find_spec(home.partition(".")[0]) is not None]
    if not homes:
        raise DistbootError(
            "framework-not-installed",
            "Lightning is not installed in this Python",
            "pip install lightning",
        )
    for home in homes:
        import_module(home).ClusterEnvironment.register(DistbootEnvironment)
