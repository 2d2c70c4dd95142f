"""Whether the script trains at this moment, as the stacks of its threads show.

    framework  | it trains while a thread is in
    -----------+---------------------------------------------------------------------------
    torch      | the backward pass, or a step of an optimizer
    Keras      | `fit`, with any backend
    TensorFlow | `gradient` of a `GradientTape`; in a `tf.function` only while it is compiled

JAX shows no training in the stacks: it counts as training from its first gradient on, which its cache
of gradients records. A thread that compiles for torch does not train: the first pass may take minutes.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from itertools import filterfalse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType
    from typing import Any

# A function in which a thread trains, and its file, in a line of `stacks`
_OF_TORCH = r"backward .*torch/autograd/__init__\.py|\w+ .*torch/optim/optimizer\.py"
_TRAINS_TORCH = re.compile(rf"^\d+ ({_OF_TORCH})$", re.MULTILINE)
_TRAINS = re.compile(
    rf"^\d+ ({_OF_TORCH}"
    r"|fit .*/(tf_)?keras/src/.*"
    r"|gradient .*tensorflow/python/eager/backprop\.py)$",
    re.MULTILINE,
)
# What it has compiled is called below other files of torch/_inductor
_COMPILES = re.compile(r"torch/_inductor/compile_fx\.py")
# The file in which a compiled `tf.function` is called
_IN_COMPILED = re.compile(
    r"tensorflow/python/eager/polymorphic_function/polymorphic_function\.py$", re.MULTILINE
)

_OF_JAX = "jax._src.interpreters.ad"
_has_seen_gradient = False  # `jax.clear_caches()` forgets them


def trains() -> bool:
    """Whether a thread trains, or JAX has made a gradient."""
    return bool(training_stack(stacks())) or has_gradient_of_jax()


def training_stack(found: Iterable[str]) -> str:
    """Of these, that of a thread that trains: the same while it is at one instruction; empty: none."""
    training = filter(_TRAINS.search, found)
    running = filterfalse(_COMPILES.search, training)
    return next(running, "")


def is_of_torch(stack: str) -> bool:
    """Whether it is torch that trains in this stack."""
    return _TRAINS_TORCH.search(stack) is not None


def is_in_compiled(found: Iterable[str]) -> bool:
    """Whether one of these is in a `tf.function`: in a script that was seen to train, it may train."""
    return any(map(_IN_COMPILED.search, found))


def has_gradient_of_jax() -> bool:
    """Whether JAX has ever made the gradient of a function that it compiles.

    Its cache of these says so (JAX 0.9 and 0.10).
    """
    global _has_seen_gradient  # noqa: PLW0603 - one process
    with suppress(Exception):  # it was not imported, or is another version
        gradients: Any = sys.modules[_OF_JAX]
        misses = gradients._linearize_jaxpr.cache_info().misses  # noqa: SLF001
        _has_seen_gradient |= misses > 0
    return _has_seen_gradient


def can_see_gradients_of_jax() -> bool:
    """Whether this JAX has the cache that `has_gradient_of_jax` reads."""
    return hasattr(sys.modules.get(_OF_JAX), "_linearize_jaxpr")


def stacks() -> list[str]:
    """Of each thread: a line for each function that it is in, and where there; the innermost first."""
    found = []
    for frame in sys._current_frames().values():  # noqa: SLF001 - there is no public one
        lines = []
        at: FrameType | None = frame
        while at is not None:
            code = at.f_code
            lines.append(f"{at.f_lasti} {code.co_name} {code.co_filename}")
            at = at.f_back
        found.append("\n".join(lines))
    return found
