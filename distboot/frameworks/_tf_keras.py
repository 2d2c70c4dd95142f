"""What Keras 3 cannot do under a strategy of several processes, named when an uncaught exception is about that."""

from __future__ import annotations

import sys
from types import TracebackType

from ..errors import tell

_FIT = ("fit", "evaluate")


def name_its_limits(who: str | None, strategy: str) -> None:
    """Print a hint after the traceback of an exception that ends this process in `fit` of Keras 3.

    What it raises there says nothing of it: "Attempt to convert a value (PerReplica: …) with an unsupported type"
    (Keras 3.15). Legacy Keras can do it, as can a training loop of one's own.

    Args:
        who: this process, as `Placement.who`.
        strategy: its strategy, by TensorFlow's name.
    """
    before = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        name = _in_keras_3(trace)
        if name is not None:
            tell(
                who,
                f"hint: {name}() of Keras 3 does not work under {strategy}: pip install tf-keras and set "
                "TF_USE_LEGACY_KERAS=1 before the script starts, or write the training loop out, as in the examples",
            )

    sys.excepthook = excepthook


def _in_keras_3(trace: TracebackType | None) -> str | None:
    """The method of a model of Keras 3 that the exception came through, if it is one that cannot work."""
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_globals.get("__name__") == "keras.src.utils.traceback_utils":  # which is around all its methods
            name = getattr(frame.f_locals.get("fn"), "__name__", None)
            if name in _FIT:
                return str(name)
        trace = trace.tb_next
    return None
