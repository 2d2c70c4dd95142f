"""The frameworks that `init` can start. Each has a file of its own, which alone imports it, and only when called.

To add one: write a file beside this one with `start`, `on_cpu`, and perhaps `exports`, and name it here.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from ..errors import DistbootError
from ..text import did_you_mean, short_repr

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from ..context import Context
    from ..detection.export import EnvTransaction
    from ..rendezvous.job_info import JobInfo

__all__ = ["FILES", "Options", "exports", "on_cpu", "preload", "starter"]

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

_HELP = "help(distboot.init) says what each argument is"


class Options(NamedTuple):
    """What the caller of `init` chooses for the framework; None, 0 and False: nothing."""

    framework: str = "torch"  # its name, for example "horovod.torch"
    backend: str | None = None  # what the ranks communicate with, for example "gloo"
    timeout: float | None = None  # seconds for a collective operation
    strategy: str | None = None  # TensorFlow's, for example "parameter_server"
    ps: int = 0  # how many of the ranks are parameter servers
    evaluator: bool = False  # whether the last rank evaluates on the side

    def refuse_types(self) -> None:
        """Refuse, as `usage`, values that cannot be right for any framework."""
        for name, value in (("framework", self.framework), ("backend", self.backend), ("strategy", self.strategy)):
            if not (isinstance(value, str) and value) and (value is not None or name == "framework"):
                raise DistbootError("usage", f"{name}={short_repr(value)} is not a valid name", _HELP)
        if type(self.ps) is not int or self.ps < 0:
            raise DistbootError("usage", f"ps={short_repr(self.ps)} is not a valid number of parameter servers", _HELP)
        if type(self.evaluator) is not bool:
            raise DistbootError("usage", f"evaluator={short_repr(self.evaluator)} must be True or False", _HELP)

    def differences(self, earlier: Options) -> list[str]:
        """What is chosen here, and was not before, for example `backend='gloo' after backend=None`."""
        pairs = ((name, getattr(self, name), default) for name, default in self._field_defaults.items())
        return [
            f"{name}={short_repr(value)} after {name}={short_repr(getattr(earlier, name))}"
            for name, value, default in pairs
            if value not in (default, getattr(earlier, name))
        ]

    @property
    def said(self) -> str:
        """The framework and what all ranks must choose alike, for example `tensorflow, parameter_server, ps=1`."""
        chosen = [self.strategy, f"ps={self.ps}" if self.ps else None, "evaluator" if self.evaluator else None]
        return ", ".join([self.framework, *filter(None, chosen)])


def starter(options: Options) -> Callable[[JobInfo, EnvTransaction, Options], Context]:
    """The function that starts a framework, for all ranks together, where to export, and what the caller chose."""
    options.refuse_types()
    name = options.framework
    if name not in FILES:
        hint = f"{did_you_mean(name, FILES)}frameworks: {', '.join(FILES)}"
        raise DistbootError("unknown-framework", f"{short_repr(name)} is not a valid framework", hint)
    if name != "tensorflow" and (options.strategy is not None or options.ps or options.evaluator):
        raise DistbootError(
            "usage",
            f"strategy=, ps= and evaluator= are for TensorFlow, and the framework is {short_repr(name)}",
            'leave them out, or init("tensorflow", …)',
        )
    if name in ("mpi", "none") and options.backend is not None:
        raise DistbootError(
            "usage", f"the framework {short_repr(name)} has no backends to choose from", "leave backend= out"
        )
    if name == "mpi" and options.timeout is not None:
        raise DistbootError("usage", "MPI has no time limit for its operations", "leave timeout= out")
    start: Callable[[JobInfo, EnvTransaction, Options], Context] = _module(FILES[name]).start
    return start


def exports(file: str, job: JobInfo, environ: Mapping[str, str]) -> dict[str, str]:
    """What an unmodified script of a framework, a value of `FILES`, reads besides the variables of torch."""
    of_file: Callable[[JobInfo, Mapping[str, str]], dict[str, str]] | None = getattr(_module(file), "exports", None)
    return {} if of_file is None else of_file(job, environ)


def preload(options: Options) -> None:
    """Import what a framework is built on, where that reads nothing which is known only once all ranks have met."""
    if options.framework in ("torch", "deepspeed", "horovod.torch"):
        from ._base import preload as import_now

        import_now("torch")


def on_cpu(options: Options) -> bool:
    """Whether starting a known framework like this uses no accelerator."""
    return bool(_module(FILES[options.framework]).on_cpu(options))


def _module(file: str) -> ModuleType:
    return import_module(f".{'_torch' if file == 'torch' else file}", __name__)  # others are built on that one
