"""The frameworks that `init` can start, each in the files that `FILES` names.

To add one: write a file beside this one with `start`, optionally `on_cpu` and `exports`, and name
it here. A framework is imported when `init` is called, never at module level.
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
    from typing import Literal

    from ..agent.session import Session
    from ..context import Context
    from ..detection.export import EnvTransaction

    # The keys of FILES, which an editor offers and a type checker compares
    Framework = Literal[
        "torch",
        "deepspeed",
        "horovod.torch",
        "horovod.tensorflow",
        "horovod.keras",
        "tensorflow",
        "jax",
        "mpi",
        "none",
    ]
    # TensorFlow's, in the words of `init`
    Strategy = Literal["multi_worker_mirrored", "parameter_server", "mirrored", "default"]


class Files(NamedTuple):
    """The modules of a framework in this folder."""

    wrapper_name: str  # in `--framework`
    exports: str  # has `exports` and `on_cpu`, where the framework has these
    start: str  # has `start`


# Most frameworks have one file. torch has two, because the wrapper needs its `exports` at every
# start, and not what starts the process group.
FILES = {
    "torch": Files("torch", exports="_torch", start="_process_group"),
    "deepspeed": Files("deepspeed", exports="deepspeed", start="deepspeed"),
    "horovod.torch": Files("horovod", exports="horovod", start="horovod"),
    "horovod.tensorflow": Files("horovod", exports="horovod", start="horovod"),
    "horovod.keras": Files("horovod", exports="horovod", start="horovod"),
    "tensorflow": Files("tensorflow", exports="tensorflow", start="tensorflow"),
    "jax": Files("jax", exports="jax", start="jax"),
    "mpi": Files("mpi", exports="mpi", start="mpi"),
    "none": Files("none", exports="_base", start="_base"),
}

# What the wrapper offers: the name -> the module that has `exports`
WRAPPER_FILES = {files.wrapper_name: files.exports for files in FILES.values()}

_BUILT_ON_TORCH = ("torch", "deepspeed", "horovod.torch")
# Framework and argument -> why it has no such argument.
_UNUSABLE = {
    ("mpi", "backend"): "the framework 'mpi' has no backends to choose from",
    ("none", "backend"): "the framework 'none' has no backends to choose from",
    ("mpi", "timeout"): "MPI has no time limit for its operations",
}

HELP = "help(distboot.init) says what each argument is"


class Options(NamedTuple):
    """The arguments of `init` for the framework; None is the framework's default."""

    framework: str = "torch"  # its name, for example "horovod.torch"
    backend: str | None = None  # what the ranks communicate with, for example "gloo"
    timeout: float | None = None  # seconds for a collective operation
    strategy: str | None = None  # TensorFlow's, for example "mirrored"

    def differences(self, earlier: Options) -> list[str]:
        """The arguments that changed, for example `backend='gloo' after backend=None`."""
        rows = zip(self._fields, self, earlier, Options(), strict=True)
        return [
            f"{name}={short_repr(value)} after {name}={short_repr(before)}"
            for name, value, before, default in rows
            if value not in (default, before)
        ]

    def describe(self) -> str:
        """What must be the same on all ranks, for example `tensorflow, mirrored`."""
        if self.strategy is None:
            return self.framework
        return f"{self.framework}, {self.strategy}"


def refuse(options: Options) -> None:
    """Refuse arguments that are wrong in every job."""
    _refuse_no_name("framework", options.framework)
    if options.backend is not None:
        _refuse_no_name("backend", options.backend)
    if options.strategy is not None:
        _refuse_no_name("strategy", options.strategy)
    name = options.framework
    if name not in FILES:
        raise DistbootError(
            "unknown-framework",
            f"{short_repr(name)} is not a valid framework",
            f"{did_you_mean(name, FILES)}frameworks: {', '.join(FILES)}",
        )
    if name != "tensorflow" and options.strategy is not None:
        raise DistbootError(
            "usage",
            f"strategy= is for TensorFlow, but the framework is {short_repr(name)}",
            'remove it, or use init("tensorflow", …)',
        )
    for (framework, argument), problem in _UNUSABLE.items():
        if framework == name and getattr(options, argument) is not None:
            raise DistbootError(
                "usage",
                problem,
                f"leave {argument}= out",
            )


def _refuse_no_name(argument: str, value: object) -> None:
    """Refuse what is not a non-empty text."""
    if isinstance(value, str) and value:
        return
    raise DistbootError(
        "usage",
        f"{argument}={short_repr(value)} is not a valid name",
        HELP,
    )


def start(session: Session, exported: EnvTransaction, options: Options) -> Context:
    """Start a framework, on all ranks together."""
    files = FILES[options.framework]
    module = _module(files.start)
    context: Context = module.start(session, exported, options)
    return context


def exports(name: str, session: Session, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that an unmodified script of a framework reads, besides those of torch.

    `name` is that of `--framework`.
    """
    of_file: Callable[[Session, Mapping[str, str]], dict[str, str]]
    module = _module(WRAPPER_FILES[name])
    of_file = getattr(module, "exports", lambda *_: {})
    return of_file(session, environ)


def preload(options: Options, session: Session) -> None:
    """Import torch, while the ranks meet, for frameworks that are built on it.

    If the import fails, all ranks hear of it later: a second import may fail in another way.
    """
    if options.framework not in _BUILT_ON_TORCH:
        return
    from . import _base

    try:
        _base.imported("torch")
    except DistbootError as error:
        session.problem = error


def on_cpu(options: Options) -> bool:
    """Whether a framework started like this uses no accelerator.

    True for a framework whose file has no `on_cpu`.
    """
    of_file: Callable[[Options], bool]
    files = FILES[options.framework]
    module = _module(files.exports)
    of_file = getattr(module, "on_cpu", lambda _: True)
    return of_file(options)


def _module(file: str) -> ModuleType:
    return import_module(f".{file}", __name__)
