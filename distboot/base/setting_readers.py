"""From what a user gives for a setting to its value; what is not valid is a `DistbootError`.

Each reader takes a `Given` and returns the value. `base.settings` says which reader a setting has.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from .errors import DistbootError
from .patterns import pattern
from .text import SHORTEST_SECRET, digits, short_repr

_LONGEST = 86400.0  # seconds: a day
# Whether 0 is valid: the least number of seconds, and the hint for one that is not valid
_RANGES = {
    True: (0.0, "use 0 to 86400 seconds"),
    False: (1e-300, "use a number of seconds above 0, at most 86400"),
}
_ADDRESS = pattern(r"[!-~]+:([0-9]{1,5})")
_LARGEST_PORT = 65535
_SHORTEST_HEARTBEAT = 2.0  # seconds
_NAME_PATTERN = pattern(r"[A-Za-z_][A-Za-z0-9_*]*")
_LONGEST_SECRET = 65536  # characters
_STOP_SIGNALS = ("USR1", "USR2", "INT", "HUP", "XCPU")


class Given(NamedTuple):
    """A value, and where it was given."""

    text: str  # for messages: "DISTBOOT_GRACE='soon'", "--grace='soon'", "join_timeout=-1"
    value: object
    code: str  # of the error if it is not valid

    def error(self, why: str, hint: str) -> DistbootError:
        """The error for this value: why it is not valid, and what to do."""
        return DistbootError(self.code, f"{self.text} {why}", hint)


Reader = Callable[[Given], object]


def given_by_option(name: str, value: object) -> Given:
    """A value of an option of the command line, or of an argument of the API."""
    return Given(f"{name}={short_repr(value)}", value, "usage")


def given_by_variable(name: str, text: str) -> Given:
    """A value of a variable."""
    return Given(f"{name}={short_repr(text)}", text, "broken-environment")


def as_given(given: Given) -> object:
    """Any text is valid, or is checked where it is used."""
    return given.value


def secret(given: Given) -> str:
    """A text that is never shown."""
    found = str(given.value)
    if len(found) > _LONGEST_SECRET:
        raise DistbootError(
            given.code,
            f"DISTBOOT_SECRET has {len(found)} characters, and may have {_LONGEST_SECRET}",
            "64 random hex digits are enough: openssl rand -hex 32",
        )
    if 0 < len(found) < SHORTEST_SECRET:
        raise DistbootError(
            given.code,
            f"DISTBOOT_SECRET is too short: it needs at least {SHORTEST_SECRET} characters",
            "it is a text that all ranks know, and no switch: openssl rand -hex 32 makes one",
        )
    return found


def absolute_path(given: Given) -> str:
    """The absolute path of a file: a script may change its directory."""
    path = str(given.value)
    # A folder that is there is refused where it is opened
    is_new_folder = path.endswith(os.sep) and not os.path.isdir(path)
    if is_new_folder:
        raise given.error(
            "is a folder, not a file",
            "add the name of the file",
        )
    try:
        return os.path.abspath(path)
    except FileNotFoundError as error:
        raise given.error(
            "is relative to a working directory that does not exist any more",
            "give an absolute path",
        ) from error


def seconds(given: Given) -> float:
    """A number above 0."""
    return _in_range(given, may_be_0=False)


def seconds_or_0(given: Given) -> float:
    """A number of at least 0."""
    return _in_range(given, may_be_0=True)


def seconds_of_argument(given: Given) -> float:
    """A number above 0, or a timedelta: an argument of the API is not a text."""
    if isinstance(given.value, str):
        _, hint = _RANGES[False]
        raise given.error("is a text, not a number of seconds", hint)
    return seconds(given)


def _in_range(given: Given, *, may_be_0: bool) -> float:
    least, hint = _RANGES[may_be_0]
    number = _number_of_seconds(given.value)
    if not least <= number <= _LONGEST:
        raise given.error("is not a valid number of seconds", hint)
    return number


def _number_of_seconds(value: object) -> float:
    """The seconds in a number, a text or a timedelta; -1 for anything else."""
    # A timedelta has it, as torch.distributed takes one; its module is not imported for it
    total = getattr(value, "total_seconds", None)
    try:
        if total is not None:
            return float(total())
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return -1.0
        return float(value)
    except (TypeError, ValueError, OverflowError):  # TypeError: the class, not a timedelta
        return -1.0


def heartbeat_seconds(given: Given) -> float:
    """A number of at least 2, as a busy machine may take a second to answer."""
    found = seconds(given)
    if found < _SHORTEST_HEARTBEAT:
        raise given.error(
            f"is shorter than {_SHORTEST_HEARTBEAT:g} s",
            "use 2 to 86400 seconds; 15 is enough for a busy machine",
        )
    return found


def seconds_since_1970(given: Given) -> int:
    """`"1763888400"` -> 1763888400."""
    found = digits(str(given.value), 11)
    if found is None:
        raise given.error(
            "is not a time in seconds since 1970",
            "date +%s prints the time now",
        )
    return found


def number_of_restarts(given: Given) -> int:
    """`"3"` -> 3."""
    found = digits(str(given.value), 5)
    if found is None:
        raise given.error(
            "is not a valid number of restarts",
            "use 0 to 99999",
        )
    return found


def switch(given: Given) -> bool:
    """`"1"` is on, `"0"` is off."""
    _refuse_unless_in(given, ("0", "1"))
    return given.value == "1"


def failure_detection(given: Given) -> bool:
    """A switch; a number may be meant as the time that a rank may be silent."""
    more = ""
    if str(given.value)[:1].isdigit():
        more = "; how long a rank may be silent is DISTBOOT_HEARTBEAT_TIMEOUT"
    _refuse_unless_in(given, ("0", "1"), more)
    return given.value == "1"


def one_of(*choices: str) -> Reader:
    """The reader of a setting that is one of these words."""

    def read(given: Given) -> str:
        _refuse_unless_in(given, choices)
        return str(given.value)

    return read


def _refuse_unless_in(given: Given, choices: tuple[str, ...], more: str = "") -> None:
    if given.value in choices:
        return
    *first, last = choices
    listed = ", ".join(first)
    how = "unset it, or set it to"
    if given.code == "usage":
        how = "use"
    raise given.error(f"is neither {listed} nor {last}", f"{how} {listed} or {last}{more}")


def nproc_per_node(given: Given) -> str:
    """How many ranks the wrapper starts: a number above 0, or how to count them."""
    text = str(given.value)
    if text in ("auto", "gpu", "cpu") or digits(text, 4):
        return text
    why = "is neither a number of processes nor auto, gpu or cpu"
    if text.isdecimal():
        why = "is not 1 to 9999 processes"
    how = "unset it, or set it to"
    if given.code == "usage":
        how = "use"
    raise given.error(why, f"{how} the number of ranks of each node")


def stop_signals(given: Given) -> tuple[int, ...]:
    """`"USR1,SIGUSR2"` -> the numbers of these signals."""
    import signal  # here, as few jobs have this setting

    numbers = set()
    for word in str(given.value).split(","):
        name = word.strip().removeprefix("SIG")
        if not name:
            continue
        if name not in _STOP_SIGNALS:
            variable = given.text.partition("=")[0]
            raise DistbootError(
                given.code,
                f"{variable}: {short_repr(name)} is not a signal that can ask a script to stop",
                f"use some of {', '.join(_STOP_SIGNALS)}, with commas; SIGTERM always asks",
            )
        numbers.add(int(signal.Signals[f"SIG{name}"]))
    return tuple(sorted(numbers))


def name_patterns(given: Given) -> tuple[str, ...]:
    """`"HF_*,MODEL_DIR"` -> `("HF_*", "MODEL_DIR")`."""
    found = []
    for word in str(given.value).split(","):
        name = word.strip()
        if not _NAME_PATTERN.fullmatch(name):
            variable = given.text.partition("=")[0]
            raise DistbootError(
                given.code,
                f"{variable}: {short_repr(name)} is not a name of variables",
                "give names with commas; * stands for any characters after the first one",
            )
        found.append(name)
    return tuple(found)


def notice_provider(given: Given) -> str:
    """A cloud whose stop notices distboot can read."""
    if given.value not in ("azure", "aws"):
        raise given.error(
            "is not a provider of stop notices",
            "use azure or aws, or unset it",
        )
    return str(given.value)


def host_and_port(given: Given) -> str:
    """`"169.254.169.254:80"`."""
    text = str(given.value)
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found[1]) > _LARGEST_PORT:
        raise given.error(
            "is not a host with a port",
            "unset it, or use HOST:PORT",
        )
    return text
