"""Check of the visible devices: CUDA_VISIBLE_DEVICES and its like name devices that are here."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...base.text import short_repr
from ...host import accelerators as host_accelerators
from .finding import (
    Finding,
    ok,
    problem,
    unknown,
    warning,
)
from .machine import Machine

_CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"
_HIP_VISIBLE = "HIP_VISIBLE_DEVICES"
_ROCR_VISIBLE = "ROCR_VISIBLE_DEVICES"
_is_gpu_id = re.compile("GPU-").match
_HIDE_ALL = ("", "-1", "NoDevFiles", "none", "void")  # first words of a choice that names no device


def visible_devices(machine: Machine) -> Finding:
    """Whether the visibility variables name devices that are here, and leave enough of them."""
    devices = host_accelerators.visible({}, machine.root)
    choices = _choices(machine)
    if not devices and not choices:
        return ok("none")
    if not devices:
        given = _listed(choices)
        return ok(f"{given}, but no device with a known id is here")
    if not choices:
        seen = f"all {len(devices)}"
        return _enough(machine, devices, seen)
    return _chosen_devices(machine, devices, choices)


def _choices(machine: Machine) -> dict[str, str]:
    """The visibility variables that are set."""
    found = {}
    for variable in _variables(machine):
        if variable in machine.environ:
            choice = machine.environ[variable]
            found[variable] = choice
    return found


def _chosen_devices(machine: Machine, devices: list[str], choices: Mapping[str, str]) -> Finding:
    given = _listed(choices)
    first = next(iter(choices))
    left = host_accelerators.visible(machine.environ, machine.root)
    mig = sum(device.startswith("MIG-") for device in left)
    if mig:
        return _mig(given, mig)
    invalid = _first_invalid(choices, devices)
    if invalid is not None:
        counts = f"{len(left)} of the {len(devices)} here are left"
        seen = f"{invalid}: {counts}"
        remedy = f"fix or unset {first}"
        return problem(seen, remedy)
    if not left:
        seen = f"{given} hides all {len(devices)}: the job trains on the CPU"
        remedy = f"unset {first}"
        return warning(seen, remedy)
    seen = f"{given}: {len(left)} of {len(devices)}"
    return _enough(machine, left, seen)


def _listed(choices: Mapping[str, str]) -> str:
    """`"ROCR_VISIBLE_DEVICES='4,5' and HIP_VISIBLE_DEVICES='1'"`."""
    words = []
    for name, choice in choices.items():
        shown = short_repr(choice)
        words.append(f"{name}={shown}")
    return " and ".join(words)


def _variables(machine: Machine) -> tuple[str, ...]:
    """The visibility variables that apply to the devices here, in the order of their effect."""
    has_nvidia = machine.matching("proc/driver/nvidia/gpus/*")
    if has_nvidia:
        return (_CUDA_VISIBLE,)
    devices = host_accelerators.visible({}, machine.root)
    if not devices:
        return host_accelerators.VISIBILITY
    # AMD's: CUDA's variable applies where HIP's is not set
    if _HIP_VISIBLE in machine.environ:
        return (_ROCR_VISIBLE, _HIP_VISIBLE)
    return (_ROCR_VISIBLE, _CUDA_VISIBLE)


def _mig(given: str, count: int) -> Finding:
    if count > 1:
        seen = f"{given}: CUDA shows a process the first MIG device only"
        remedy = "show each rank one of them"
        return warning(seen, remedy)
    seen = "only the driver's library could tell whether this host has such a MIG device"
    return unknown(f"{given}: {seen}")


def _first_invalid(choices: Mapping[str, str], devices: list[str]) -> str | None:
    """The first variable that names a device that is not here."""
    known = devices
    for variable, choice in choices.items():
        why = _why_invalid(choice, known)
        if why is not None:
            given = _listed({variable: choice})
            return f"{given}, but {why}"
        known = host_accelerators.chosen(known, choice)  # HIP counts what ROCm leaves
    return None


def _why_invalid(choice: str, devices: list[str]) -> str | None:
    """The first word that names no device; CUDA and HIP ignore the words after it."""
    words = [word.strip() for word in choice.split(",")]
    hides_all = words[0] in _HIDE_ALL
    if hides_all:
        return None
    chosen = host_accelerators.chosen(devices, choice)
    named = dict(enumerate(chosen))
    for index, word in enumerate(words):
        device = named.get(index)
        may_be = _may_be_here(word, devices)
        is_here = device in devices
        if not any((is_here, may_be)):
            return _not_here(word)
        earlier = words[:index]
        if word in earlier:
            return f"it names {word} twice"
    return None


def _may_be_here(word: str, devices: list[str]) -> bool:
    """Whether it is the id of a GPU, and that of a device here is not known yet."""
    known = list(filter(_is_gpu_id, devices))
    if known == devices:
        return False
    return _is_gpu_id(word) is not None


def _not_here(word: str) -> str:
    is_index = word.isascii() and word.isdecimal()
    if is_index:
        return f"there is no device {word}"
    name = short_repr(word)
    return f"no device here is called {name}"


def _enough(machine: Machine, left: list[str], seen: str) -> Finding:
    """Whether each local rank gets a device."""
    placement = machine.placement()
    ranks = placement.local_world_size
    if ranks is None:
        return ok(seen)
    last = ranks - 1
    index_of_last = host_accelerators.own_index(len(left), machine.environ, last)
    if index_of_last is not None:
        return ok(seen)
    remedy = f"start {len(left)} per node, or show each rank all of the node's accelerators"
    return problem(f"{seen}; {ranks} ranks are on this node", remedy)
