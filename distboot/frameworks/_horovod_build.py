"""What Horovod was built with: found out from its module, or, without importing torch or TensorFlow, from its files."""

from __future__ import annotations

import ctypes
import mmap
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import DistbootError

# Horovod's extensions (0.28.1) import the first only if they have MPI, and contain the second only if they have Gloo.
_OF_MPI, _OF_GLOO = b"\0MPI_Init_thread\0", b"HOROVOD_GLOO_RENDEZVOUS_ADDR\0"
_LONGEST = 8192  # characters: MPI_MAX_LIBRARY_VERSION_STRING of MPICH; Open MPI's is shorter


@dataclass(frozen=True, slots=True)
class Build:
    """What Horovod was built with.

    Attributes:
        mpi: whether with MPI.
        gloo: whether with Gloo.
        library: what its MPI says of itself, for example "Open MPI v4.1.4"; None: it has none, or was not asked.
    """

    mpi: bool
    gloo: bool
    library: str | None = None


def of_module(hvd: Any) -> Build:
    """The build of a module that is imported, and has loaded its MPI."""
    mpi = bool(hvd.mpi_built())
    return Build(mpi, bool(hvd.gloo_built()), _says(None) if mpi else None)


def of_files(*, ask_mpi: bool) -> Build:
    """The build that is installed.

    Args:
        ask_mpi: whether its MPI is to say what it is.

    Raises:
        DistbootError: `framework-not-installed`.
    """
    file = _extensions("*", "a framework", "HOROVOD_WITH_PYTORCH=1 or HOROVOD_WITH_TENSORFLOW")[0]
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        mpi, gloo = data.find(_OF_MPI) >= 0, data.find(_OF_GLOO) >= 0
    path = _mpi_of(file) if mpi and ask_mpi else None
    return Build(mpi, gloo, None if path is None else _says(path))


def require(part: str, flag: str) -> None:
    """Refuse a Horovod without its part for a framework: importing that would only print a warning.

    Args:
        part: "torch" or "tensorflow".
        flag: with which Horovod is built for it, for example "HOROVOD_WITH_PYTORCH".

    Raises:
        DistbootError: `framework-not-installed`.
    """
    _extensions(part, part, flag)


def mpi_has_ended() -> bool:
    """Whether MPI has been started and ended in this process, which it allows once."""
    flag = ctypes.c_int()
    with suppress(AttributeError):  # there is none
        ctypes.CDLL(None).MPI_Finalized(ctypes.byref(flag))
    return bool(flag)


def rebuild(flag: str) -> str:
    """How to get a Horovod that was built with this flag."""
    return f"{flag}=1 pip install --no-cache-dir --force-reinstall horovod"


def _extensions(part: str, what: str, flag: str) -> list[Path]:
    """The files of Horovod that were compiled for a framework; at least one."""
    spec = find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        raise DistbootError("framework-not-installed", "horovod is not installed in this Python", rebuild(flag))
    found = sorted(Path(spec.submodule_search_locations[0]).glob(f"{part}/mpi_lib*.so"))
    if not found:
        raise DistbootError(
            "framework-not-installed",
            f"this Horovod was built without its part for {what} ({flag}=1)",
            f"build it again where {what} is installed: {rebuild(flag)}",
        )
    return found


def _mpi_of(extension: Path) -> str | None:
    """The MPI library that the dynamic linker finds for an extension."""
    with suppress(OSError, subprocess.TimeoutExpired):
        command = ["ldd", str(extension)]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
        # libmpi.so.40 => /usr/lib/x86_64-linux-gnu/libmpi.so.40 (0x00007f0d0c400000); what is preloaded has no arrow
        found = re.search(r"(/\S*/libmpi(?:ch)?\.so\S*) \(0x", listed)
        return None if found is None else found[1]
    return None


def _says(library: str | None) -> str | None:
    """Name and version of an MPI library, which it tells also before MPI has begun; None: of the one that is loaded."""
    text, length = ctypes.create_string_buffer(_LONGEST), ctypes.c_int()
    try:
        ctypes.CDLL(library).MPI_Get_library_version(text, ctypes.byref(length))
    except (OSError, AttributeError):
        return None
    # "Open MPI v4.1.4, package: Debian OpenMPI, …"; "MPICH Version:      4.0.2\nMPICH Release date: …"
    first = text.value.decode(errors="replace").partition("\n")[0].partition(",")[0]
    return " ".join(first.split()) or None
