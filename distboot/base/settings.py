"""Every setting of distboot, in the table `SETTINGS`.

A variable `DISTBOOT_JOIN_TIMEOUT`, an option `--join-timeout` and an argument `join_timeout` have
the same word. What is given with an option or argument has precedence over the variable. A value
that is not valid is refused: `broken-environment`, or `usage` if it is of an option or argument.

The options of `run`, `--help`, docs/reference/environment.md, `refuse_invalid` and the warnings are
made from this table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from . import setting_readers as readers
from .errors import DistbootError
from .internal_variables import INTERNAL, RANK
from .setting_readers import Given, Reader, given_by_option, given_by_variable
from .text import escape_control, log_line


class Setting(NamedTuple):
    """What a user can set."""

    variable: str
    # For the command line and the reference; `code` in backticks
    help: str
    default: str = ""  # empty: the setting is not set by default
    without: str = "none"  # for people, where there is no default: what applies then
    read: Reader = readers.as_given
    unset: object = None  # the value where nothing is given
    unit: str = ""
    option: str = ""  # of the command line
    metavar: str = ""  # of the option's value
    argument: str = ""  # of `init`
    page: str = ""  # of the documentation, relative to the reference
    needs: str = ""  # `NAME` or `NAME=value`: the setting without which this one has no effect


SETTINGS = (
    Setting(
        "DISTBOOT_LAUNCHER",
        "use this launcher and ignore all others: a name that `python -m distboot launchers` "
        "prints, or `none` for a process that is alone",
        without="the innermost one found",
        option="--launcher",
        metavar="NAME",
        argument="launcher",
        page="launchers.md",
    ),
    Setting(
        "DISTBOOT_RENDEZVOUS",
        "`0`, on all ranks: they do not meet before the framework starts; `init()` then refuses "
        "what one process cannot prove, and `ctx.hosts` is empty",
        default="1",
        read=readers.switch,
    ),
    Setting(
        "DISTBOOT_JOIN_TIMEOUT",
        "how long to wait for all ranks to join, and then again for all to import their framework",
        default="300",  # torch's own default for its store
        unit="seconds",
        read=readers.seconds,
        option="--join-timeout",
        metavar="SECONDS",
        argument="join_timeout",
    ),
    Setting(
        "DISTBOOT_CHECK",
        "what to do once all ranks have joined: check each node and its link to the next one, for "
        "at most 3 seconds. `warn` names the nodes that differ from the others; `stop` also ends "
        "the job then; `off` skips the check. The value of rank 0 counts for all",
        default="warn",
        read=readers.one_of("off", "warn", "stop"),
        option="--check",
        metavar="off|warn|stop",
        page="../how-to/check-a-cluster.md",
    ),
    Setting(
        "DISTBOOT_SHARE_ENV",
        "variables that a rank takes from rank 0 where it has none, with commas, such as "
        "`HF_*,MODEL_DIR`; on all ranks. Never what may be a secret, or is of one process or host",
        read=readers.name_patterns,
        unset=(),
        option="--share-env",
        metavar="NAMES",
        page="../how-to/check-a-cluster.md#variables-that-reached-one-host-only",
    ),
    Setting(
        "DISTBOOT_BIND",
        "bind each rank to CPUs of its own, whole cores of those that the wrapper may use: "
        "`accelerator`: a part of those beside its accelerator; `numa`: a part of all, in the "
        "order of NUMA nodes; `auto`: `accelerator` where the CPUs near it are known, else `numa`. "
        "A rank that its launcher has bound stays so",
        default="none",
        read=readers.one_of("auto", "numa", "accelerator", "none"),
        option="--bind",
        metavar="auto|numa|accelerator|none",
        page="../how-to/cpus.md",
    ),
    Setting(
        "DISTBOOT_BAD_HOSTS_FILE",
        "a file on rank 0's host, to which hosts are added that failed the check, that were lost, "
        "or where a device failed first: one a line, as `srun --exclude=` reads it",
        read=readers.absolute_path,
        page="../how-to/bad-hosts.md",
    ),
    Setting(
        "DISTBOOT_SECRET",
        "a text of at least 6 characters that all ranks of the job know and no one else: only "
        "processes that know it can join",
        read=readers.secret,
        page="../explanation/security.md",
    ),
    Setting(
        "DISTBOOT_FAILURE_DETECTION",
        "`0` turns failure detection off: no rank is told when another one fails. If rank 0 turns "
        "it off, it is off for all",
        default="1",
        read=readers.failure_detection,
    ),
    Setting(
        "DISTBOOT_HEARTBEAT_TIMEOUT",
        "how long a host may not answer, or a rank may be stopped by a signal, before the rank "
        "counts as lost; a frozen agent is noticed after one to three of these. At least 2; that "
        "of rank 0 counts for the job",
        default="15",
        unit="seconds",
        read=readers.heartbeat_seconds,
    ),
    Setting(
        "DISTBOOT_GRACE",
        "how long the script may take to exit after TERM, before KILL",
        default="30",  # as Kubernetes, torchrun and Slurm (KillWait) wait
        unit="seconds",
        read=readers.seconds,
        option="--grace",
        metavar="SECONDS",
    ),
    Setting(
        "DISTBOOT_LATE_AFTER",
        "how long others wait for a rank at a collective operation before rank 0 names it; "
        "`0`: never",
        default="60",
        unit="seconds",
        read=readers.seconds_or_0,
        page="../how-to/late-ranks.md",
    ),
    Setting(
        "DISTBOOT_HANG",
        "`stop`: the job ends when no rank has moved for DISTBOOT_HANG_AFTER seconds",
        default="warn",
        read=readers.one_of("warn", "stop"),
    ),
    Setting(
        "DISTBOOT_HANG_AFTER",
        "see DISTBOOT_HANG",
        default="1800",  # torch's own timeout of a collective operation on Gloo
        unit="seconds",
        read=readers.seconds,
        needs="DISTBOOT_HANG=stop",
    ),
    Setting(
        "DISTBOOT_NPROC_PER_NODE",
        "start N processes on this node, each a rank; the node rank, the number of nodes and the "
        "address are detected. `gpu`: one per accelerator; `cpu`: one per CPU; `auto`: as many as "
        "the platform says, else `gpu`, or `cpu` if there are none. DISTBOOT_NPROC_PER_NODE does "
        "the same, for an image whose ENTRYPOINT is the wrapper",
        without="none: this process is one rank",
        read=readers.nproc_per_node,
        option="--nproc-per-node",
        metavar="N|auto|gpu|cpu",
        page="../how-to/one-process-a-node.md",
    ),
    Setting(
        "DISTBOOT_MAX_RESTARTS",
        "when a rank fails, end all ranks, let the agents meet, and start the command again, at "
        "most N times; the script continues from its checkpoint. The value on rank 0 applies to "
        "all ranks",
        default="0",
        read=readers.number_of_restarts,
        option="--max-restarts",
        metavar="N",
        page="../how-to/restarts.md",
    ),
    Setting(
        "DISTBOOT_RESTART_DELAY",
        "how long to wait before each restart",
        default="0",
        unit="seconds",
        read=readers.seconds_or_0,
        option="--restart-delay",
        metavar="SECONDS",
        needs="DISTBOOT_MAX_RESTARTS",
    ),
    Setting(
        "DISTBOOT_RESTART_WINDOW",
        "a second failure at the same place in the code within this time counts as a bug, and ends "
        "the job; `0`: never",
        default="600",
        unit="seconds",
        read=readers.seconds_or_0,
        option="--restart-window",
        metavar="SECONDS",
        needs="DISTBOOT_MAX_RESTARTS",
    ),
    Setting(
        "DISTBOOT_SIGQUIT",
        "`stacks`: SIGQUIT makes the wrapper print where all ranks are, and does not reach the "
        "script",
        default="forward",
        read=readers.one_of("forward", "stacks"),
        page="../how-to/late-ranks.md#where-all-ranks-are-now",
    ),
    Setting(
        "DISTBOOT_SHIELD_WORKERS",
        "`1`: workers of every script outlive SIGTERM; `0`: those of none",
        without="those of a script that reads `ctx.preempted`",
        read=readers.switch,
        page="../how-to/stopping.md#data-loader-workers",
    ),
    Setting(
        "DISTBOOT_STOP_SIGNALS",
        "signals besides SIGTERM that ask a script to stop, for `ctx.preempted`; workers outlive "
        "them: some of `USR1`, `USR2`, `INT`, `HUP`, `XCPU`, with commas",
        read=readers.stop_signals,
        unset=(),
        page="../how-to/stopping.md",
    ),
    Setting(
        "DISTBOOT_STOP_BEFORE_END",
        "how long before its end the job is asked to stop",
        unit="seconds",
        read=readers.seconds,
        page="../how-to/stopping.md",
    ),
    Setting(
        "DISTBOOT_JOB_END_TIME",
        "when the job ends, in seconds since 1970, where SLURM_JOB_END_TIME (of Slurm 23.02 and "
        "newer) is missing",
        without="SLURM_JOB_END_TIME",
        read=readers.seconds_since_1970,
        needs="DISTBOOT_STOP_BEFORE_END",
    ),
    Setting(
        "DISTBOOT_STOP_NOTICE",
        "`azure` or `aws`: the job is asked to stop when the metadata service of a machine "
        "announces that the machine will be taken away",
        read=readers.notice_provider,
        unset="",
        page="../how-to/stopping.md#notices-of-azure-and-aws",
    ),
    Setting(
        "DISTBOOT_NOTICE_ADDRESS",
        "host and port of that service, to try it with a stand-in",
        default="169.254.169.254:80",  # of Azure and AWS
        read=readers.host_and_port,
        needs="DISTBOOT_STOP_NOTICE",
    ),
    Setting(
        "DISTBOOT_LOG_FORMAT",
        "`json`: each line of distboot's own is a JSON object",
        default="text",
        read=readers.one_of("text", "json"),
        option="--log-format",
        metavar="text|json",
        page="#lines-as-json",
    ),
    Setting(
        "DISTBOOT_REPORT",
        "write a report of the job to this file, on rank 0's host: where each rank ran, how it "
        "started and ended, which one failed first; an HTML page if the name ends in .html, else "
        "JSON; each event is in the journal, the file beside it with the ending .jsonl, when it "
        "happens",
        read=readers.absolute_path,
        option="--report",
        metavar="FILE",
        page="../how-to/report.md",
    ),
    Setting(
        "DISTBOOT_METRICS",
        "keep the state of the job in this file, on rank 0's host, as metrics for Prometheus: "
        "missing and late ranks, restarts, where the time went",
        read=readers.absolute_path,
        page="../how-to/metrics.md",
    ),
    Setting(
        "DISTBOOT_KUBEFLOW_STATUS",
        "`0`: do not tell Kubeflow Trainer the state of its TrainJob, where it has set "
        "`KUBEFLOW_TRAINER_SERVER_URL`",
        default="1",
        read=readers.switch,
        page="../how-to/metrics.md",
    ),
)

_BY_VARIABLE = {setting.variable: setting for setting in SETTINGS}
KNOWN = (*_BY_VARIABLE, *INTERNAL, *RANK)

# What users set by hand; other names are too common
_OF_PYTORCH = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
_SIMILAR_BEGINNINGS = ("DISTBOOT", "MASTER", "WORLD")
_OF_KUBEFLOW = (
    "KUBEFLOW_TRAINER_SERVER_URL",
    "KUBEFLOW_TRAINER_SERVER_CA_CERT",
    "KUBEFLOW_TRAINER_SERVER_TOKEN",
)
_TO_JOIN = ("DISTBOOT_SECRET", "DISTBOOT_RENDEZVOUS")
# Settings of 0 without which no rank is watched
_SWITCHES = ("DISTBOOT_RENDEZVOUS", "DISTBOOT_FAILURE_DETECTION")


def value_of(variable: str, environ: Mapping[str, str], given: object = None) -> Any:
    """The value of a setting: as `given` by its option, else of the variable, else the default."""
    setting = _BY_VARIABLE[variable]
    if given is not None:
        return setting.read(given_by_option(setting.option, given))
    text = environ.get(variable) or setting.default
    if not text:
        return setting.unset
    return setting.read(given_by_variable(variable, text))


def option_help(variable: str) -> str:
    """The option of a setting as `cli.parser.Parser` takes it: `"--grace SECONDS  how long …"`."""
    setting = _BY_VARIABLE[variable]
    default = setting.default or setting.without
    text = setting.help.replace("`", "")
    return f"{setting.option} {setting.metavar}  {text} (default: {variable}, or {default})"


class SupervisionSettings(NamedTuple):
    """How an agent supervises the ranks of a job."""

    grace: float  # seconds between TERM and KILL for a process that has to stop
    report: str | None = None  # file for the report of the job, absolute
    # How the job ended, if the wrapper detects a launcher that each rank starts for a job of its own
    apart: str = ""
    # What the allocation has and the job leaves unused, for the summary; see `detection.allocation`
    unused: str = ""
    detects: bool = True  # whether all other ranks are told that a rank has failed
    stop_signals: tuple[int, ...] = ()  # that ask the script to stop, besides SIGTERM
    # When the job is asked to stop because its end is near; in seconds since 1970
    stop_at: float | None = None
    stop_reason: str = ""  # why it is asked then
    late_after: float = 0.0  # seconds that others wait for a rank until it is named; 0: never
    # Seconds without any movement after which the job ends; None: never
    hang_after: float | None = None
    quit_shows: bool = False  # whether SIGQUIT makes the wrapper print where all ranks are
    # The provider whose stop notices count, "azure" or "aws"; empty: none
    stop_notice: str = ""
    notice_address: str = ""  # host and port of its metadata service
    bad_hosts: str | None = None  # file of bad hosts, absolute
    check: str = "off"  # of all nodes before the start: off, warn or stop
    metrics: str | None = None  # file for the metrics of the job, absolute
    # URL, certificate and token of the server for the status of a TrainJob; empty: none
    kubeflow: tuple[str, ...] = ()

    @property
    def checks(self) -> bool:
        """Whether all nodes are looked at before the start."""
        return self.check != "off"

    @property
    def keeps_events(self) -> bool:
        """Whether rank 0's agent writes what happens: the journal, metrics, a platform's status."""
        return any((self.report, self.metrics, self.kubeflow))

    @property
    def stalls_after(self) -> float:
        """Seconds without movement after which a rank is examined; 0: never."""
        return min(filter(None, (self.late_after, self.hang_after)), default=0.0)


def supervision_settings(
    environ: Mapping[str, str],
    grace: float | None = None,
    report: str | None = None,
    check: str | None = None,
) -> SupervisionSettings:
    """Those of this process; `grace`, `report` and `check` are what the options give."""
    hang_after: float | None = value_of("DISTBOOT_HANG_AFTER", environ)
    if value_of("DISTBOOT_HANG", environ) != "stop":
        hang_after = None
    stop_at, stop_reason = _stop_before_end(environ)
    return SupervisionSettings(
        value_of("DISTBOOT_GRACE", environ, grace),
        value_of("DISTBOOT_REPORT", environ, report),
        detects=value_of("DISTBOOT_FAILURE_DETECTION", environ),
        stop_signals=value_of("DISTBOOT_STOP_SIGNALS", environ),
        stop_at=stop_at,
        stop_reason=stop_reason,
        late_after=value_of("DISTBOOT_LATE_AFTER", environ),
        hang_after=hang_after,
        quit_shows=value_of("DISTBOOT_SIGQUIT", environ) == "stacks",
        stop_notice=value_of("DISTBOOT_STOP_NOTICE", environ),
        notice_address=value_of("DISTBOOT_NOTICE_ADDRESS", environ),
        bad_hosts=value_of("DISTBOOT_BAD_HOSTS_FILE", environ),
        check=value_of("DISTBOOT_CHECK", environ, check),
        metrics=value_of("DISTBOOT_METRICS", environ),
        kubeflow=_kubeflow(environ),
    )


def _kubeflow(environ: Mapping[str, str]) -> tuple[str, ...]:
    """URL, file of the certificate and file of the token; see `agent/kubeflow_status`."""
    found = tuple(environ.get(name, "") for name in _OF_KUBEFLOW)
    is_wanted = value_of("DISTBOOT_KUBEFLOW_STATUS", environ)
    if not all((is_wanted, *found)):
        return ()
    return found


def _stop_before_end(environ: Mapping[str, str]) -> tuple[float | None, str]:
    """When the job is asked to stop because its end is near, and why; None if it is not."""
    before: float | None = value_of("DISTBOOT_STOP_BEFORE_END", environ)
    if before is None:
        return None, ""
    given = _job_end(environ)
    end = readers.seconds_since_1970(given)
    reason = "the job ends soon"
    ago = time.time() - end
    if ago > 0:
        from .units import duration  # here, as few jobs start after their end

        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(end))
        reason = f"{given.text}, {when}, was {duration(ago)} before the start"
    return end - before, reason


def _job_end(environ: Mapping[str, str]) -> Given:
    # Slurm, from 23.02 on (its NEWS): SLURM_JOB_END_TIME=1763888400
    for name in ("DISTBOOT_JOB_END_TIME", "SLURM_JOB_END_TIME"):
        text = environ.get(name)
        if text:
            return given_by_variable(name, text)
    raise DistbootError(
        "broken-environment",
        "DISTBOOT_STOP_BEFORE_END is set, but the end of the job is unknown: "
        "DISTBOOT_JOB_END_TIME and SLURM_JOB_END_TIME are missing",
        "DISTBOOT_JOB_END_TIME=$(( $(date +%s) + 86400 )) for a day from now, or unset it",
    )


class RestartSettings(NamedTuple):
    """When the ranks are started again after a failure."""

    most: int = 0  # of the job
    delay: float = 0.0  # seconds before each
    # Seconds within which a second failure at the same place counts as a bug
    window: float = 600.0


def restart_settings(
    environ: Mapping[str, str],
    most: str | None = None,
    delay: str | None = None,
    window: str | None = None,
) -> RestartSettings:
    """Those of this process; `most`, `delay` and `window` are what the options give."""
    return RestartSettings(
        value_of("DISTBOOT_MAX_RESTARTS", environ, most),
        value_of("DISTBOOT_RESTART_DELAY", environ, delay),
        value_of("DISTBOOT_RESTART_WINDOW", environ, window),
    )


def heartbeat_timeout(environ: Mapping[str, str]) -> float:
    """Seconds for which a rank may be silent."""
    found: float = value_of("DISTBOOT_HEARTBEAT_TIMEOUT", environ)
    return found


def join_timeout_setting(environ: Mapping[str, str], given: object = None) -> float:
    """The join timeout in seconds; `given`: by the argument of `init`."""
    if given is not None:
        return readers.seconds_of_argument(given_by_option("join_timeout", given))
    found: float = value_of("DISTBOOT_JOIN_TIMEOUT", environ)
    return found


def share_env_setting(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The names of variables that ranks take from rank 0; `*` stands for any characters."""
    found: tuple[str, ...] = value_of("DISTBOOT_SHARE_ENV", environ)
    return found


def rendezvous_setting(environ: Mapping[str, str]) -> bool:
    """Whether the ranks meet before the framework starts."""
    found: bool = value_of("DISTBOOT_RENDEZVOUS", environ)
    return found


def refuse_invalid(environ: Mapping[str, str], overridden: Sequence[str] = ()) -> None:
    """Refuse every invalid setting of the environment, in one error.

    `overridden`: variables that an option or argument makes irrelevant.
    """
    checks: list[Callable[[], object]] = []
    for variable in _BY_VARIABLE:
        if variable not in overridden:
            checks.append(partial(value_of, variable, environ))
    checks.append(partial(_stop_before_end, environ))
    checks.append(partial(_refuse_hang_unwatched, environ))
    # By message: the last check may find what another one has found
    problems: dict[str, DistbootError] = {}
    for check in checks:
        problem = _problem(check)
        if problem is not None:
            problems[problem.message] = problem
    if problems:
        raise _all_in_one(list(problems.values()))


def without_invalid(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without invalid settings, with which this rank can join all the same.

    Raises:
        DistbootError: one of those is invalid that decide whether, and with which others, it joins.
    """
    for variable in _TO_JOIN:
        value_of(variable, environ)
    found = dict(environ)
    for variable in _BY_VARIABLE:
        if _problem(partial(value_of, variable, environ)) is not None:
            del found[variable]
    return found


def _refuse_hang_unwatched(environ: Mapping[str, str]) -> None:
    """Refuse to end a job that hangs where nothing watches it."""
    if value_of("DISTBOOT_HANG", environ) != "stop":
        return
    switch = unwatched_by(environ)
    if switch:
        raise DistbootError(
            "broken-environment",
            f"DISTBOOT_HANG=stop needs failure detection, which {switch}=0 turns off",
            "unset one of them",
        )


def unwatched_by(environ: Mapping[str, str]) -> str:
    """The setting of 0 that leaves the ranks unwatched; empty: there is none."""
    found = filter(lambda name: environ.get(name) == "0", _SWITCHES)
    return next(found, "")


def _problem(check: Callable[[], object]) -> DistbootError | None:
    try:
        check()
    except DistbootError as error:
        return error
    return None


def _all_in_one(problems: Sequence[DistbootError]) -> DistbootError:
    if len(problems) == 1:
        return problems[0]
    lines = [f"{len(problems)} problems:"]
    for problem in problems:
        lines.append(f"  {problem.message}: {problem.hint}")
    hint = "unset them, or correct them"
    return DistbootError("broken-environment", "\n".join(lines), hint)


def warn_of_unknown(environ: Mapping[str, str], rank: int, who: str | None) -> None:
    """Rank 0 warns of each variable that looks like a misspelled setting."""
    if not _warns(environ, rank):
        return
    for name, meant in misspelled(environ).items():
        shown = escape_control(name)
        log_line(who, f"warning: unknown variable {shown} is ignored; did you mean {meant}?")


def misspelled(environ: Mapping[str, str]) -> dict[str, str]:
    """Each variable that looks misspelled, and the setting, option or variable of PyTorch it means."""
    known = {*KNOWN, *_OF_PYTORCH}
    unknown = [
        name for name in environ if name.startswith(_SIMILAR_BEGINNINGS) and name not in known
    ]
    if not unknown:
        return {}
    from .misspelled import meant_by  # here, as few processes need it

    # A variable of PyTorch can only be meant where it is missing
    candidates = known.difference(set(_OF_PYTORCH).intersection(environ))
    found = {}
    for name in unknown:
        meant = meant_by(name, candidates)
        if meant:
            found[name] = meant
    return found


def warn_of_ineffective(
    environ: Mapping[str, str],
    rank: int,
    who: str | None,
    options: Mapping[str, object] = {},
) -> None:
    """Rank 0 warns of each setting without the other one that it needs; all of them are valid.

    `options`: by variable, what an option gives in its place.
    """
    if _warns(environ, rank):
        for text in _ineffective(environ, options):
            log_line(who, f"warning: {text}")


def _warns(environ: Mapping[str, str], rank: int) -> bool:
    is_inside_wrapper = "DISTBOOT_PLACEMENT" in environ  # which has warned
    return rank == 0 and not is_inside_wrapper


def _ineffective(environ: Mapping[str, str], options: Mapping[str, object]) -> list[str]:
    found = []
    for setting in SETTINGS:
        if not setting.needs or _is_default(setting, environ, options):
            continue
        name, _, _ = setting.needs.partition("=")
        needed = _BY_VARIABLE[name]
        if not _is_default(needed, environ, options):
            continue
        text = f"{setting.variable} has no effect without {setting.needs}"
        if setting.variable in options:
            text = f"{setting.option} has no effect without {needed.option}"
        found.append(text)
    return found


def _is_default(
    setting: Setting,
    environ: Mapping[str, str],
    options: Mapping[str, object],
) -> bool:
    """Whether its value is what applies where nothing is set."""
    found = value_of(setting.variable, environ, options.get(setting.variable))
    return bool(found == value_of(setting.variable, {}))
