"""Text for people: quoted values, ranges of ranks, addresses, and lines on stderr."""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, groupby

from .patterns import pattern

# Of a signed URL, or of a connection string
_PARAMETERS = (
    r"sig|([\w-]+[-_])?(signature|token)|pass(word)?|pwd|secret|api[-_]?key",
    r"AccountKey|SharedAccessKey|Shared\w+Signature",
)
SECRET_PARAMETERS = "|".join(_PARAMETERS)
_SECRET_VALUE = pattern(rf"((?:^|[?&;])\s*(?:{SECRET_PARAMETERS})=)[^&;]+", re.IGNORECASE)
SHORTEST_SECRET = 6  # characters of DISTBOOT_SECRET
_MAPPED = pattern(r"::ffff:(?=.*\.)")
_CPU_LIST = pattern(r"(\d{1,5}(-\d{1,5})?(,|$))*")
_MOST_CPUS = 16_384  # Linux 6.17 knows 8,192
_STDERR_LIMIT = 500  # milliseconds
_PIPE_BUF = 4096  # bytes
_LONGEST = 200  # characters of a value that a message shows
_MOST_SPANS = 20  # ranges in one line
# Whether what this process has passed on to its stderr ends without a newline
_is_line_open = False
# Beginnings of a text that are the event of its JSON
_EVENT_WORDS = ("summary", "goodput", "warning", "hint")


def short_repr(value: object) -> str:
    """A value for an error message: quoted and escaped, cut if too long, and without a password."""
    if isinstance(value, str):  # user:password@host, or a token in place of both
        before_host = value.rpartition("@")[0]
        value = value.replace(f"{before_host}@", "***@", 1)
        value = _SECRET_VALUE.sub(r"\1***", value)
    return cut(repr(value), _LONGEST + 1)


def cut(text: str, most: int) -> str:
    """A text of at most so many characters; the last one is `…` if it was longer."""
    if len(text) <= most:
        return text
    kept = text[: most - 1]
    return f"{kept}…"


def escape_control(text: str) -> str:
    """A text for the terminal with control characters escaped, line ends included."""
    escaped = map(_escape_character, text)
    return "".join(escaped)


def _escape_character(character: str) -> str:
    if character.isprintable():
        return character
    quoted = ascii(character)
    return quoted[1:-1]


def host_name() -> str:
    """This host's own name, for the terminal: a container may have any."""
    name = os.uname().nodename
    return escape_control(name)


def writes_json() -> bool:
    """Whether each line of ours is one object of JSON."""
    return os.environ.get("DISTBOOT_LOG_FORMAT") == "json"


def as_json(who: str | None, text: str, event: str = "", **more: object) -> str:
    """A line as one JSON object if DISTBOOT_LOG_FORMAT=json, else an empty text."""
    if not writes_json():
        return ""
    import json  # here and below, as few jobs need them
    import time

    begin, _, rest = text.partition(": ")
    if begin in _EVENT_WORDS:
        event = begin
        text = rest
    fields: dict[str, object] = {
        "event": event or "note",
        "time": round(time.time(), 3),
        "rank": None,
    }
    if who:  # "rank 3", "node 1"
        unit, _, number = who.partition(" ")
        fields[unit] = digits(number)
    fields["host"] = os.uname().nodename
    fields["message"] = text
    fields.update(more)
    line = json.dumps(fields)
    return f"{line}\n"


def log_line(who: str | None, text: str, event: str = "", **more: object) -> None:
    """Print a line about this process on stderr, in one piece: other ranks may write there, too.

    `who` is "rank 3" or "node 1", for logs of many ranks; None for a single process. `event` and
    `more` are fields of the JSON.
    """
    global _is_line_open  # noqa: PLW0603 - a process has one stderr
    line = as_json(who, text, event, **more)
    if not line:
        whose = ""
        if who is not None:
            whose = f"{who} on {host_name()}: "
        line = f"distboot: {whose}{text}\n"
    if _is_line_open:
        line = f"\n{line}"
    with suppress(OSError, ValueError, AttributeError):  # closed: a line is not worth the job
        sys.stderr.flush()
        try:
            file = sys.stderr.fileno()
        except OSError:  # a file in memory
            sys.stderr.write(line)
            return
        if os.isatty(file):
            from .terminal import shown  # here, as most jobs have none

            line = shown(line, text, event)
        _is_line_open = False
        _write_in_time(file, line.encode(errors="backslashreplace"))


def _write_in_time(file: int, data: bytes) -> None:
    """Write, but give up on a reader that has stopped."""
    poll = select.poll()
    poll.register(file, select.POLLOUT)
    while data and poll.poll(_STDERR_LIMIT):
        # A pipe that is ready takes this much at once, pipe(7).
        part = data[:_PIPE_BUF]
        written = os.write(file, part)
        data = data[written:]


def before_output(data: bytes) -> None:
    """Output of a rank is about to be written to stderr.

    Another thread may print a line before `after_output`.
    """
    global _is_line_open  # noqa: PLW0603 - a process has one stderr
    if not data.endswith(b"\n"):
        _is_line_open = True


def after_output(data: bytes) -> None:
    """Output of a rank was written to stderr: the next line of ours begins anew."""
    global _is_line_open  # noqa: PLW0603 - a process has one stderr
    _is_line_open = not data.endswith(b"\n")


def did_you_mean(
    word: str,
    names: Iterable[str],
    known: Iterable[str] = (),
    similarity: float = 0.6,
) -> str:
    """The beginning of a hint, `"did you mean 'torch'? "`, with the first `known` or the name most
    like the word.

    `similarity` is the least ratio of difflib, at most 1. Empty if there is none.
    """
    from difflib import get_close_matches  # here, as it is slow to import

    similar = get_close_matches(word.lower(), list(names), 1, similarity)
    near = [*known, *similar]
    if not near:
        return ""
    return f"did you mean {near[0]!r}? "


def digits(text: str, most: int = 8) -> int | None:
    """The number in a text of at most `most` digits; None for any other text."""
    found = re.fullmatch(f"[0-9]{{1,{most}}}", text)
    if found is None:
        return None
    return int(text)


def counted(count: int, what: str) -> str:
    """`"1 rank"`, `"3 ranks"`."""
    if count == 1:
        return f"1 {what}"
    return f"{count} {what}s"


def runs(numbers: Iterable[int]) -> list[range]:
    """`[0, 1, 2, 5]` -> `[range(0, 3), range(5, 6)]`."""
    found: list[range] = []
    for number in numbers:
        if found and number == found[-1].stop:
            first = found[-1].start
            found[-1] = range(first, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def ranges(numbers: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` -> `"0-2, 5"`; the numbers are in ascending order."""
    spans = map(_span, runs(numbers))
    return joined(spans)


def written_cpus(cpus: Iterable[int]) -> str:
    """`[0, 1, 2, 3, 8]` -> `"0-3,8"`, as the kernel lists CPUs."""
    ordered = sorted(cpus)
    return ",".join(map(_span, runs(ordered)))


def listed_cpus(text: str) -> list[int]:
    """`"0-3,8"` -> `[0, 1, 2, 3, 8]`; `ValueError`: it is not such a list."""
    numbers = chain.from_iterable(_listed_runs(text))
    return list(numbers)


def is_list_of_cpus(text: str) -> bool:
    """Whether a text of anybody is such a list, or empty, and of a size to expand."""
    if not _CPU_LIST.fullmatch(text):
        return False
    count = sum(map(len, _listed_runs(text)))
    return count <= _MOST_CPUS


def _listed_runs(text: str) -> list[range]:
    found = []
    spans = filter(None, text.split(","))
    for span in spans:
        ends = [*map(int, span.split("-"))]
        found.append(range(ends[0], ends[-1] + 1))
    return found


def ranks_said(ranks: Sequence[int]) -> str:
    """`"rank 3"`, `"ranks 0-2, 5"`, for ranks in ascending order."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {ranges(ranks)}"


def with_nodes(ranks: Iterable[int], node_of: Mapping[int, int]) -> str:
    """`"3 (node 0), 8-31 (nodes 1-3)"`, for ranks in ascending order."""

    def nodes_of(run: range) -> list[int]:
        return sorted({node_of[rank] for rank in run})

    spans = []
    for nodes, group in groupby(runs(ranks), nodes_of):
        of_nodes = joined(map(_span, group))
        spans.append(f"{of_nodes} {nodes_said(nodes)}")
    return joined(spans)


def nodes_said(nodes: Sequence[int]) -> str:
    """`"(node 0)"`, `"(nodes 1-3)"`, for nodes in ascending order."""
    if len(nodes) == 1:
        return f"(node {nodes[0]})"
    return f"(nodes {ranges(nodes)})"


def _span(run: range) -> str:
    if len(run) == 1:
        return str(run.start)
    last = run.stop - 1
    return f"{run.start}-{last}"


def joined(parts: Iterable[str], most: int = _MOST_SPANS) -> str:
    """`"0-2, 5"`, `"a, b and 3 more"`: not too many of them."""
    listed = list(parts)
    text = ", ".join(listed[:most])
    left_out = len(listed) - most
    if left_out > 0:
        text += f" and {left_out} more"
    return text


def first_line(error: BaseException) -> str:
    """The first line of the message of any exception; its type if it has no message."""
    message = str(error).strip()
    lines = message.splitlines()
    if not lines:
        return type(error).__name__
    return lines[0]


_IPV4 = frozenset("0123456789.")


def is_address(host: str) -> bool:
    """Whether a host, as `parse_address` returns it, is an address and not a name."""
    is_ipv6 = ":" in host
    return is_ipv6 or _IPV4.issuperset(host)


def format_address(host: str, port: int) -> str:
    """Address and port for a message: `"nodea:29500"`, `"[fd00::1]:29500"`."""
    host = without_mapping(host)
    if ":" in host:
        return f"[{host}]:{port}"
    return f"{host}:{port}"


def without_mapping(host: str) -> str:
    """`"10.0.0.1"` for `"::ffff:10.0.0.1"`, as a socket for both families has it."""
    mapped = _MAPPED.match(host)
    if mapped is None:
        return host
    return host[mapped.end() :]


def without_secret(text: str, secret: str | None = None) -> str:
    """A text without a secret, by default the DISTBOOT_SECRET of this process.

    Removed are the secret itself, its form in repr, ascii and JSON, and their form in these.
    """
    if secret is None:
        secret = os.environ.get("DISTBOOT_SECRET", "")
        if len(secret) < SHORTEST_SECRET:  # it is refused, and may be any number of the text
            return text
    if not secret:
        return text
    forms = {secret, repr(secret.encode(errors="surrogateescape"))[2:-1]}
    for _ in range(2):
        written = map(_written_forms, tuple(forms))
        forms.update(*written)
    longest_first = sorted(forms, key=len, reverse=True)
    for form in longest_first:
        text = text.replace(form, "***")
    return text


def _written_forms(text: str) -> list[str]:
    """A text as it stands within repr, ascii and JSON."""
    import json

    return [
        repr(text)[1:-1],
        ascii(text)[1:-1],
        json.dumps(text)[1:-1],
        json.dumps(text, ensure_ascii=False)[1:-1],
        # With both quotes, repr and ascii escape one of them.
        repr(text + "'\"")[1:-4],
        ascii(text + "'\"")[1:-4],
    ]


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, with the cells of a column below each other."""
    widths = []
    for column in zip(*rows, strict=True):
        widths.append(max(map(len, column)))
    lines = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        line = "  ".join(cells)
        lines.append(line.rstrip())
    return lines


def said_by(speaker: str, text: str) -> str:
    """`text` with the name of who says it, for example `"rank 0"`, unless it begins with that."""
    if text.startswith(f"{speaker} on "):
        return text
    return f"{speaker} says: {text}"
