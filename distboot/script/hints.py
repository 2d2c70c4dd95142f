"""After the traceback of an uncaught exception: a hint, if a frame shows a known mistake.

The Python of an unmodified script loads this file as well, without the rest of the package: it
imports only the standard library, and `base/text` once there is a hint.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType, TracebackType


_NO_PARENT = "attempted relative import with no known parent package"


@cache
def install() -> None:
    """From now on print a hint after the traceback of an uncaught exception, where there is one."""
    is_installed = f"_{__name__}" in sys.modules  # by the `sitecustomize` of the wrapper
    if is_installed:
        return
    before = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        before(kind, error, trace)
        with suppress(Exception):
            _print_hint(error, trace)

    sys.excepthook = excepthook


def _print_hint(error: BaseException, trace: TracebackType | None) -> None:
    hint = _of_relative_import(error, trace)
    while trace is not None and hint is None:
        hint = _hint_of(trace.tb_frame)
        trace = trace.tb_next
    if hint is None:
        return
    from ..base.text import log_line

    who = None
    if not _is_alone():
        who = f"rank {os.environ['RANK']}"
    log_line(who, f"hint: {hint}")


def _of_relative_import(error: BaseException, trace: TracebackType | None) -> str | None:
    """A module of a package that was started as a script.

    CPython 3.10 to 3.14: "attempted relative import with no known parent package".
    """
    if getattr(error, "msg", None) != _NO_PARENT:  # of ImportError
        return None
    from traceback import walk_tb  # here, as few scripts fail of this

    *_, (frame, _) = walk_tb(trace)
    # A file that the script runs by its path has no package either
    if frame.f_globals is not vars(sys.modules["__main__"]):
        return None
    script = os.path.normpath(sys.argv[0])
    name, suffix = os.path.splitext(script)
    if suffix != ".py":
        return None
    *folders, _ = names = name.split(os.sep)
    if not folders:
        return None
    if not all(map(str.isidentifier, names)):
        return None
    # In `src/package/train.py` the package begins below the first folder
    is_deep = len(folders) > 1
    if is_deep and not os.path.isfile(os.path.join(names[0], "__init__.py")):
        return None
    return f"start it as a module of its package: -m {'.'.join(names)} in place of {script}"


def _hint_of(frame: FrameType) -> str | None:
    """The hint for an exception that came through this frame."""
    place = (frame.f_globals.get("__name__"), frame.f_code.co_name)
    find = _PLACES.get(place)
    if find is None:
        return None
    return find(frame)


def _of_keras(frame: FrameType) -> str | None:
    """`fit` of Keras 3 under a strategy of several processes.

    Keras 3.15: "Attempt to convert a value (PerReplica: …)".
    """
    name = getattr(frame.f_locals.get("fn"), "__name__", None)
    if name not in ("fit", "evaluate"):  # the frame is around all methods
        return None
    if _is_alone() or "TF_CONFIG" not in os.environ:
        return None
    return (
        f"{name}() of Keras 3 does not work under a strategy of several processes: pip install "
        "tf-keras and set TF_USE_LEGACY_KERAS=1 before the script starts, or write your own "
        "training loop, as in the examples"
    )


def _of_lightning(frame: FrameType) -> str | None:
    """Lightning compares `devices` and `num_nodes` with the ranks of the job."""
    local_size = os.environ["LOCAL_WORLD_SIZE"]
    nodes = os.environ["GROUP_WORLD_SIZE"]
    fitting = f"devices={local_size}, num_nodes={nodes} fit the job"
    if not _is_alone():
        return f"{fitting}, or start another number of ranks"
    wanted = frame.f_locals["num_devices"]
    command = f"python -m distboot --nproc-per-node={wanted} script.py"
    return f"{fitting}, or start {wanted} ranks here: {command}"


def _of_deepspeed(_: FrameType) -> str | None:
    """DeepSpeed compares `args.local_rank` with LOCAL_RANK; a default of 0 fails."""
    return (
        "python -m distboot run --pass-local-rank passes --local_rank=N to the script, as does "
        "distboot.init(pass_local_rank=True) before it parses its arguments"
    )


def _of_torch(frame: FrameType) -> str | None:
    """The script still starts the group itself, or with NCCL on CPUs.

    torch 2.13: "trying to initialize the default process group twice!", and "Distributed package
    doesn't have NCCL built in".
    """
    distributed = sys.modules["torch.distributed"]
    wants_nccl = "nccl" in str(frame.f_locals.get("backend"))
    if wants_nccl and not distributed.is_nccl_available():
        return (
            "this PyTorch is built without NCCL, which needs GPUs: give init_process_group() "
            "backend='gloo', or none, or call distboot.init() in its place"
        )
    if "distboot.initialize" not in sys.modules:
        return None
    if not distributed.is_initialized():
        return None
    return (
        "distboot.init() has started the process group: remove init_process_group() from the script"
    )


# The hint by module and function of the frame
_PLACES: Mapping[tuple[object, str], Callable[[FrameType], str | None]] = {
    ("keras.src.utils.traceback_utils", "error_handler"): _of_keras,
    ("lightning.fabric.plugins.environments.torchelastic", "validate_settings"): _of_lightning,
    ("lightning_fabric.plugins.environments.torchelastic", "validate_settings"): _of_lightning,
    ("deepspeed.runtime.engine", "_do_args_sanity_check"): _of_deepspeed,
    ("torch.distributed.distributed_c10d", "init_process_group"): _of_torch,
}


def _is_alone() -> bool:
    return os.environ.get("WORLD_SIZE", "1") == "1"
