"""Horovod's module for a framework: imported, with what it needs, and with the device of this rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..errors import DistbootError, first_line
from ..placement import Placement
from ._horovod_build import rebuild, require
from ._joined import imported
from ._torch_device import device_id, set_device

# Name of a framework -> Horovod's module for it, what that is compiled for, and the flag for it. Of the two modules for
# Keras, `horovod.keras` is about the package keras, which is Keras 3 by now.
_MODULES = {
    "horovod.torch": ("horovod.torch", "torch", "HOROVOD_WITH_PYTORCH"),
    "horovod.tensorflow": ("horovod.tensorflow", "tensorflow", "HOROVOD_WITH_TENSORFLOW"),
    "horovod.keras": ("horovod.tensorflow.keras", "tensorflow", "HOROVOD_WITH_TENSORFLOW"),
}
_LEGACY_KERAS = "TF_USE_LEGACY_KERAS"


def variables(framework: str, environ: Mapping[str, str]) -> dict[str, str | None]:
    """What must be set before the framework is imported, unless the user has set it."""
    is_unset = framework == "horovod.keras" and _LEGACY_KERAS not in environ
    return {_LEGACY_KERAS: "1"} if is_unset else {}


def module(framework: str) -> Any:
    """Horovod's module for a framework, not started yet.

    Raises:
        DistbootError: `framework-not-installed` or `already-initialized`.
    """
    name, part, flag = _MODULES[framework]
    require(part, flag)
    user = imported(part, part, f"pip install {part}")
    if framework == "horovod.keras":
        with _legacy_keras(user):
            hvd = imported(name, "horovod", rebuild(flag))
    else:
        hvd = imported(name, "horovod", rebuild(flag))
    if hvd.is_initialized():
        raise DistbootError(
            "already-initialized",
            "Horovod has been started already",
            "make distboot.init() the first line of the script, and remove its hvd.init()",
        )
    return hvd


def device(hvd: Any, placement: Placement, environ: Mapping[str, str]) -> tuple[Any, str | None]:
    """The device of this rank for torch, which is the current one from now on, and its id.

    Raises:
        DistbootError: `backend-not-available`, `too-few-accelerators` or `node-level-launch`.
    """
    torch = imported("torch", "torch", "pip install torch")
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
    try:
        version = getattr(tensorflow.keras, "__version__", "2")  # legacy Keras does not say it there
    except ImportError as error:
        problem = f"horovod.keras needs legacy Keras: {first_line(error)}"
        raise DistbootError("framework-not-installed", problem, "pip install tf-keras") from None
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
