"""What the visibility variables leave of the accelerators, in all their forms: indices, UUIDs, MIG devices, nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from .. import accelerators
from ..errors import quoted
from .finding import Finding, ok, problem, unknown, warning
from .machine import Machine

_HIP = "HIP_VISIBLE_DEVICES"


def visible_devices(machine: Machine) -> Iterator[Finding]:
    """Whether the variables name what is here, and leave enough of it."""
    name, environ = "visible-devices", machine.environ
    everything, left = (accelerators.visible(each, machine.root) for each in ({}, environ))
    variables = [variable for variable in _variables(machine) if variable in environ]
    said = " and ".join(f"{variable}={quoted(environ[variable])}" for variable in variables)
    if not everything:
        yield ok(name, f"{said}, and no device here whose id is known" if said else "none")
    elif not variables:
        yield from _enough(name, machine, left, f"all {len(everything)}")
    elif len([each for each in left if each.startswith("MIG-")]) > 1:
        yield warning(name, f"{said}: CUDA shows a process the first MIG device only", "show each rank one of them")
    elif any(each.startswith("MIG-") for each in left):
        yield unknown(name, f"{said}: only the driver's library could say whether this host has such a MIG device")
    elif fault := _first_fault(environ, variables, everything):
        yield problem(
            name, f"{fault}: {len(left)} of the {len(everything)} here are left", f"mend or unset {variables[0]}"
        )
    elif not left:
        yield warning(name, f"{said} hides all {len(everything)}: the job trains on the CPU", f"unset {variables[0]}")
    else:
        yield from _enough(name, machine, left, f"{said}: {len(left)} of {len(everything)}")


def _variables(machine: Machine) -> tuple[str, ...]:
    """The variables that count for what is here, in the order in which they do."""
    if machine.matching("proc/driver/nvidia/gpus/*"):
        return ("CUDA_VISIBLE_DEVICES",)
    if accelerators.visible({}, machine.root):  # AMD's; CUDA's variable counts where HIP's is not set
        return ("ROCR_VISIBLE_DEVICES", _HIP if _HIP in machine.environ else "CUDA_VISIBLE_DEVICES")
    return accelerators.VISIBILITY


def _first_fault(environ: Mapping[str, str], variables: Sequence[str], everything: list[str]) -> str | None:
    known = everything
    for variable in variables:
        fault = _fault(environ[variable], known)
        if fault:
            return f"{variable}={quoted(environ[variable])}, and {fault}"
        if variable == "ROCR_VISIBLE_DEVICES":  # HIP counts what this one leaves
            words = environ[variable].split(",")
            known = [known[int(word)] if word.strip().isdecimal() else word for word in words]
    return None


def _fault(choice: str, everything: list[str]) -> str | None:
    """The first word of a choice that names no device; what follows it is not visible either, in CUDA as in HIP."""
    words = [word.strip() for word in choice.split(",")]
    if words[0] in ("", "-1", "NoDevFiles", "none", "void"):  # the ways to hide all of them
        return None
    for index, word in enumerate(words):
        if word.startswith("MIG-"):
            continue
        if re.fullmatch("[0-9]+", word):
            if int(word) >= len(everything):
                return f"there is no device {word}"
        elif not word.startswith("GPU-") or not any(known.startswith(word) for known in everything):
            return f"no device here is called {quoted(word)}"
        if word in words[:index]:
            return f"it names {word} twice"
    return None


def _enough(name: str, machine: Machine, left: list[str], said: str) -> Iterator[Finding]:
    """Whether each local rank gets one."""
    placement = machine.placement()
    ranks = placement.local_world_size if placement is not None else None
    if ranks is not None and accelerators.own_index(len(left), machine.environ, ranks - 1) is None:
        seen = f"{said}; {ranks} ranks are on this node"
        yield problem(name, seen, f"start {len(left)} a node, or show each rank all of the node's accelerators")
    else:
        yield ok(name, said)
