"""Horovod as it is installed: its module for a framework, and what it was built with."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ..base.errors import DistbootError
from ..detection.placement import Placement
from ._base import imported, raised_as
from ._torch import device_id, set_device

_LONGEST = 8192  # characters: MPI_MAX_LIBRARY_VERSION_STRING of MPICH; Open MPI's is shorter


class _Part(NamedTuple):
    """Horovod's part for a framework."""

    module: str
    framework: str  # that it is compiled for
    flag: str  # to compile it


# Of the two modules for Keras, `horovod.keras` is for the package keras, which is Keras 3 by now.
_PARTS = {
    "horovod.torch": _Part("horovod.torch", "torch", "HOROVOD_WITH_PYTORCH"),
    "horovod.tensorflow": _Part("horovod.tensorflow", "tensorflow", "HOROVOD_WITH_TENSORFLOW"),
    "horovod.keras": _Part("horovod.tensorflow.keras", "tensorflow", "HOROVOD_WITH_TENSORFLOW"),
}
_LEGACY_KERAS = "TF_USE_LEGACY_KERAS"


class Build(NamedTuple):
    """What Horovod was built with, as its own functions say."""

    mpi: bool
    gloo: bool
    library: str | None = None  # its MPI, for example "Open MPI v4.1.4"
    nccl: bool = False

    def describe(self) -> str:
        return (
            f"Horovod says mpi_built() {self.mpi}, gloo_built() {self.gloo}, "
            f"nccl_built() {self.nccl}"
        )


def of_module(hvd: Any) -> Build:
    """The build of a module that is imported."""
    mpi = bool(hvd.mpi_built())
    library = None
    if mpi:
        library = _library(_version_of_mpi())
    return Build(mpi, bool(hvd.gloo_built()), library, bool(hvd.nccl_built()))


# Prints the same for a process that must not import Horovod's framework itself.
_ASK = f"""
import ctypes, importlib, json, sys
hvd = importlib.import_module(sys.argv[1])
text = ctypes.create_string_buffer({_LONGEST})
if hvd.mpi_built():
    ctypes.CDLL(None).MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
text = text.value.decode(errors="replace")
print()
print(json.dumps([hvd.mpi_built(), hvd.gloo_built(), text, hvd.nccl_built()]))
"""


def asked(timeout: float) -> Build:
    """Ask the build that is installed. This takes as long as Horovod's import, in a new process."""
    extension = _extensions("*", "a framework", "HOROVOD_WITH_PYTORCH=1 or HOROVOD_WITH_TENSORFLOW")
    command = [sys.executable, "-c", _ASK, f"horovod.{extension[0].parent.name}"]
    problem = "Horovod cannot be imported"
    hint = "look at the installation on that host"
    with raised_as("framework-not-installed", problem, hint, OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        last_line = done.stderr.strip().rpartition("\n")[2]
        raise DistbootError(
            "framework-not-installed",
            f"{problem}: {last_line}",
            hint,
        )
    mpi, gloo, text, nccl = json.loads(done.stdout.splitlines()[-1])
    return Build(bool(mpi), bool(gloo), _library(text), bool(nccl))


def _version_of_mpi() -> str:
    """The version text of the MPI library that is loaded, which MPI has also before it starts."""
    text = ctypes.create_string_buffer(_LONGEST)
    with suppress(AttributeError):  # no MPI is loaded
        ctypes.CDLL(None).MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
    return text.value.decode(errors="replace")


def _library(text: str) -> str | None:
    """`"Open MPI v4.1.4"` of the version text of an MPI."""
    # "Open MPI v4.1.4, package: Debian OpenMPI, …"
    # "MPICH Version:      4.0.2\nMPICH Release date: …"
    first = text.partition("\n")[0].partition(",")[0]
    return " ".join(first.split()) or None


def mpi_has_ended() -> bool:
    """Whether MPI has been started and ended in this process, which it allows once."""
    flag = ctypes.c_int()
    with suppress(AttributeError):  # no MPI is loaded
        ctypes.CDLL(None).MPI_Finalized(ctypes.byref(flag))
    return bool(flag)


def rebuild(flag: str) -> str:
    """The command for a Horovod that is built with this flag."""
    return f"{flag}=1 pip install --no-cache-dir --force-reinstall horovod"


def _extensions(part: str, what: str, flag: str) -> list[Path]:
    """The files of Horovod that were compiled for a framework; at least one, torch's first."""
    spec = find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        raise DistbootError(
            "framework-not-installed",
            "horovod is not installed in this Python",
            rebuild(flag),
        )
    folder = Path(spec.submodule_search_locations[0])
    found = sorted(folder.glob(f"{part}/mpi_lib*.so"), reverse=True)
    if not found:
        raise DistbootError(
            "framework-not-installed",
            f"this Horovod was built without its part for {what} ({flag}=1)",
            f"build it again where {what} is installed: {rebuild(flag)}",
        )
    return found


def keras_variables(framework: str, environ: Mapping[str, str]) -> dict[str, str | None]:
    """The variables to set before the framework is imported, unless the user has set them."""
    if framework == "horovod.keras" and _LEGACY_KERAS not in environ:
        return {_LEGACY_KERAS: "1"}
    return {}


def load(framework: str) -> Any:
    """Import Horovod's module for a framework. Its `init` was not called yet."""
    part = _PARTS[framework]
    # Importing a Horovod without its part for a framework would only print a warning
    _extensions(part.framework, part.framework, part.flag)
    user = imported(part.framework)
    keras: Any = nullcontext()
    if framework == "horovod.keras":
        keras = _legacy_keras(user)
    with keras:
        hvd = imported(part.module, rebuild(part.flag))
    if hvd.is_initialized():
        raise DistbootError(
            "already-initialized",
            "Horovod has been started already",
            "make distboot.init() the first line of the script, and remove its hvd.init()",
        )
    return hvd


def set_own_device(
    hvd: Any, placement: Placement, environ: Mapping[str, str]
) -> tuple[Any, str | None]:
    """Make this rank's device torch's current one; return it and its id."""
    torch = imported("torch")
    kind = "cpu"
    if torch.cuda.is_available():
        kind = "cuda"
        _refuse_without_gpus(hvd)
    device = set_device(torch, kind, placement, environ, "hide them (CUDA_VISIBLE_DEVICES=)")
    return device, device_id(torch, device)


def _refuse_without_gpus(hvd: Any) -> None:
    if hvd.cuda_built() or hvd.rocm_built():
        return
    raise DistbootError(
        "backend-not-available",
        "this host has GPUs, and this Horovod was built without them (HOROVOD_GPU_OPERATIONS=NCCL)",
        f"build it again: {rebuild('HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_WITH_PYTORCH')}; or hide "
        "the GPUs to train on the CPU: CUDA_VISIBLE_DEVICES=",
    )


@contextmanager
def _legacy_keras(tensorflow: Any) -> Iterator[None]:
    """Let Horovod's `from keras import backend` import tf.keras, which must be legacy Keras."""
    problem = "horovod.keras needs legacy Keras"
    with raised_as("framework-not-installed", problem, "pip install tf-keras", ImportError):
        # Legacy Keras has no version here
        version = getattr(tensorflow.keras, "__version__", "2")
    if not version.startswith("2"):
        raise DistbootError(
            "framework-not-installed",
            f"horovod.keras needs legacy Keras, and tf.keras is Keras {version} here",
            f"set {_LEGACY_KERAS}=1 before anything uses tf.keras, with tf-keras installed; or "
            "make distboot.init() the first line of the script, which sets it",
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
