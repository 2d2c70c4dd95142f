"""Under `try`, in each Python of the job: notes what its rank does with its device, group and MPI.

Each note is a line of JSON in the rank's file in the folder DISTBOOT_TRY. Without an accelerator
`torch.cuda.set_device` is noted and has no other effect.
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
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NOT_OF_SCRIPT = re.compile("/(torch|distboot)/")


def install() -> None:
    """Watch torch from its import on, and MPI at the end."""
    sys.meta_path.insert(0, _Torch())
    atexit.register(_note_mpi)


class _Torch:
    """Finds torch as the finders after it do, and patches torch once its module has run."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None:
            return None
        if spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = functools.partial(  # type: ignore[method-assign]
                _execute_and_patch, execute
            )
        return spec


def _execute_and_patch(execute: Callable[[ModuleType], object], module: ModuleType) -> None:
    execute(module)
    torch: Any = module
    torch.cuda.set_device = _noted_device(torch)
    distributed = torch.distributed
    if distributed.is_available():
        start = _noted_group(distributed)
        distributed.init_process_group = start
        distributed.distributed_c10d.init_process_group = start


def _noted_device(torch: Any) -> Callable[[Any], None]:
    set_device = torch.cuda.set_device

    @functools.wraps(set_device)
    def noted(device: Any) -> None:
        number = device
        if not isinstance(device, int):
            number = torch.device(device).index
        _note(device=number, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
        if torch.cuda.is_available():
            set_device(device)

    return noted


def _noted_group(distributed: Any) -> Callable[..., Any]:
    start = distributed.init_process_group

    @functools.wraps(start)
    def noted(*given: Any, **more: Any) -> Any:
        address = str(more.get("init_method", *given[1:2]))
        scheme = address.partition("://")[0]
        if scheme in ("", "None", "env"):
            address = os.environ.get("MASTER_ADDR", "")
        _note(meets=address)
        done = start(*given, **more)
        _note(size=distributed.get_world_size())
        return done

    return noted


def _note_mpi() -> None:
    """At the end: note whether this process has called MPI_Init."""
    with contextlib.suppress(Exception):
        import ctypes

        for path in _mpi_libraries():
            flag = ctypes.c_int(0)
            ctypes.CDLL(path).MPI_Initialized(ctypes.byref(flag))
            if flag.value:
                _note(mpi=True)


def _mpi_libraries() -> set[str]:
    """The files of the MPI libraries in this process."""
    from ...base.process import MPI_LIBRARY  # here, as it loads more than a script needs

    with open("/proc/self/maps", encoding="utf-8") as file:
        return {line.split()[-1] for line in file if MPI_LIBRARY.search(line)}


def _note(**facts: object) -> None:
    """Append facts about this rank, with the line of the script that brought them about."""
    frame = sys._getframe(1)  # noqa: SLF001
    while frame.f_back is not None and _NOT_OF_SCRIPT.search(frame.f_code.co_filename):
        frame = frame.f_back
    at = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    path = os.path.join(os.environ["DISTBOOT_TRY"], f"rank-{os.environ.get('RANK', '0')}")
    with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({**facts, "at": at}) + "\n")
