"""Horovod as it is installed: what it was built with, its module for a framework, and whether it uses MPI or Gloo."""

from __future__ import annotations

import ctypes
import mmap
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ..base.errors import DistbootError
from ..base.text import log_line, short_repr
from ..detection.launchers.records import MPI_LAUNCHERS
from ..detection.placement import Placement
from ._base import imported, in_our_words
from ._torch import device_id, set_device

# Horovod's extensions (0.28.1) import the first only if they have MPI, and contain the second only if they have Gloo.
_OF_MPI, _OF_GLOO = b"\0MPI_Init_thread\0", b"HOROVOD_GLOO_RENDEZVOUS_ADDR\0"
_LONGEST = 8192  # characters: MPI_MAX_LIBRARY_VERSION_STRING of MPICH; Open MPI's is shorter

# Name of a framework -> Horovod's module for it, what that is compiled for, and the flag for it. Of the two modules for
# Keras, `horovod.keras` is about the package keras, which is Keras 3 by now.
_MODULES = {
    "horovod.torch": ("horovod.torch", "torch", "HOROVOD_WITH_PYTORCH"),
    "horovod.tensorflow": ("horovod.tensorflow", "tensorflow", "HOROVOD_WITH_TENSORFLOW"),
    "horovod.keras": ("horovod.tensorflow.keras", "tensorflow", "HOROVOD_WITH_TENSORFLOW"),
}
_LEGACY_KERAS = "TF_USE_LEGACY_KERAS"

# Where asking for MPI can make sense: what srun starts may find an MPI that fits it or not, and nothing says so before.
_MAY_START_MPI = (*MPI_LAUNCHERS, "slurm", "pals", "lsf", "flux")
SAME_MPI = (
    "start the job with the mpirun of that MPI, or build Horovod with the MPI of the launcher"
)


class Build(NamedTuple):
    """What Horovod was built with."""

    mpi: bool
    gloo: bool
    # Its MPI, for example "Open MPI v4.1.4"; None: it has none, or was not asked
    library: str | None = None


def of_module(hvd: Any) -> Build:
    """The build of a module that is imported, and has loaded its MPI."""
    mpi = bool(hvd.mpi_built())
    return Build(mpi, bool(hvd.gloo_built()), _says(None) if mpi else None)


def of_files(*, ask_mpi: bool) -> Build:
    """The build that is installed, and on request what its MPI is."""
    file = _extensions("*", "a framework", "HOROVOD_WITH_PYTORCH=1 or HOROVOD_WITH_TENSORFLOW")[0]
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        mpi, gloo = data.find(_OF_MPI) >= 0, data.find(_OF_GLOO) >= 0
    path = _mpi_of(file) if mpi and ask_mpi else None
    return Build(mpi, gloo, None if path is None else _says(path))


def mpi_has_ended() -> bool:
    """Whether MPI has been started and ended in this process, which it allows once."""
    flag = ctypes.c_int()
    with suppress(AttributeError):  # MPI is not loaded
        ctypes.CDLL(None).MPI_Finalized(ctypes.byref(flag))
    return bool(flag)


def rebuild(flag: str) -> str:
    """How to get a Horovod that was built with this flag."""
    return f"{flag}=1 pip install --no-cache-dir --force-reinstall horovod"


def _extensions(part: str, what: str, flag: str) -> list[Path]:
    """The files of Horovod that were compiled for a framework; at least one."""
    spec = find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        raise DistbootError(
            "framework-not-installed", "horovod is not installed in this Python", rebuild(flag)
        )
    found = sorted(Path(spec.submodule_search_locations[0]).glob(f"{part}/mpi_lib*.so"))
    if not found:
        problem = f"this Horovod was built without its part for {what} ({flag}=1)"
        hint = f"build it again where {what} is installed: {rebuild(flag)}"
        raise DistbootError("framework-not-installed", problem, hint)
    return found


def _mpi_of(extension: Path) -> str | None:
    """The MPI library that the dynamic linker finds for an extension."""
    command = ["ldd", str(extension)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # libmpi.so.40 => /usr/lib/x86_64-linux-gnu/libmpi.so.40 (0x00007f0d0c400000); what is preloaded has no arrow
    found = re.search(r"(/\S*/libmpi(?:ch)?\.so\S*) \(0x", done.stdout)
    return None if found is None else found[1]


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


def keras_variables(framework: str, environ: Mapping[str, str]) -> dict[str, str | None]:
    """What must be set before the framework is imported, unless the user has set it."""
    is_unset = framework == "horovod.keras" and _LEGACY_KERAS not in environ
    return {_LEGACY_KERAS: "1"} if is_unset else {}


def load(framework: str) -> Any:
    """Horovod's module for a framework, not started yet."""
    name, part, flag = _MODULES[framework]
    # Importing a Horovod without its part for a framework would only print a warning
    _extensions(part, part, flag)
    user = imported(part)
    with _legacy_keras(user) if framework == "horovod.keras" else nullcontext():
        hvd = imported(name, rebuild(flag))
    if hvd.is_initialized():
        hint = "make distboot.init() the first line of the script, and remove its hvd.init()"
        raise DistbootError("already-initialized", "Horovod has been started already", hint)
    return hvd


def set_own_device(
    hvd: Any, placement: Placement, environ: Mapping[str, str]
) -> tuple[Any, str | None]:
    """The device of this rank for torch, which is the current one from now on, and its id."""
    torch = imported("torch")
    has_gpus = torch.cuda.is_available()
    if has_gpus and not (hvd.cuda_built() or hvd.rocm_built()):
        raise DistbootError(
            "backend-not-available",
            "this host has GPUs, and this Horovod was built without them (HOROVOD_GPU_OPERATIONS=NCCL)",
            f"build it again: {rebuild('HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_WITH_PYTORCH')}; or hide the GPUs to "
            "train on the CPU: CUDA_VISIBLE_DEVICES=",
        )
    kind, on_cpu = "cuda" if has_gpus else "cpu", "hide them (CUDA_VISIBLE_DEVICES=)"
    found = set_device(torch, kind, placement, environ, on_cpu)
    return found, device_id(torch, found)


@contextmanager
def _legacy_keras(tensorflow: Any) -> Iterator[None]:
    """Horovod's module says `from keras import backend`: let it get that of tf.keras, which has to be legacy Keras."""
    problem = "horovod.keras needs legacy Keras"
    with in_our_words("framework-not-installed", problem, "pip install tf-keras", ImportError):
        # Legacy Keras does not say it there
        version = getattr(tensorflow.keras, "__version__", "2")
    if not version.startswith("2"):
        raise DistbootError(
            "framework-not-installed",
            f"horovod.keras needs legacy Keras, and tf.keras is Keras {version} here",
            f"set {_LEGACY_KERAS}=1 before anything uses tf.keras, with tf-keras installed; or make distboot.init() "
            "the first line of the script, which sets it",
        )
    before = sys.modules.get("keras")
    if "tf_keras" in sys.modules:
        sys.modules["keras"] = sys.modules["tf_keras"]
    try:
        yield
    finally:
        sys.modules.pop("keras", None)
        if before is not None:
            sys.modules["keras"] = before


def controller(
    build: Build, placement: Placement, environ: Mapping[str, str], backend: str | None = None
) -> str:
    """What Horovod's processes talk with: "mpi" where an MPI launcher has started theirs, everywhere else "gloo"."""
    asked, by = _asked(environ, backend)
    stranger = _stranger(build, placement, environ)
    if asked == "mpi":
        _refuse_mpi(build, placement, stranger, by)
        return "mpi"
    # A process on its own is free to start MPI
    alone = placement.world_size == 1 and not build.gloo
    if (
        asked is None
        and build.mpi
        and (alone or (placement.launcher in MPI_LAUNCHERS and stranger is None))
    ):
        return "mpi"
    if not build.gloo and stranger is not None and asked is None:
        raise DistbootError(
            "mpi-mismatch", stranger, f"{SAME_MPI}; or with Gloo: {rebuild('HOROVOD_WITH_GLOO')}"
        )
    by = by or f"launcher {placement.launcher!r} without MPI"
    if not build.gloo:
        raise _lacks("Gloo", "HOROVOD_WITH_GLOO", f"{by} needs it")
    operations = environ.get("HOROVOD_CPU_OPERATIONS", "")
    if operations.lower() == "mpi":
        problem = f"HOROVOD_CPU_OPERATIONS={short_repr(operations)} contradicts Gloo, which Horovod uses here ({by})"
        hint = "unset HOROVOD_CPU_OPERATIONS, or start the job with the mpirun of Horovod's MPI"
        raise DistbootError("broken-environment", problem, hint)
    if stranger is not None and asked is None and placement.rank == 0:
        log_line(placement.who, f"{stranger}; so Horovod uses Gloo")
    return "gloo"


def _asked(environ: Mapping[str, str], backend: str | None) -> tuple[str | None, str]:
    """What the user asks for, and with which words."""
    text = environ.get("HOROVOD_CONTROLLER", "")
    if text and text.lower() not in ("mpi", "gloo"):
        problem = f"HOROVOD_CONTROLLER={short_repr(text)} is neither mpi nor gloo"
        raise DistbootError("broken-environment", problem, "unset HOROVOD_CONTROLLER")
    if backend is None:
        return text.lower() or None, f"HOROVOD_CONTROLLER={short_repr(text)}" if text else ""
    option = f"backend={short_repr(backend)}"
    if backend.lower() not in ("mpi", "gloo"):
        raise DistbootError(
            "backend-not-available",
            f"{option}: Horovod has 'mpi' and 'gloo'",
            "leave backend out to get the right one; NCCL is used for what is on GPUs where Horovod was built with it",
        )
    if text and text.lower() != backend.lower():
        problem = f"HOROVOD_CONTROLLER={short_repr(text)} contradicts {option}"
        raise DistbootError("broken-environment", problem, "unset HOROVOD_CONTROLLER")
    return backend.lower(), option


def _refuse_mpi(build: Build, placement: Placement, stranger: str | None, by: str) -> None:
    """Refuse MPI, which the user asks for, where it is not available."""
    if not build.mpi:
        raise _lacks("MPI", "HOROVOD_WITH_MPI", f"{by} asks for it")
    if placement.world_size > 1 and placement.launcher not in _MAY_START_MPI:
        problem = f"{by} asks for MPI, and launcher {placement.launcher!r} does not start it: each rank would be alone"
        hint = "leave it out, and Horovod uses Gloo; or start the job with mpirun"
        code = "backend-not-available" if by.startswith("backend=") else "broken-environment"
        raise DistbootError(code, problem, hint)
    if stranger is not None:
        raise DistbootError(
            "mpi-mismatch",
            f"{by} asks for MPI, and {stranger}",
            f"{SAME_MPI}; or leave it out, and Horovod uses Gloo",
        )


def _lacks(what: str, flag: str, why: str) -> DistbootError:
    return DistbootError(
        "backend-not-available",
        f"this Horovod was built without {what} ({flag}=1), and {why}",
        f"build it again with {what}: {rebuild(flag)}",
    )


def _stranger(build: Build, placement: Placement, environ: Mapping[str, str]) -> str | None:
    """Why Horovod's MPI cannot work under this MPI launcher, where that is certain; None: it may.

    Each process would be in a world of its own, or end in MPI_Init. Measured: Open MPI 5.0.11 works under the mpirun
    of 4.1.4, but not the other way round; and none works under that of MPICH.
    """
    if build.library is None or placement.launcher not in MPI_LAUNCHERS:
        return None
    library = re.match(r"Open MPI v(\d+)", build.library)
    started = re.match(r"\d+", environ.get("OMPI_VERSION", "4"))  # which 5 is the first to set
    if placement.launcher != "openmpi":
        mpirun = placement.launcher if library is not None else None
    elif library is None:
        mpirun = "Open MPI"
    else:
        mpirun = (
            f"Open MPI {started[0]}"
            if started is not None and int(library[1]) < int(started[0])
            else None
        )
    return (
        mpirun
        and f"Horovod's MPI is {build.library}, which does not work under the mpirun of {mpirun}"
    )
