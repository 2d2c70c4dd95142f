"""The frameworks that `init` can start. Each has a file of its own, which alone imports it, and only when called.

To add one: write a file beside this one with `start`, `exports` and `on_cpu`, and name it here.
"""

from __future__ import annotations

from importlib import import_module

from ..errors import DistbootError, did_you_mean, quoted
from ._options import Options

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from ..context import Context
    from ..exports import Exported
    from ..rollcall.meeting import Meeting

__all__ = ["FILES", "Options", "exports", "on_cpu", "starter"]

# Name of a framework -> the file that starts it, which is also its name for the wrapper: `--framework horovod`.
FILES = {
    "torch": "torch",
    "deepspeed": "deepspeed",
    "horovod.torch": "horovod",
    "horovod.tensorflow": "horovod",
    "horovod.keras": "horovod",
    "tensorflow": "tensorflow",
    "jax": "jax",
    "mpi": "mpi",
    "none": "none",
}


def starter(options: Options) -> Callable[[Meeting, Exported, Options], Context]:
    """The function that starts a framework, for all ranks together, where to export, and what the caller chose.

    Raises:
        DistbootError: `unknown-framework`, or `usage` for an option that is not one of this framework.
    """
    options.refuse_types()
    name = options.framework
    if name not in FILES:
        hint = f"{did_you_mean(name, FILES)}frameworks: {', '.join(FILES)}"
        raise DistbootError("unknown-framework", f"{quoted(name)} is no framework", hint)
    if name != "tensorflow" and (options.strategy is not None or options.ps or options.evaluator):
        raise DistbootError(
            "usage",
            f"strategy=, ps= and evaluator= are for TensorFlow, and the framework is {quoted(name)}",
            'leave them out, or init("tensorflow", …)',
        )
    if name in ("mpi", "none") and options.backend is not None:
        raise DistbootError(
            "usage", f"the framework {quoted(name)} has no backends to choose from", "leave backend= out"
        )
    if name == "mpi" and options.timeout is not None:
        raise DistbootError("usage", "MPI has no time limit for its operations", "leave timeout= out")
    start: Callable[[Meeting, Exported, Options], Context] = _module(FILES[name]).start
    return start


def exports(file: str, meeting: Meeting, environ: Mapping[str, str]) -> dict[str, str]:
    """What an unmodified script of this framework reads besides the variables of torch, for the wrapper to export.

    Args:
        file: a value of `FILES`.
        meeting: of all ranks; or of a single one.
        environ: this process's environment.
    """
    found: dict[str, str] = _module(file).exports(meeting, environ)
    return found


def on_cpu(options: Options) -> bool:
    """Whether starting a known framework like this uses no accelerator."""
    return bool(_module(FILES[options.framework]).on_cpu(options))


def _module(file: str) -> ModuleType:
    return import_module(f".{file}", __name__)
