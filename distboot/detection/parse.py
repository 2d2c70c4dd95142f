"""Addresses, ports and lists of hosts, as people and launchers write them.

`[v6]:port`, `v6`, `v4:port`, `host` and `host:port` are all read; of lists Slurm's compact ones (`rack[1-2]n[03-04,7]`,
counts `4(x2),3`), and SageMaker's, which are JSON. Strict, and without scontrol: what `scontrol show hostnames` rejects
is rejected, and so is what it reads in spite of a mistake (`n[1-3`, `a,,b`). Every failure is a ValueError whose text
names the cause and reads well after "VARIABLE='value' ".
Source: "Hostlist expressions" in slurm(1), SLURM_TASKS_PER_NODE in srun(1), and scontrol 22.05.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from contextlib import suppress

from ..base.text import is_address, short_repr

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?", re.ASCII)
_SCOPE = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)  # the name or the number of an interface

# "worker-7.train.svc:2222" or "10.0.0.7": one match reads what a TF_CONFIG may have 100,000 times.
# Leading zeros are refused: some resolvers read 010 as octal 8.
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = re.compile(rf"{_BYTE}(?:\.{_BYTE}){{3}}", re.ASCII)
_USUAL = re.compile(
    rf"([A-Za-z][A-Za-z0-9_-]{{0,62}}(?:\.[A-Za-z0-9_-]{{1,63}})*(?<!-)|{_BYTE}(?:\.{_BYTE}){{3}})"
    "(?::([1-9][0-9]{0,3}|[1-5][0-9]{4}))?",
    re.ASCII,
)
_LONGEST_USUAL = 200
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")

# More hosts or nodes than any machine has; a bound so that a garbled list cannot eat the memory.
_MOST = 1_000_000
_MOST_PROCESSES = 1 << 24  # larger than any job, so that a garbled size is named and not believed
_LONGEST_RANGE = 65536  # Slurm's own bound for one range
_LONGEST_JSON = 1_000_000  # characters

_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*", re.ASCII)
_BRACKETS = re.compile(r"\[([0-9,-]+)\]", re.ASCII)
# One item of a list, a comma inside its brackets included; what has no "]" goes to the end.
_ITEM = re.compile(r"((?:[^,\[]+|\[[^\]]*\]?)*),")
_RANGE = re.compile(r"([0-9]{1,18})-([0-9]{1,18})", re.ASCII)
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)


def parse_address(text: str) -> tuple[str, int | None]:
    """`(host, port)` of an address; the host comes without brackets, the port is None where the address has no port."""
    usual = _USUAL.fullmatch(text)
    if usual is not None and len(text) <= _LONGEST_USUAL:
        host, port = usual.groups()
        return host, _optional_port(port)
    if "://" in text:
        raise ValueError("is a URL, not an address" + _service_link(text))
    if text.startswith("["):
        return _bracketed(text)
    if text.count(":") > 1:
        return _ipv6(text), None
    host, colon, port = text.partition(":")
    return _name_or_ipv4(host), parse_port(port) if colon else None


def _optional_port(text: str | None) -> int | None:
    """The number of a port that has the form of one."""
    if text is None:
        return None
    return int(text)


def _bracketed(text: str) -> tuple[str, int | None]:
    """`[v6]` or `[v6]:port`."""
    host, bracket, rest = text[1:].partition("]")
    if not bracket:
        raise ValueError("has a '[' without its ']'")
    if not rest:
        return _ipv6(host), None
    if not rest.startswith(":"):
        raise ValueError("has something other than ':port' after its ']'")
    return _ipv6(host), parse_port(rest[1:])


def parse_number(text: str, least: int = 0) -> int:
    """A number of 0 or more as a launcher writes it: not 01, nor a digit of another script."""
    if not _is_whole_number(text):
        raise ValueError(f"is not a whole number of {least} or more" if text else "is empty")
    number = int(text[:9])
    if number > _MOST_PROCESSES:
        raise ValueError("is larger than any job")
    return number


def parse_count(text: str) -> int:
    """A number of processes or nodes; the reader says what a 0 contradicts."""
    return parse_number(text, least=1)


def parse_port(text: str) -> int:
    """A TCP port, 1 to 65535."""
    if "://" in text:
        raise ValueError("is a URL, not a port" + _service_link(text))
    if not _is_whole_number(text):
        raise ValueError("is not a port number" if text else "is empty: a port number is needed")
    if len(text) > 5 or not 1 <= int(text) <= 65535:
        raise ValueError("is not a port: ports are 1 to 65535")
    return int(text)


def is_loopback(host: str) -> bool:
    """Whether a host name or address can mean only "this machine itself"; the wildcards reach it too."""
    if host.lower().rstrip(".") in _LOOPBACK_NAMES:
        return True
    if not is_address(host):
        return False
    if ":" not in host and not host.startswith(("127.", "0.")):
        return False
    import ipaddress

    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped.is_loopback or mapped.is_unspecified


def expand_hosts(text: str) -> list[str]:
    """The host names of a hostlist, in its order: `"n[09-11]"` -> `["n09", "n10", "n11"]`."""
    hosts: list[str] = []
    for item in _items(text):
        if _NAME.fullmatch(item):  # without brackets
            hosts.append(item)
        else:
            hosts += _expand(item, len(hosts))
    _bounded(len(hosts))
    return hosts


def _items(text: str) -> list[str]:
    if "[" not in text:
        return text.split(",")
    return _ITEM.findall(text + ",")


def _expand(item: str, known: int) -> list[str]:
    """The host names of one item with brackets, of a list of which so many are known."""
    # Plain text at the even places, the inside of a bracket at the odd ones. Nothing follows the last bracket.
    *parts, rest = _BRACKETS.split(item)
    plain = parts[::2]
    if rest or not parts or not all(map(_NAME.fullmatch, filter(None, plain))):
        raise ValueError(f"is not a hostlist: cannot read {short_repr(item)}")
    pieces: list[list[str]] = []
    for text, ranges in zip(plain, parts[1::2], strict=True):
        pieces += [[text], _numbers(ranges)]
        _bounded(known + math.prod(map(len, pieces)))
    # Slurm's own order: the last bracket runs fastest, then the first, then the second.
    last = pieces.pop()
    heads = ["".join(reversed(head)) for head in itertools.product(*reversed(pieces))]
    return [head + number for head in heads for number in last]


def expand_counts(text: str) -> list[int]:
    """One count a node, in node order: `"4(x2),3"` -> `[4, 4, 3]`."""
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if not match:
            raise ValueError(
                f"is not a list of counts like '4(x2),3': cannot read {short_repr(item)}"
            )
        times = int(match[2] or 1)
        _bounded(len(counts) + times)
        counts.extend([int(match[1])] * times)
    return counts


def parse_hosts(text: str) -> list[str]:
    """The hosts of a list with commas, blanks or line breaks: `"a,b c"` -> `["a", "b", "c"]`."""
    if len(text) > _LONGEST_JSON:
        raise ValueError(
            f"has {len(text)} characters; the longest list that is read has {_LONGEST_JSON}"
        )
    words = text.replace(",", " ").split()
    if not words:
        raise ValueError("is empty: a list of hosts is needed")
    try:
        return [parse_address(word)[0] for word in words]
    except ValueError as cause:
        raise ValueError(f"is not a list of hosts: one of them {cause}") from None


def repeated_host(hosts: Sequence[str]) -> str | None:
    """A host that is in a list more than once, in whatever case; None: there is none. Loopback may be, for tries."""
    seen = set()
    for host in hosts:
        lower = host.lower()
        if lower in seen and not is_loopback(host):
            return host
        seen.add(lower)
    return None


def json_hosts(text: str) -> list[str]:
    """The host names in a JSON list: `'["algo-1","algo-2"]'` -> `["algo-1", "algo-2"]`."""
    import json  # only here, so that other launchers do not pay for it

    try:
        hosts = json.loads(text) if len(text) <= _LONGEST_JSON else None
    except (ValueError, RecursionError):
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
        raise ValueError("is not a JSON list of host names")
    if len(set(hosts)) != len(hosts):
        raise ValueError("names a host twice")
    for host in hosts:
        if not _NAME.fullmatch(host):
            raise ValueError(f"is not a JSON list of host names: cannot read {short_repr(host)}")
    return hosts


def _is_whole_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and (text == "0" or text[0] != "0")


def _service_link(text: str) -> str:
    if not text.startswith(("tcp://", "udp://")):
        return ""
    # Kubernetes sets NAME_PORT=tcp://10.0.0.1:2222 in every pod for a Service called NAME.
    return (
        ": Kubernetes made it from a Service of that name; set enableServiceLinks: false in the pod"
    )


def _ipv6(host: str) -> str:
    import ipaddress  # only here, so that reading a name or an IPv4 address does not pay for it

    address, percent, scope = host.partition("%")
    if not percent or _SCOPE.fullmatch(scope):
        with suppress(ValueError):
            return str(ipaddress.IPv6Address(address)) + percent + scope
    raise ValueError(f"is not an IPv6 address: {short_repr(host)} does not parse")


def _name_or_ipv4(host: str) -> str:
    if not host:
        raise ValueError("is empty: a host is needed")
    if _IPV4.fullmatch(host):
        return host
    if is_address(host):
        raise ValueError("is not an IPv4 address")
    if not _HOST_NAME.fullmatch(host) or len(host) > 253:
        raise ValueError("is not a host name")
    labels = host.removesuffix(".").split(".")
    if not all(0 < len(label) <= 63 for label in labels):
        raise ValueError("is not a host name")
    return host


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        if item.isdigit():
            numbers.append(item)
            continue
        match = _RANGE.fullmatch(item)
        if not match:
            raise ValueError(f"is not a hostlist: cannot read the range {short_repr(item)}")
        low, high, width = int(match[1]), int(match[2]), len(match[1])
        if high < low:
            raise ValueError(f"is not a hostlist: the range {short_repr(item)} runs backwards")
        if high - low >= _LONGEST_RANGE:
            raise ValueError(
                f"is not a hostlist: the range {short_repr(item)} has more than {_LONGEST_RANGE} numbers"
            )
        _bounded(len(numbers) + high - low + 1)
        padded = f"%0{width}d"
        numbers.extend([padded % number for number in range(low, high + 1)])
    return numbers


def _bounded(count: int) -> None:
    if count > _MOST:
        raise ValueError(f"names more than {_MOST} nodes")
