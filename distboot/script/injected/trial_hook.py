"""Looks on, in every Python of a job that is tried: which device each rank takes, where its group meets, and MPI.

Without an accelerator `torch.cuda.set_device` does nothing here but tell.
"""
# ruff: noqa: INP001 - a folder of PYTHONPATH, and no package

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import re
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def install() -> None:
    """Look on from now on, and tell of MPI at the end."""
    sys.meta_path.insert(0, _Torch())
    atexit.register(_tell_of_mpi)


class _Torch:
    """Finds torch as it would be found, and sees it once it is there."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _look_on(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _look_on(torch: Any) -> None:
    set_device = torch.cuda.set_device

    @functools.wraps(set_device)
    def told(device: Any) -> None:
        number = device if isinstance(device, int) else torch.device(device).index
        _tell(device=number, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
        if torch.cuda.is_available():
            set_device(device)

    torch.cuda.set_device = told
    distributed = torch.distributed
    if not distributed.is_available():
        return
    begin = distributed.init_process_group

    @functools.wraps(begin)
    def told_of_group(*given: Any, **more: Any) -> Any:
        _tell(meets=str(more.get("init_method") or os.environ.get("MASTER_ADDR")))
        done = begin(*given, **more)
        _tell(size=distributed.get_world_size())
        return done

    distributed.init_process_group = distributed.distributed_c10d.init_process_group = told_of_group


def _tell_of_mpi() -> None:
    """Whether this process has called MPI_Init; at its end."""
    with contextlib.suppress(Exception), open("/proc/self/maps", encoding="utf-8") as file:
        import ctypes

        from ...base.procfs import MPI_LIBRARY  # here, as it loads more than a script needs

        for path in {line.split()[-1] for line in file if MPI_LIBRARY.search(line)}:
            flag = ctypes.c_int(0)
            ctypes.CDLL(path).MPI_Initialized(ctypes.byref(flag))
            if flag.value:
                _tell(mpi=True)


def _tell(**what: object) -> None:
    """One line of JSON about this rank, with the place in the script."""
    frame = sys._getframe(1)  # noqa: SLF001
    while frame.f_back is not None and re.search("/(torch|distboot)/", frame.f_code.co_filename):
        frame = frame.f_back
    at = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    path = os.path.join(os.environ["DISTBOOT_TRY"], f"rank-{os.environ.get('RANK', '0')}")
    with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({**what, "at": at}) + "\n")
