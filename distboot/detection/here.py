"""`detect_here`: what an environment proves on this very host.

`detect` is pure, and cannot know whether the host that MASTER_ADDR names is this one. Where no
launcher numbers the process, that decides whether it is alone: `init`, the wrapper and all commands
call `detect_here`, which looks the name up and binds a socket to the address.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from ..base.errors import DistbootError, reason_of
from ..base.text import joined, short_repr
from . import inherited
from .detect import detect
from .parse import is_loopback
from .placement import Placement

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .signs import Sign

LookUp = Callable[[str], Sequence[str]]  # the addresses of a name; raises OSError

_MOST_NAMED = 3  # addresses
_LIMIT = 5.0  # seconds for a name server to answer


def _look_up(name: str) -> list[str]:
    from ..host import network  # here, as most starts need no sockets

    return network.addresses_of(name, _LIMIT)


def is_own_host(host: str) -> bool:
    """Whether this is the name of this host, or an address that a socket of it can have."""
    import socket

    from ..base.text import is_address
    from ..host import network

    if not is_address(host):
        return network.is_this_host(host)
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((host, 0))
        return True
    return False


def detect_here(
    environ: Mapping[str, str] | None = None,
    *,
    launcher: str | None = None,
    look_up: LookUp = _look_up,
    is_own: Callable[[str], bool] = is_own_host,
) -> Placement:
    """`detect`, and `not-alone` also for the address of another host as that of rank 0.

    Args:
        environ: as for `detect`.
        launcher: as for `detect`.
        look_up: the addresses of a name; default: those that this host finds.
        is_own: whether a name or an address is this host's; default: as this host knows it.
    """
    if environ is None:
        environ = os.environ
    placement = detect(environ, launcher=launcher)
    if placement.has_launcher or names_launcher(environ, launcher):
        return placement
    others = _other_hosts(environ, look_up, is_own)
    if others:
        from .not_alone import not_alone

        raise not_alone(others, placement)
    return placement


def names_launcher(environ: Mapping[str, str], launcher: str | None) -> bool:
    """Whether the user names the launcher; `launcher`: by an option or argument."""
    return launcher is not None or bool(environ.get("DISTBOOT_LAUNCHER"))


def _other_hosts(
    environ: Mapping[str, str], look_up: LookUp, is_own: Callable[[str], bool]
) -> list[Sign]:
    """The variables with an address of rank 0 on another host."""
    from . import signs  # here, as the ranks of most jobs need none

    others = []
    without_ours, _ = inherited.restored(environ)
    for sign in signs.addresses(without_ours):
        other = _of_other_host(sign, look_up, is_own)
        if other is not None:
            others.append(other)
    return others


def other_rank_0(environ: Mapping[str, str]) -> str:
    """For people: the address of rank 0, if that is another host; empty: there is none."""
    for sign in _other_hosts(environ, _known_addresses, is_own_host):
        name = sign.variables[0]
        value = short_repr(sign.values[0])
        return f"{sign.meaning} ({name}={value})"
    return ""


def refuse_not_alone(environ: Mapping[str, str]) -> None:
    """`not-alone` where `detect_here` refuses for it; nothing for any other error."""
    try:
        detect_here(environ)
    except DistbootError as error:
        if error.code == "not-alone":
            raise


def _of_other_host(sign: Sign, look_up: LookUp, is_own: Callable[[str], bool]) -> Sign | None:
    """The sign, with how its host differs from this one; None: it is this host."""
    if is_own(sign.host):
        return None
    others: list[str] = []
    try:
        found = look_up(sign.host)
    except (OSError, ValueError) as error:
        why = reason_of(error)
        return _meaning(sign, f"does not resolve on this host ({why})")
    for address in found:
        is_here = is_loopback(address) or is_own(address)
        if not is_here:
            others.append(address)
    if not others:
        return None
    if others == [sign.host]:
        return _meaning(sign, "is not an address of this host")
    listed = joined(others, _MOST_NAMED)
    return _meaning(sign, f"resolves to another host, {listed}")


def _meaning(sign: Sign, what: str) -> Sign:
    """The sign with what is wrong with its address."""
    before = sign.meaning
    meaning = f"{before} {what}"
    return sign._replace(meaning=meaning)


def _known_addresses(name: str) -> list[str]:
    """The addresses of a name; none if it does not resolve, which says nothing."""
    with suppress(OSError):
        return _look_up(name)
    return []
