"""Every variable of distboot's own, with its default. What an argument or an option says comes before it.

A value that is not valid is refused: `broken-environment`, or `usage` where it was given as an argument or option.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .errors import DistbootError
from .limits import seconds
from .text import (
    digits,
    escape_control,
    log_line,
    short_repr,
)

# What users set; empty: it has no default.
DEFAULTS: Mapping[str, str] = {
    "DISTBOOT_HANG": "warn",
    # Seconds; torch's own time limit of a collective operation on Gloo
    "DISTBOOT_HANG_AFTER": "1800",
    "DISTBOOT_LATE_AFTER": "60",  # seconds
    # Seconds; Kubernetes, torchrun and Slurm (KillWait) wait as long by default
    "DISTBOOT_GRACE": "30",
    "DISTBOOT_JOIN_TIMEOUT": "300",  # seconds; torch's own default for its store
    "DISTBOOT_LAUNCHER": "",
    "DISTBOOT_FAILURE_DETECTION": "1",
    "DISTBOOT_HEARTBEAT_TIMEOUT": "15",  # seconds
    "DISTBOOT_LOG": "text",
    "DISTBOOT_MAX_RESTARTS": "0",
    "DISTBOOT_NOTICE_ADDRESS": "169.254.169.254:80",  # of Azure and AWS
    "DISTBOOT_NPROC_PER_NODE": "",
    "DISTBOOT_REPORT": "",
    "DISTBOOT_RENDEZVOUS": "1",
    "DISTBOOT_RESTART_DELAY": "0",  # seconds
    "DISTBOOT_RESTART_WINDOW": "600",  # seconds
    "DISTBOOT_SECRET": "",
    "DISTBOOT_SIGQUIT": "forward",
    "DISTBOOT_STOP_SIGNALS": "",
    "DISTBOOT_STOP_BEFORE_END": "",
    "DISTBOOT_STOP_NOTICE": "",
    "DISTBOOT_JOB_END_TIME": "",
}
# What one process of distboot leaves for another.
RANK = (  # by the agent of a node, for each rank of its own
    *("DISTBOOT_RANK", "DISTBOOT_WORLD_SIZE", "DISTBOOT_LOCAL_RANK", "DISTBOOT_LOCAL_WORLD_SIZE"),
    *("DISTBOOT_NODE_RANK", "DISTBOOT_NUM_NODES"),
)
INTERNAL = (
    "DISTBOOT_AGENT",
    "DISTBOOT_CRASH_HOOKS",
    "DISTBOOT_HOST",
    "DISTBOOT_PLACEMENT",
    "DISTBOOT_PYTEST",
    "DISTBOOT_RESTART_COUNT",
    "DISTBOOT_TRY",
    *RANK,
)
KNOWN = (*DEFAULTS, *INTERNAL)

# What users set by hand; other names are too common
_OF_PYTORCH = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
_OURS_OR_SIMILAR = ("DISTBOOT", "MASTER", "WORLD")
_NOTICES = ("", "azure", "aws")
_STOP_SIGNALS = ("USR1", "USR2", "INT", "HUP", "XCPU")
_ADDRESS = re.compile(r"[!-~]+:([0-9]{1,5})")
_LARGEST_PORT = 65535
_LEAST_BOUND = 2.0  # seconds
_ALIKE = 0.85  # of 1, the beginning that they have in common included


class SupervisionSettings(NamedTuple):
    """What a user can set about failure detection."""

    grace: float  # seconds between TERM and KILL for a process that has to stop
    report: str | None = None  # file for the report of the job, absolute
    # The launcher of which each rank starts a job of its own, as far as the wrapper knows
    apart: str = ""
    # What the environment reserves and the job leaves unused, for the summary; see `detection.allocation`
    unused: str = ""
    detects: bool = True  # whether the failure of a rank is told to all others
    stop_signals: tuple[int, ...] = ()  # that ask the script to stop, besides SIGTERM
    # When the job is asked to stop, as its end is known; in seconds since the epoch
    stop_at: float | None = None
    late_after: float = 0.0  # seconds for which others wait for a rank before it is said; 0: never
    # Seconds without any movement after which the job ends; None: it does not
    hang_after: float | None = None
    quit_shows: bool = False  # whether SIGQUIT lets the wrapper say where all ranks are
    # Whose notices of the end of a machine ask the script to stop: "azure" or "aws"; empty: none
    stop_notice: str = ""
    notice_address: str = ""  # of the metadata service that has them, with its port

    @property
    def stalls_after(self) -> float:
        """Seconds without movement after which a rank is looked at; 0: it is not."""
        return min(filter(None, (self.late_after, self.hang_after)), default=0.0)


def heartbeat_timeout(environ: Mapping[str, str]) -> float:
    """Seconds for which a rank may be silent."""
    found = _seconds(environ, "DISTBOOT_HEARTBEAT_TIMEOUT")
    if found < _LEAST_BOUND:
        why = f"DISTBOOT_HEARTBEAT_TIMEOUT={found:g} is shorter than {_LEAST_BOUND:g} s"
        raise DistbootError(
            "broken-environment", why, "give 2 to 86400; 15 is enough for a busy machine"
        )
    return found


def supervision_settings(
    environ: Mapping[str, str], grace: float | None = None, report: str | None = None
) -> SupervisionSettings:
    """Those of this process; an option that was given comes before what the environment says."""
    hang_after: float | None = _hang_after(environ)
    if not _stops_hangs(environ):
        hang_after = None
    report = report or environ.get("DISTBOOT_REPORT")
    return SupervisionSettings(
        grace_setting(environ, grace),
        os.path.abspath(report) if report else None,  # now, as a script may change its directory
        detects=_detects(environ),
        stop_signals=_stop_signals(environ),
        stop_at=_stop_at(environ),
        late_after=_late_after(environ),
        hang_after=hang_after,
        quit_shows=_quit_shows(environ),
        stop_notice=_stop_notice(environ),
        notice_address=_notice_address(environ),
    )


def _detects(environ: Mapping[str, str]) -> bool:
    more = "; how long a rank may be silent is DISTBOOT_HEARTBEAT_TIMEOUT"
    return _switch(environ, "DISTBOOT_FAILURE_DETECTION", more)


def _late_after(environ: Mapping[str, str]) -> float:
    return _seconds(environ, "DISTBOOT_LATE_AFTER", may_be_0=True)


def _hang_after(environ: Mapping[str, str]) -> float:
    return _seconds(environ, "DISTBOOT_HANG_AFTER")


def _stops_hangs(environ: Mapping[str, str]) -> bool:
    return _switch(environ, "DISTBOOT_HANG", choices=("warn", "stop"))


def _quit_shows(environ: Mapping[str, str]) -> bool:
    return _switch(environ, "DISTBOOT_SIGQUIT", choices=("forward", "stacks"))


def _join_timeout(environ: Mapping[str, str]) -> float:
    return _seconds(environ, "DISTBOOT_JOIN_TIMEOUT")


def _meets(environ: Mapping[str, str]) -> bool:
    return _switch(environ, "DISTBOOT_RENDEZVOUS")


def _stop_notice(environ: Mapping[str, str]) -> str:
    """The provider whose notices ask the script to stop, or an empty string."""
    name = environ.get("DISTBOOT_STOP_NOTICE", "")
    if name not in _NOTICES:
        problem = f"DISTBOOT_STOP_NOTICE={short_repr(name)} is not a provider of stop notices"
        hint = "use azure or aws, or unset it"
        raise DistbootError("broken-environment", problem, hint)
    return name


def _notice_address(environ: Mapping[str, str]) -> str:
    address = environ.get("DISTBOOT_NOTICE_ADDRESS") or DEFAULTS["DISTBOOT_NOTICE_ADDRESS"]
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found[1]) > _LARGEST_PORT:
        problem = f"DISTBOOT_NOTICE_ADDRESS={short_repr(address)} is not a host with a port"
        hint = "unset it, or use HOST:PORT"
        raise DistbootError("broken-environment", problem, hint)
    return address


def _stop_signals(environ: Mapping[str, str]) -> tuple[int, ...]:
    """`"USR1,SIGUSR2"` -> the numbers of these signals."""
    import signal  # here, as most do without

    names = [
        name.strip().removeprefix("SIG")
        for name in environ.get("DISTBOOT_STOP_SIGNALS", "").split(",")
    ]
    for name in names:
        if name not in ("", *_STOP_SIGNALS):
            raise DistbootError(
                "broken-environment",
                f"DISTBOOT_STOP_SIGNALS: {short_repr(name)} is not a signal that can ask a script to stop",
                f"give some of {', '.join(_STOP_SIGNALS)}, with commas; SIGTERM always asks",
            )
    return tuple(sorted(int(signal.Signals[f"SIG{name}"]) for name in names if name))


def _stop_at(environ: Mapping[str, str]) -> float | None:
    """When the job is to be asked to stop; None: only when someone asks."""
    if not environ.get("DISTBOOT_STOP_BEFORE_END"):
        return None
    before = _seconds(environ, "DISTBOOT_STOP_BEFORE_END")
    # Slurm, from 23.02 on (its NEWS): SLURM_JOB_END_TIME=1763888400
    name = next(
        (name for name in ("DISTBOOT_JOB_END_TIME", "SLURM_JOB_END_TIME") if environ.get(name)),
        None,
    )
    if name is None:
        hint = "DISTBOOT_JOB_END_TIME=$(( $(date +%s) + 86400 )) for a day from now, or unset it"
        what = "DISTBOOT_STOP_BEFORE_END is set, and nothing says when the job ends: SLURM_JOB_END_TIME is missing"
        raise DistbootError("broken-environment", what, hint)
    end = digits(environ[name], 11)
    if end is None:
        problem = f"{name}={short_repr(environ[name])} is not a time in seconds since 1970"
        raise DistbootError("broken-environment", problem, "date +%s prints the time now")
    return end - before


def misspelled(environ: Mapping[str, str]) -> dict[str, str]:
    """Each variable that looks like a misspelled setting, or like a missing one of PyTorch's; and what is meant."""
    strange = [
        name
        for name in environ
        if name.startswith(_OURS_OR_SIMILAR) and name not in (*KNOWN, *_OF_PYTORCH)
    ]
    if not strange:
        return {}
    from difflib import get_close_matches  # here, as it is slow to import

    # What is like no setting is the user's own, or of a newer distboot.
    wanted = [*KNOWN, *(name for name in _OF_PYTORCH if name not in environ)]
    return {
        name: close[0] for name in strange if (close := get_close_matches(name, wanted, 1, _ALIKE))
    }


def warn_of_unknown(environ: Mapping[str, str], rank: int, who: str | None) -> None:
    """Warn of each variable that looks like a misspelled setting; rank 0 does, for all."""
    if rank or "DISTBOOT_PLACEMENT" in environ:  # the wrapper around this has said it
        return
    for name, meant in misspelled(environ).items():
        log_line(
            who,
            f"warning: unknown variable {escape_control(name)} is ignored; did you mean {meant}?",
        )


def join_timeout_setting(given: object, name: str = "join_timeout") -> float:
    """The join timeout in seconds: as given, under this name, or DISTBOOT_JOIN_TIMEOUT, or the default."""
    return _seconds(os.environ, "DISTBOOT_JOIN_TIMEOUT", name, given)


def rendezvous_setting() -> bool:
    """Whether the ranks are to meet before the framework starts."""
    return _meets(os.environ)


def grace_setting(environ: Mapping[str, str], given: str | float | None = None) -> float:
    """Seconds between TERM and KILL: as given with --grace, or DISTBOOT_GRACE, or the default."""
    return _seconds(environ, "DISTBOOT_GRACE", "--grace", given)


def refuse_invalid(environ: Mapping[str, str], given: Sequence[str] = ()) -> None:
    """Refuse every setting that a job would refuse, in one error; `given`: variables that an option overrides."""
    environ = {
        **environ,
        **dict.fromkeys(given, ""),  # as if they were not set
    }
    problems: list[DistbootError] = []
    for reader in _READERS:
        problem = _problem(reader, environ)
        if problem is not None:
            problems.append(problem)
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0]
    lines = [f"{len(problems)} problems:"]
    for problem in problems:
        lines.append(f"  {problem.message}: {problem.hint}")
    raise DistbootError("broken-environment", "\n".join(lines), "unset them, or correct them")


def _problem(
    reader: Callable[[Mapping[str, str]], object], environ: Mapping[str, str]
) -> DistbootError | None:
    try:
        reader(environ)
    except DistbootError as error:
        return error
    return None


class RestartSettings(NamedTuple):
    """What a user can set about restarts."""

    most: int = 0  # of the job
    delay: float = 0.0  # seconds before each
    # Seconds within which a second failure at the same place is taken for a bug
    window: float = 600.0


def restart_settings(
    environ: Mapping[str, str],
    most: str | None = None,
    delay: str | None = None,
    window: str | None = None,
) -> RestartSettings:
    """Those of this process; an option that was given comes before what the environment says."""
    return RestartSettings(
        _most_restarts(environ, most),
        _restart_delay(environ, delay),
        _restart_window(environ, window),
    )


def _most_restarts(environ: Mapping[str, str], given: str | None = None) -> int:
    said, text, code = _given(environ, "DISTBOOT_MAX_RESTARTS", "--max-restarts", given)
    most = digits(str(text), 5)
    if most is None:
        raise DistbootError(code, f"{said} is not a number of restarts", "give 0 to 99999")
    return most


def _restart_delay(environ: Mapping[str, str], given: str | None = None) -> float:
    return _seconds(environ, "DISTBOOT_RESTART_DELAY", "--restart-delay", given, may_be_0=True)


def _restart_window(environ: Mapping[str, str], given: str | None = None) -> float:
    return _seconds(environ, "DISTBOOT_RESTART_WINDOW", "--restart-window", given, may_be_0=True)


def _given(
    environ: Mapping[str, str], name: str, option: str, value: object
) -> tuple[str, object, str]:
    """A setting as an error says it, its value, and the code of the error."""
    if value is not None:
        return f"{option}={short_repr(value)}", value, "usage"
    text = environ.get(name) or DEFAULTS[name]
    return f"{name}={short_repr(text)}", text, "broken-environment"


def is_nproc(text: str) -> bool:
    """Whether it says how many ranks the wrapper is to start here."""
    return text in ("auto", "gpu", "cpu") or bool(digits(text, 4))


def nproc_setting(environ: Mapping[str, str]) -> str | None:
    """How many ranks the wrapper is to start here; None: it is the wrapper of one."""
    given = environ.get("DISTBOOT_NPROC_PER_NODE")
    if given and not is_nproc(given):
        said = f"DISTBOOT_NPROC_PER_NODE={short_repr(given)} is neither a number of processes nor auto, gpu or cpu"
        raise DistbootError(
            "broken-environment", said, "unset it, or set it to the number of ranks of each node"
        )
    return given or None


def refuse_log(environ: Mapping[str, str]) -> None:
    """Refuse what says neither that our lines are text nor that they are JSON."""
    _switch(environ, "DISTBOOT_LOG", choices=("text", "json"))


def _seconds(
    environ: Mapping[str, str],
    name: str,
    option: str = "",
    given: object = None,
    *,
    may_be_0: bool = False,
) -> float:
    return seconds(*_given(environ, name, option, given), may_be_0=may_be_0)


def _switch(
    environ: Mapping[str, str], name: str, hint: str = "", choices: tuple[str, str] = ("0", "1")
) -> bool:
    text, (off, on) = environ.get(name) or DEFAULTS[name], choices
    if text not in choices:
        said = f"{name}={short_repr(text)} is neither {off} nor {on}"
        raise DistbootError("broken-environment", said, f"unset it, or set it to {off}{hint}")
    return text == on


# Each reads one variable of `DEFAULTS` and refuses an invalid value.
_READERS: tuple[Callable[[Mapping[str, str]], object], ...] = (
    grace_setting,
    _detects,
    _stop_signals,
    _stop_at,
    _late_after,
    _hang_after,
    _stops_hangs,
    _quit_shows,
    _stop_notice,
    _notice_address,
    heartbeat_timeout,
    _join_timeout,
    _meets,
    nproc_setting,
    _most_restarts,
    _restart_delay,
    _restart_window,
    refuse_log,
)
