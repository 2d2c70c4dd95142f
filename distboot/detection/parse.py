"""Addresses, ports and lists of hosts, as people and launchers write them.

`[v6]:port`, `v6`, `v4:port`, `host` and `host:port` are all read; of lists Slurm's compact ones
(`rack[1-2]n[03-04,7]`, counts `4(x2),3`), and SageMaker's, which are JSON. Strict, and without
scontrol: what `scontrol show hostnames` rejects is rejected, and so is what it reads in spite of a
mistake (`n[1-3`, `a,,b`). Every failure is a ValueError whose text names the cause and reads well
after "VARIABLE='value' ". Source: "Hostlist expressions" in slurm(1), SLURM_TASKS_PER_NODE in
srun(1), and scontrol 22.05.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from contextlib import suppress

from ..base.patterns import pattern
from ..base.text import is_address, short_repr

_HOST_NAME = pattern(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?", re.ASCII)
_SCOPE = pattern(r"[A-Za-z0-9_.-]+", re.ASCII)  # the name or the number of an interface

# "worker-7.train.svc:2222" or "10.0.0.7": one match reads what a TF_CONFIG may have 100,000 times.
# Leading zeros are refused: some resolvers read 010 as octal 8.
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = pattern(rf"{_BYTE}(?:\.{_BYTE}){{3}}", re.ASCII)
_USUAL = pattern(
    r"(?=.{1,200}\Z)"
    rf"([A-Za-z][A-Za-z0-9_-]{{0,62}}(?:\.[A-Za-z0-9_-]{{1,63}})*(?<!-)|{_BYTE}(?:\.{_BYTE}){{3}})"
    "(?::([1-9][0-9]{0,3}|[1-5][0-9]{4}))?",
    re.ASCII,
)
_MAY_BE_LOOPBACK = pattern(r"127\.|0\.|.*:", re.DOTALL)
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")

# More hosts or nodes than any machine has; a bound so that a garbled list cannot eat the memory.
_MOST = 1_000_000
_MOST_PROCESSES = 1 << 24  # larger than any job, so that a garbled size is named and not believed
_LONGEST_RANGE = 65536  # Slurm's own bound for one range
_LONGEST_JSON = 1_000_000  # characters

_NAME = pattern(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*", re.ASCII)
_WITH_BRACKETS = pattern(r"((?:[A-Za-z0-9_.][A-Za-z0-9_.-]*)?\[[0-9,-]+\])+", re.ASCII)
_BRACKETS = pattern(r"\[([0-9,-]+)\]", re.ASCII)
# One item of a list, a comma inside its brackets included; what has no "]" goes to the end.
_ITEM = pattern(r"((?:[^,\[]+|\[[^\]]*\]?)*),")
_RANGE = pattern(r"([0-9]{1,18})-([0-9]{1,18})", re.ASCII)
_WHOLE_NUMBER = pattern(r"0|[1-9][0-9]*", re.ASCII)
_COUNT = pattern(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)


def parse_address(text: str) -> tuple[str, int | None]:
    """`(host, port)` of an address: the host without brackets, the port None if there is none."""
    usual = _USUAL.fullmatch(text)
    if usual is None:
        return _parse_unusual_address(text)
    host, port = usual.groups()
    number = None
    if port is not None:
        number = int(port)
    return host, number


def _parse_unusual_address(text: str) -> tuple[str, int | None]:
    if "://" in text:
        raise ValueError("is a URL, not an address")
    if "@" in text:
        raise ValueError("has a user name, which an address has not")
    if text.startswith("["):
        return _bracketed(text)
    colons = text.count(":")
    if colons > 1:
        return _ipv6(text), None
    host, _, port = text.partition(":")
    host = _name_or_ipv4(host)
    if colons == 0:
        return host, None
    number = parse_port(port)
    return host, number


def _bracketed(text: str) -> tuple[str, int | None]:
    """`[v6]` or `[v6]:port`."""
    host, bracket, rest = text[1:].partition("]")
    if not bracket:
        raise ValueError("has a '[' without its ']'")
    colon = rest[:1]
    if colon not in ("", ":"):
        raise ValueError("has something other than ':port' after its ']'")
    address = _ipv6(host)
    if not colon:
        return address, None
    port = parse_port(rest[1:])
    return address, port


def parse_number(text: str, least: int = 0) -> int:
    """A number of 0 or more as a launcher writes it: not 01, nor a digit of another script."""
    found = _WHOLE_NUMBER.fullmatch(text)
    if found is None:
        cause = f"is not a whole number of {least} or more"
        raise ValueError(_empty_or(text, cause))
    number = int(text[:9])
    if number > _MOST_PROCESSES:
        raise ValueError("is larger than any job")
    return number


def parse_count(text: str) -> int:
    """A number of processes or nodes. The reader refuses a 0, with what it contradicts."""
    return parse_number(text, least=1)


def parse_port(text: str) -> int:
    """A TCP port, 1 to 65535."""
    if "://" in text:
        service = _service_link(text)
        raise ValueError(f"is a URL, not a port{service}")
    found = _WHOLE_NUMBER.fullmatch(text)
    if found is None:
        needed = ": a port number is needed"
        raise ValueError(_empty_or(text, "is not a port number", needed))
    port = int(text[:6])
    possible = range(1, 65536)
    if port not in possible:
        raise ValueError("is not a port: ports are 1 to 65535")
    return port


def _empty_or(text: str, cause: str, needed: str = "") -> str:
    """What is wrong with a text: it is empty, or else this cause."""
    if text:
        return cause
    return f"is empty{needed}"


def is_loopback(host: str) -> bool:
    """Whether a host can mean only "this machine itself"; the wildcard addresses reach it, too."""
    name = host.lower()
    if name.rstrip(".") in _LOOPBACK_NAMES:
        return True
    may_be = _MAY_BE_LOOPBACK.match(host)
    if may_be is None:
        return False
    return _is_loopback_address(host)


def _is_loopback_address(host: str) -> bool:
    # Here and below, so that reading a name or an IPv4 address does not pay for it
    import ipaddress

    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    meant = mapped or address
    is_wildcard = meant.is_unspecified
    return meant.is_loopback or is_wildcard


def expand_hosts(text: str) -> list[str]:
    """The host names of a hostlist, in its order: `"n[09-11]"` -> `["n09", "n10", "n11"]`."""
    hosts: list[str] = []
    for item in _items(text):
        if _NAME.fullmatch(item):  # without brackets
            hosts.append(item)
        else:
            hosts += _expand(item, len(hosts))
    _refuse_too_many(len(hosts))
    return hosts


def _items(text: str) -> list[str]:
    """The items between the commas that are not in brackets."""
    has_brackets = "[" in text
    if not has_brackets:
        return text.split(",")
    closed = text + ","
    return _ITEM.findall(closed)


def _expand(item: str, known: int) -> list[str]:
    """The host names of one item with brackets, of a list of which so many are known."""
    if not _WITH_BRACKETS.fullmatch(item):
        shown = short_repr(item)
        raise ValueError(f"is not a hostlist: cannot read {shown}")
    # Plain text at the even places, the inside of a bracket at the odd ones. The last text is
    # empty.
    parts = _BRACKETS.split(item)
    plain = parts[:-1:2]
    brackets = parts[1::2]
    pieces: list[list[str]] = []
    for text, ranges in zip(plain, brackets, strict=True):
        numbers = _numbers(ranges)
        pieces.append([text])
        pieces.append(numbers)
        count = math.prod(map(len, pieces))
        _refuse_too_many(known + count)
    # Slurm's own order: the last bracket runs fastest, then the first, then the second.
    last = pieces.pop()
    pieces.reverse()
    heads = ["".join(reversed(head)) for head in itertools.product(*pieces)]
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
        _refuse_too_many(len(counts) + times)
        counts.extend([int(match[1])] * times)
    return counts


def parse_hosts(text: str) -> list[str]:
    """The hosts of a list with commas, blanks or line breaks: `"a,b c"` -> `["a", "b", "c"]`."""
    length = len(text)
    if length > _LONGEST_JSON:
        longest = f"the longest list that is read has {_LONGEST_JSON}"
        raise ValueError(f"has {length} characters; {longest}")
    words = text.replace(",", " ").split()
    if not words:
        raise ValueError("is empty: a list of hosts is needed")
    hosts = []
    try:
        for word in words:
            host, _ = parse_address(word)
            hosts.append(host)
    except ValueError as cause:
        raise ValueError(f"is not a list of hosts: one of them {cause}") from None
    return hosts


def repeated_host(hosts: Sequence[str]) -> str | None:
    """A host that is in a list more than once, in whatever case, or None.

    Loopback may be, for tries.
    """
    seen: set[str] = set()
    for host in hosts:
        lower = host.lower()
        is_new = lower not in seen
        seen.add(lower)
        if is_new:
            continue
        is_here = is_loopback(host)
        if not is_here:
            return host
    return None


def json_hosts(text: str) -> list[str]:
    """The host names in a JSON list: `'["algo-1","algo-2"]'` -> `["algo-1", "algo-2"]`."""
    hosts = json_value(text)
    if not isinstance(hosts, list):
        raise ValueError(_NOT_JSON_HOSTS)  # noqa: TRY004 - of a text
    kinds = set(map(type, hosts))
    if kinds != {str}:
        raise ValueError(_NOT_JSON_HOSTS)
    different = set(hosts)
    if len(different) != len(hosts):
        raise ValueError("names a host twice")
    wrong = next(itertools.filterfalse(_NAME.fullmatch, hosts), None)
    if wrong is not None:
        raise ValueError(f"{_NOT_JSON_HOSTS}: cannot read {short_repr(wrong)}")
    return hosts


_NOT_JSON_HOSTS = "is not a JSON list of host names"


def json_value(text: str) -> object:
    """The value of a text of JSON; None if it is not JSON, or too long."""
    import json  # only here, so that other launchers do not pay for it

    if len(text) > _LONGEST_JSON:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _service_link(text: str) -> str:
    if not text.startswith(("tcp://", "udp://")):
        return ""
    # Kubernetes sets NAME_PORT=tcp://10.0.0.1:2222 in every pod for a Service called NAME.
    return (
        ": Kubernetes made it from a Service of that name; set enableServiceLinks: false in the pod"
    )


def _ipv6(host: str) -> str:
    import ipaddress

    address, percent, scope = host.partition("%")
    is_scope = percent == "" or _SCOPE.fullmatch(scope)
    if is_scope:
        with suppress(ValueError):
            normal = str(ipaddress.IPv6Address(address))
            return f"{normal}{percent}{scope}"
    shown = short_repr(host)
    raise ValueError(f"is not an IPv6 address: {shown} does not parse")


def _name_or_ipv4(host: str) -> str:
    if not host:
        raise ValueError("is empty: a host is needed")
    if _IPV4.fullmatch(host):
        return host
    if is_address(host):
        raise ValueError("is not an IPv4 address")
    labels = host.removesuffix(".").split(".")
    longest = max(map(len, labels))
    shortest = min(map(len, labels))
    is_name = _HOST_NAME.fullmatch(host) is not None
    checks = (is_name, len(host) <= 253, shortest > 0, longest <= 63)
    if not all(checks):
        raise ValueError("is not a host name")
    return host


def _numbers(ranges: str) -> list[str]:
    """The numbers in a bracket: `"09-11,7"` -> `["09", "10", "11", "7"]`."""
    numbers: list[str] = []
    for item in ranges.split(","):
        if item.isdigit():
            numbers.append(item)
        else:
            numbers += _range(item, len(numbers))
    return numbers


def _range(item: str, known: int) -> list[str]:
    """The numbers of a range, in a bracket of which so many are known."""
    match = _RANGE.fullmatch(item)
    shown = short_repr(item)
    if not match:
        raise ValueError(f"is not a hostlist: cannot read the range {shown}")
    low = int(match[1])
    high = int(match[2])
    if high < low:
        raise ValueError(f"is not a hostlist: the range {shown} runs backwards")
    if high - low >= _LONGEST_RANGE:
        raise ValueError(
            f"is not a hostlist: the range {shown} has more than {_LONGEST_RANGE} numbers"
        )
    _refuse_too_many(known + high - low + 1)
    padded = f"%0{len(match[1])}d"
    return [padded % number for number in range(low, high + 1)]


def _refuse_too_many(count: int) -> None:
    too_many = count > _MOST
    if too_many:
        raise ValueError(f"names more than {_MOST} nodes")
