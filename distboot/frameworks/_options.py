"""What the caller of `init` chooses for the framework."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import DistbootError, quoted

_HELP = "help(distboot.init) says what each argument is"


class Options(NamedTuple):
    """What the caller of `init` chooses for the framework; None, 0 and False: nothing.

    Attributes:
        framework: its name, for example "horovod.torch".
        backend: what the ranks communicate with, for example "gloo".
        timeout: seconds for a collective operation.
        strategy: TensorFlow's, for example "parameter_server".
        ps: how many of the ranks are parameter servers.
        evaluator: whether the last rank evaluates on the side.
    """

    framework: str = "torch"
    backend: str | None = None
    timeout: float | None = None
    strategy: str | None = None
    ps: int = 0
    evaluator: bool = False

    def refuse_types(self) -> None:
        """Refuse values that cannot be right for any framework.

        Raises:
            DistbootError: `usage`.
        """
        for name, value in (("framework", self.framework), ("backend", self.backend), ("strategy", self.strategy)):
            if not (isinstance(value, str) and value) and (value is not None or name == "framework"):
                raise DistbootError("usage", f"{name}={quoted(value)} is no name", _HELP)
        if type(self.ps) is not int or self.ps < 0:
            raise DistbootError("usage", f"ps={quoted(self.ps)} is no number of parameter servers", _HELP)
        if type(self.evaluator) is not bool:
            raise DistbootError("usage", f"evaluator={quoted(self.evaluator)} is neither True nor False", _HELP)

    def differences(self, earlier: Options) -> list[str]:
        """What is chosen here, and was not before, for example `backend='gloo' after backend=None`."""
        pairs = ((name, getattr(self, name), default) for name, default in self._field_defaults.items())
        return [
            f"{name}={quoted(value)} after {name}={quoted(getattr(earlier, name))}"
            for name, value, default in pairs
            if value not in (default, getattr(earlier, name))
        ]

    @property
    def said(self) -> str:
        """The framework and what all ranks must choose alike, for example `tensorflow, parameter_server, ps=1`."""
        chosen = [self.strategy, f"ps={self.ps}" if self.ps else None, "evaluator" if self.evaluator else None]
        return ", ".join([self.framework, *filter(None, chosen)])
