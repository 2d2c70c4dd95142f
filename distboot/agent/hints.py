"""Hints after the traceback of an uncaught exception of a framework that says what is wrong, and not what to do.

This file is also read by the Python of an unmodified script, without the rest of the package: it imports nothing but
the standard library.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType

INJECTED = "_distboot.hints"  # this file as a module, where the wrapper has had it loaded


@cache
def install() -> None:
    """From now on print a hint after the traceback of an uncaught exception, where there is one."""
    if INJECTED in sys.modules and __name__ != INJECTED:
        return
    before = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        with suppress(Exception):
            hint = _hint(trace)
            sys.stderr.write(_line(hint) if hint else "")

    sys.excepthook = excepthook


def _line(hint: str) -> str:
    """As `log_line` has it."""
    rank, host = None if _is_alone() else os.environ["RANK"], os.uname().nodename
    if os.environ.get("DISTBOOT_LOG") == "json":
        import json
        import time

        whose = {"rank": rank and int(rank), "host": host}
        return json.dumps({"event": "hint", "time": round(time.time(), 3), **whose, "message": hint}) + "\n"
    return f"distboot: {'' if rank is None else f'rank {rank} on {host}: '}hint: {hint}\n"


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
    if _module(frame) != "keras.src.utils.traceback_utils" or name not in ("fit", "evaluate"):  # around all methods
        return None
    if _is_alone() or "TF_CONFIG" not in os.environ:
        return None
    return (
        f"{name}() of Keras 3 does not work under a strategy of several processes: pip install tf-keras and set "
        "TF_USE_LEGACY_KERAS=1 before the script starts, or write your own training loop, as in the examples"
    )


def _of_lightning(frame: FrameType) -> str | None:
    """Lightning's comparison of `devices` and `num_nodes` with the ranks that there are."""
    compares = _module(frame).endswith("plugins.environments.torchelastic")  # of lightning.fabric or lightning_fabric
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
    if _module(frame) != "deepspeed.runtime.engine" or frame.f_code.co_name != "_do_args_sanity_check":
        return None
    return (
        "python -m distboot run --pass-local-rank passes --local_rank=N to the script, as does "
        "distboot.init(pass_local_rank=True) before it parses its arguments"
    )


def _of_torch(frame: FrameType) -> str | None:
    """What the script still has from before: "trying to initialize the default process group twice!" (2.13)."""
    if _module(frame) != "torch.distributed.distributed_c10d" or frame.f_code.co_name != "init_process_group":
        return None
    if "distboot.initialize" not in sys.modules or not sys.modules["torch.distributed"].is_initialized():
        return None
    return "distboot.init() has started the process group: remove init_process_group() from the script"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _is_alone() -> bool:
    return os.environ.get("WORLD_SIZE", "1") == "1"
