"""Whether the script trains at this moment, as the stacks of its threads show.

    framework  | it trains while a thread is in
    -----------+---------------------------------------------------------------------------
    torch      | the backward pass, or a step of an optimizer
    Keras      | `fit`, with any backend
    TensorFlow | `gradient` of a `GradientTape`; in a `tf.function` only while it is compiled
    JAX        | it has no such function: from its first gradient on, which it compiles once

A thread that compiles for torch does not train: the first pass may take minutes for it.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from itertools import filterfalse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

# A function in which a thread trains, and its file, in a line of `_stacks`
_TRAINS = re.compile(
    r"^\d+ (backward .*torch/autograd/__init__\.py"
    r"|\w+ .*torch/optim/optimizer\.py"
    r"|fit .*keras/.*"  # or tf_keras
    r"|gradient .*tensorflow/python/eager/backprop\.py)$",
    re.MULTILINE,
)
# What it has compiled is called below other files of torch/_inductor
_COMPILES = re.compile(r"torch/_inductor/compile_fx\.py")
# In which TensorFlow calls what `tf.function` has compiled
_IN_COMPILED = re.compile(
    r"tensorflow/python/eager/polymorphic_function/polymorphic_function\.py$", re.MULTILINE
)


def trains() -> bool:
    """Whether a thread trains, or JAX has made a gradient."""
    return bool(place()) or has_gradient_of_jax()


def place() -> str:
    """Where a thread trains, the same as long as it is at one instruction; empty: none does."""
    training = filter(_TRAINS.search, _stacks())
    running = filterfalse(_COMPILES.search, training)
    return next(running, "")


def is_in_compiled() -> bool:
    """Whether a thread is in a `tf.function`: in a script that was seen to train, it may train."""
    return any(map(_IN_COMPILED.search, _stacks()))


def has_gradient_of_jax() -> bool:
    """Whether JAX has ever made the gradient of a function that it compiles.

    Its cache of these says so (JAX 0.9 and 0.10).
    """
    with suppress(Exception):  # it was not imported, or is another version
        gradients: Any = sys.modules["jax._src.interpreters.ad"]
        return bool(gradients._linearize_jaxpr.cache_info().misses)  # noqa: SLF001
    return False


def _stacks() -> list[str]:
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
