"""The error for a process that is alone by its placement, while its environment shows others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..base.errors import UNKNOWN_RANK, DistbootError
from ..base.text import digits, short_repr
from . import signs
from .parse import parse_address
from .placement import VARIABLES, Placement
from .signs import MALFORMED, Sign

_ADDRESS = "<host of node 0>"
_MOST = 20  # signs in one message
PER_NODE = "--nproc-per-node auto"  # in the remedy
_WRAPPER = f"python -m distboot run {PER_NODE} -- python train.py"


def refuse_other_node(
    placement: Placement, environ: Mapping[str, str], markers: Sequence[str]
) -> None:
    """Refuse a node of a platform with these markers that is another node by other variables."""
    sign = signs.other_nodes(environ, placement, markers)
    if sign is None:
        return
    index, count = sign.variables
    number, nodes = map(short_repr, sign.values)
    name = placement.launcher
    typed = f"${count}"
    if signs.counts_processes(count):
        typed = "<nodes>"
    raise DistbootError(
        "conflicting-launchers",
        f"{name} has node {placement.rank} of {placement.world_size} "
        f"({placement.sources['rank']}), but {index}={number} and {count}={nodes} disagree",
        f"DISTBOOT_LAUNCHER={name} if {index} and {count} are about something else; "
        f"if they are right, set NODE_RANK=${index} NUM_NODES={typed} DISTBOOT_LAUNCHER=nodes, "
        "and MASTER_ADDR to the host of node 0",
    ).of(UNKNOWN_RANK)


def not_alone(found: Sequence[Sign], placement: Placement) -> DistbootError:
    """The error for these signs of other processes."""
    if all(sign.meaning == MALFORMED for sign in found):
        return _malformed(found)
    claim = "no launcher numbers this process, and"
    if placement.has_launcher:
        source = placement.sources["rank"]
        claim = f"launcher {placement.launcher!r} has rank 0 of 1 ({source}), but"
    lines = [f"{claim} its environment shows other processes:", *map(str, found[:_MOST])]
    if len(found) > _MOST:
        lines.append(f"and {len(found) - _MOST} more")
    error = DistbootError("not-alone", "\n  ".join(lines), _remedy(found, placement))
    return error.of(UNKNOWN_RANK)


def _malformed(found: Sequence[Sign]) -> DistbootError:
    names = ", ".join(sign.variables[0] for sign in found)
    return DistbootError(
        "broken-environment",
        "\n  ".join(map(str, found)),
        f"set {names} to a whole number of 1 or more, or unset it; "
        "or set DISTBOOT_LAUNCHER=none if this process is alone",
    ).of(UNKNOWN_RANK)


def _remedy(found: Sequence[Sign], placement: Placement) -> str:
    index, count = _index_and_count(found)
    address = _ADDRESS
    for sign in found:
        if sign.host:
            address = _address(sign)
            break
    numbers = f"NODE_RANK={index} NUM_NODES={count} MASTER_ADDR={address} MASTER_PORT=29500"
    if placement.sources["rank"] == VARIABLES["rank"]:
        numbers = f"env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u LOCAL_WORLD_SIZE {numbers}"
    return (
        f"with one process per node: {numbers} {_WRAPPER}; "
        "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every process; "
        "or DISTBOOT_LAUNCHER=none if this process is alone"
    )


def _index_and_count(found: Sequence[Sign]) -> tuple[str, str]:
    """What to type for the number of this node and that of all; variables if all signs agree."""
    pairs = [sign for sign in found if len(sign.variables) == 2]
    values = {sign.values for sign in pairs}
    if len(values) != 1:
        return "<number of this node>", "<nodes>"
    number, nodes = map(digits, pairs[0].values)
    index, count = pairs[0].variables
    is_of_node = number is not None and nodes is not None and number < nodes
    if signs.counts_processes(count) or not is_of_node:
        return "<number of this node>", "<nodes>"
    return f"${index}", f"${count}"


def _address(sign: Sign) -> str:
    """What to type for MASTER_ADDR; a URL is not a valid address."""
    is_address = "://" not in sign.values[0]
    if is_address:
        return f"${sign.variables[0]}"
    try:
        parse_address(sign.host)
    except ValueError:
        return _ADDRESS
    return sign.host
