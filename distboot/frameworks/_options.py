"""What the caller of `init` chooses for the framework."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
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

    @property
    def said(self) -> str:
        """The framework and what all ranks must choose alike, for example `tensorflow, parameter_server, ps=1`."""
        chosen = [self.strategy, f"ps={self.ps}" if self.ps else None, "evaluator" if self.evaluator else None]
        return ", ".join([self.framework, *filter(None, chosen)])
