"""The frameworks that `init` can start. Each has a file of its own, which alone imports it, and only when called.

To add one: write a file beside this one with `start`, perhaps `on_cpu` and `exports`, and name it here.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from ..base.errors import DistbootError
from ..base.text import did_you_mean, short_repr

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from ..agent.session import Session
    from ..context import Context
    from ..detection.export import EnvTransaction

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

# Files that have more than their framework: others are built on torch's, and all on that of none.
_SHARED = {"torch": "_torch", "none": "_base"}

HELP = "help(distboot.init) says what each argument is"


class Options(NamedTuple):
    """What the caller of `init` chooses for the framework; None, 0 and False: nothing."""

    framework: str = "torch"  # its name, for example "horovod.torch"
    backend: str | None = None  # what the ranks communicate with, for example "gloo"
    timeout: float | None = None  # seconds for a collective operation
    strategy: str | None = None  # TensorFlow's, for example "parameter_server"
    ps: int = 0  # how many of the ranks are parameter servers
    evaluator: bool = False  # whether the last rank evaluates on the side

    def differences(self, earlier: Options) -> list[str]:
        """What is chosen here, and was not before, for example `backend='gloo' after backend=None`."""
        rows = zip(self._fields, self, earlier, Options(), strict=True)
        return [
            f"{name}={short_repr(value)} after {name}={short_repr(before)}"
            for name, value, before, default in rows
            if value not in (default, before)
        ]

    @property
    def said(self) -> str:
        """The framework and what all ranks must choose alike, for example `tensorflow, parameter_server, ps=1`."""
        chosen = [
            self.strategy,
            f"ps={self.ps}" if self.ps else None,
            "evaluator" if self.evaluator else None,
        ]
        return ", ".join([self.framework, *filter(None, chosen)])


def refuse(options: Options) -> None:
    """Refuse what cannot be right, whatever the job is."""
    name, backend, timeout, strategy, ps, evaluator = options
    for option, value in (("framework", name), ("backend", backend), ("strategy", strategy)):
        if not (isinstance(value, str) and value) and (value is not None or option == "framework"):
            raise DistbootError("usage", f"{option}={short_repr(value)} is not a valid name", HELP)
    if name not in FILES:
        hint = f"{did_you_mean(name, FILES)}frameworks: {', '.join(FILES)}"
        raise DistbootError(
            "unknown-framework", f"{short_repr(name)} is not a valid framework", hint
        )
    of_tensorflow = (
        f"strategy=, ps= and evaluator= are for TensorFlow, and the framework is {short_repr(name)}"
    )
    for is_wrong, problem, hint in (
        (type(ps) is not int or ps < 0, f"ps={short_repr(ps)} is not a valid number of parameter servers", HELP),
        (type(evaluator) is not bool, f"evaluator={short_repr(evaluator)} must be True or False", HELP),
        (name != "tensorflow" and any((strategy, ps, evaluator)), of_tensorflow,
         'leave them out, or init("tensorflow", …)'),
        (name in ("mpi", "none") and backend is not None,
         f"the framework {short_repr(name)} has no backends to choose from", "leave backend= out"),
        (name == "mpi" and timeout is not None, "MPI has no time limit for its operations", "leave timeout= out"),
    ):  # fmt: skip
        if is_wrong:
            raise DistbootError("usage", problem, hint)


def start(job: Session, exported: EnvTransaction, options: Options) -> Context:
    """Start a framework, on all ranks together."""
    file = FILES[options.framework]
    # The wrapper asks for torch's `exports` only, at every start: so what starts it has a file of its own.
    module = import_module("._process_group", __name__) if file == "torch" else _module(file)
    context: Context = module.start(job, exported, options)
    return context


def exports(file: str, job: Session, environ: Mapping[str, str]) -> dict[str, str]:
    """What an unmodified script of a framework, a value of `FILES`, reads besides the variables of torch."""
    of_file: Callable[[Session, Mapping[str, str]], dict[str, str]] | None = getattr(
        _module(file), "exports", None
    )
    return {} if of_file is None else of_file(job, environ)


def preload(options: Options, job: Session) -> None:
    """Import what a framework is built on, where that reads nothing which is known only once all ranks have met.

    If that fails all of them hear of it then: a second attempt may fail in another way.
    """
    if options.framework in ("torch", "deepspeed", "horovod.torch"):
        from . import _base

        try:
            _base.imported("torch")
        except DistbootError as error:
            job.problem = error


def on_cpu(options: Options) -> bool:
    """Whether starting a known framework like this uses no accelerator; so it is where its file does not say."""
    of_file: Callable[[Options], bool] | None = getattr(
        _module(FILES[options.framework]), "on_cpu", None
    )
    return of_file is None or of_file(options)


def _module(file: str) -> ModuleType:
    return import_module(f".{_SHARED.get(file, file)}", __name__)
