"""GPUs that are not there, for every Python that has this folder on its path: `bench/gpu.py` is tried with them.

torch counts them as CUDA does and keeps on the CPU what is to be on one of them, NCCL is Gloo, and of the driver there
are the files, in a folder. What distboot does with all that is real; the figures of such a run mean nothing.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from distboot.host import accelerators
from distboot.tools.doctor import machine

_ROOT = Path(os.environ["STAND_IN_ROOT"])  # where the driver's files are
# "apart": gradients are not averaged; "named": torch has other UUIDs
_FAULT = os.environ.get("STAND_IN_FAULT")
_GPUS = sorted(
    line.split()[-1]
    for path in _ROOT.glob("proc/driver/nvidia/gpus/*/information")
    for line in path.read_text().splitlines()
    if line.startswith("GPU UUID")
)


def _visible() -> list[str]:
    """UUIDs, up to the first word that names no device; of MIG devices CUDA shows the first only."""
    choice = os.environ.get("CUDA_VISIBLE_DEVICES")
    if choice is None:
        return _GPUS
    if choice.startswith("MIG-"):
        return [choice.split(",")[0]]
    found: list[str] = []
    for word in choice.split(","):
        named = [
            gpu
            for index, gpu in enumerate(_GPUS)
            if word == str(index) or (word and gpu.startswith(word))
        ]
        if len(named) != 1:
            break
        found += named
    return found


class _AfterTorch(MetaPathFinder):
    """Changes torch when it has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def then_change(module: ModuleType) -> None:
            execute(module)
            _change(module)

        spec.loader.exec_module = then_change  # type: ignore[method-assign]
        return spec


def _change(torch: Any) -> None:
    cuda = torch.cuda
    dist = torch.distributed
    current = [0]
    backend = [""]
    begin = dist.init_process_group
    prefix = "0" if _FAULT == "named" else ""

    def set_device(device: Any) -> None:
        current[0] = getattr(device, "index", device)

    def init_process_group(name: str, **options: Any) -> None:
        backend[0] = name
        begin("gloo", **options)

    torch.version.cuda = "0.0"
    cuda.nccl.version = lambda: (0, 0)
    cuda.is_available = lambda: bool(_visible())
    cuda.device_count = lambda: len(_visible())
    cuda.get_device_name = lambda _: "stand-in"
    cuda.get_device_properties = lambda index: SimpleNamespace(
        uuid=prefix + _visible()[index].partition("-")[2]
    )
    cuda.set_device = set_device
    cuda.current_device = lambda: current[0]
    cuda.synchronize = lambda: None
    dist.is_backend_available = ("gloo", "nccl").__contains__
    dist.init_process_group = init_process_group
    dist.get_backend = lambda: backend[0]
    if _FAULT == "apart":
        torch.nn.parallel.DistributedDataParallel = lambda module: module
    _on_cpu(torch)


def _on_cpu(torch: Any) -> None:
    """Let whatever torch is told to put on CUDA be on the CPU."""

    def moved(value: Any) -> Any:
        return "cpu" if isinstance(value, torch.device) and value.type == "cuda" else value

    class OnCpu(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, function: Any, _: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return function(
                *map(moved, args), **{name: moved(value) for name, value in (kwargs or {}).items()}
            )

    OnCpu().__enter__()


machine.Machine = partial(machine.Machine, root=_ROOT, packages=["site"])  # type: ignore[misc,assignment]
accelerators.visible.__defaults__ = accelerators.nvidia_driver.__defaults__ = (_ROOT,)
sys.meta_path.insert(0, _AfterTorch())
