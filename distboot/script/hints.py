"""What the traceback of an uncaught exception tells beyond its text: what to do.

This file is also read by the Python of an unmodified script, which may have another distboot, or none: it imports
nothing but the standard library, and `base/text` once there is a hint.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType


@cache
def install() -> None:
    """From now on print a hint after the traceback of an uncaught exception, where there is one."""
    if f"_{__name__}" in sys.modules:  # where the wrapper has had this file loaded
        return
    before = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        before(kind, error, trace)
        with suppress(Exception):
            hint = _hint(trace)
            if hint:
                from ..base.text import log_line

                log_line(None if _is_alone() else f"rank {os.environ['RANK']}", f"hint: {hint}")

    sys.excepthook = excepthook


def _hint(trace: TracebackType | None) -> str | None:
    """The hint for an exception that has come through these frames."""
    hint = None
    while trace is not None and hint is None:
        hints = (of(trace.tb_frame) for of in (_of_keras, _of_lightning, _of_deepspeed, _of_torch))
        hint, trace = next(filter(None, hints), None), trace.tb_next
    return hint


def _of_keras(frame: FrameType) -> str | None:
    """`fit` of Keras 3 under a strategy of several processes: "Attempt to convert a value (PerReplica: …)" (3.15)."""
    name = getattr(frame.f_locals.get("fn"), "__name__", None)
    # Around all methods
    if _module(frame) != "keras.src.utils.traceback_utils" or name not in ("fit", "evaluate"):
        return None
    if _is_alone() or "TF_CONFIG" not in os.environ:
        return None
    return (
        f"{name}() of Keras 3 does not work under a strategy of several processes: pip install tf-keras and set "
        "TF_USE_LEGACY_KERAS=1 before the script starts, or write your own training loop, as in the examples"
    )


def _of_lightning(frame: FrameType) -> str | None:
    """Lightning's comparison of `devices` and `num_nodes` with the ranks that there are."""
    # Of lightning.fabric or lightning_fabric
    compares = _module(frame).endswith("plugins.environments.torchelastic")
    if not compares or frame.f_code.co_name != "validate_settings":
        return None
    here, nodes = os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_WORLD_SIZE"]
    fitting = f"devices={here}, num_nodes={nodes} fit the job"
    if not _is_alone():
        return f"{fitting}, or start another number of ranks"
    wanted = frame.f_locals["num_devices"]
    return f"{fitting}, or start {wanted} ranks here: python -m distboot --nproc-per-node={wanted} script.py"


def _of_deepspeed(frame: FrameType) -> str | None:
    """DeepSpeed's comparison of `args.local_rank` with LOCAL_RANK, which a default of 0 does not stand."""
    if (
        _module(frame) != "deepspeed.runtime.engine"
        or frame.f_code.co_name != "_do_args_sanity_check"
    ):
        return None
    return (
        "python -m distboot run --pass-local-rank passes --local_rank=N to the script, as does "
        "distboot.init(pass_local_rank=True) before it parses its arguments"
    )


def _of_torch(frame: FrameType) -> str | None:
    """What the script still has from before: "trying to initialize the default process group twice!" (2.13)."""
    if (
        _module(frame) != "torch.distributed.distributed_c10d"
        or frame.f_code.co_name != "init_process_group"
    ):
        return None
    if (
        "distboot.initialize" not in sys.modules
        or not sys.modules["torch.distributed"].is_initialized()
    ):
        return None
    return (
        "distboot.init() has started the process group: remove init_process_group() from the script"
    )


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _is_alone() -> bool:
    return os.environ.get("WORLD_SIZE", "1") == "1"
