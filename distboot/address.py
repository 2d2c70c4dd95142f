"""Reading of addresses and ports as people and launchers write them, and ports for those who gave none.

`[v6]:port`, `v6`, `v4:port`, `host` and `host:port` are all read. Every failure is a ValueError whose
text names the cause and reads well after "VARIABLE='value' ".
"""

from __future__ import annotations

import re
import zlib
from contextlib import suppress

from .errors import quoted

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?", re.ASCII)
_SCOPE = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)  # the name or the number of an interface
_DIGITS_AND_DOTS = re.compile(r"[0-9.]+", re.ASCII)

# Above the usual ephemeral ranges (Linux 32768-60999), so that an outgoing connection does not sit on the port.
DERIVED_PORTS = range(61000, 65536)


def parse_address(text: str) -> tuple[str, int | None]:
    """`(host, port)` of an address; the host comes without brackets, the port is None when there is none.

    Raises:
        ValueError: the text is no address.
    """
    if "://" in text:
        raise ValueError("is a URL, not an address" + _service_link(text))
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket:
            raise ValueError("has a '[' without its ']'")
        if rest and not rest.startswith(":"):
            raise ValueError("has something other than ':port' after its ']'")
        return _ipv6(host), parse_port(rest[1:]) if rest else None
    if text.count(":") > 1:
        return _ipv6(text), None
    host, colon, port = text.partition(":")
    return _name_or_ipv4(host), parse_port(port) if colon else None


def is_whole_number(text: str) -> bool:
    """Whether a text is a number of 0 or more as a launcher writes it.

    01 or a digit of another script is somebody's mistake.
    """
    return text.isascii() and text.isdigit() and (text == "0" or text[0] != "0")


def parse_port(text: str) -> int:
    """A TCP port, 1 to 65535.

    Raises:
        ValueError: the text is no port.
    """
    if "://" in text:
        raise ValueError("is a URL, not a port" + _service_link(text))
    if not is_whole_number(text):
        raise ValueError("is not a port number" if text else "is empty where a port number is due")
    if len(text) > 5 or not 1 <= int(text) <= 65535:
        raise ValueError("is not a port: ports are 1 to 65535")
    return int(text)


def is_loopback(host: str) -> bool:
    """Whether a host name or address can mean only "this machine itself"; the wildcards reach it too.

    What is neither a name nor an address is not.
    """
    if host.lower().rstrip(".") in ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"):
        return True
    if not is_address(host):
        return False
    import ipaddress

    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped.is_loopback or mapped.is_unspecified


def is_address(host: str) -> bool:
    """Whether a host that was read by `parse_address` is an address, and no name that has to be looked up."""
    return ":" in host or _DIGITS_AND_DOTS.fullmatch(host) is not None


def socket_said(host: str, port: int) -> str:
    """Address and port for a message: `"nodea:29500"`, `"[fd00::1]:29500"`."""
    host = without_mapping(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def without_mapping(host: str) -> str:
    """An IPv4 address as itself, where a socket that serves both families says `::ffff:10.0.0.1`."""
    return host.removeprefix("::ffff:") if "." in host else host


def derived_port(job_id: str) -> int:
    """A port in `DERIVED_PORTS` that is the same wherever the job id is the same."""
    return DERIVED_PORTS[zlib.crc32(job_id.encode(errors="surrogatepass")) % len(DERIVED_PORTS)]


def _service_link(text: str) -> str:
    if not text.startswith(("tcp://", "udp://")):
        return ""
    # Kubernetes sets NAME_PORT=tcp://10.0.0.1:2222 in every pod for a Service called NAME.
    return ": Kubernetes made it from a Service of that name; set enableServiceLinks: false in the pod"


def _ipv6(host: str) -> str:
    import ipaddress  # only here, so that reading a name or an IPv4 address does not pay for it

    address, percent, scope = host.partition("%")
    if not percent or _SCOPE.fullmatch(scope):
        with suppress(ValueError):
            return str(ipaddress.IPv6Address(address)) + percent + scope
    raise ValueError(f"is not an IPv6 address: {quoted(host)} does not parse")


def _name_or_ipv4(host: str) -> str:
    if not host:
        raise ValueError("is empty where a host is due")
    if _DIGITS_AND_DOTS.fullmatch(host):
        parts = host.split(".")
        # Leading zeros are refused: some resolvers read 010 as octal 8.
        if len(parts) != 4 or not all(p and len(p) <= 3 and str(int(p)) == p and int(p) <= 255 for p in parts):
            raise ValueError("is not an IPv4 address")
    elif (
        not _HOST_NAME.fullmatch(host)
        or len(host) > 253
        or not all(0 < len(label) <= 63 for label in host.removesuffix(".").split("."))
    ):
        raise ValueError("is not a host name")
    return host
