"""A plugin for pytest: `@pytest.mark.ranks(4)` runs a test in four ranks of this host.

Each rank is a pytest of that one test. The ranks are those of the wrapper (`python -m distboot
--nproc-per-node 4`), or, with `ranks(4, as_="mpirun 2x2")`, get the variables that this launcher
sets. When a rank fails, all others end, and its report becomes that of the test. Every rank makes
the fixtures. A run without the mark loads this file, and nothing else of distboot.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ..base.errors import DistbootError, in_one_line
from ..base.setting_readers import given_by_option, seconds
from ..base.text import did_you_mean
from ..host import free_port
from ..report.start_failure import stopped_by
from .trial import Launch, parse, run

_FOLDER = "DISTBOOT_PYTEST"  # where a rank writes its reports
_TIMEOUT = 300.0  # seconds for a test
_STACKS = 3.0  # seconds for the ranks to say where they are
_MARK = (
    "ranks(count, *, timeout=300, as_=None): run the test in so many ranks, in so many seconds; "
    "as_: a launch such as 'mpirun 2x2'"
)

_ARGUMENTS = ("count", "timeout", "as_")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known; below the wrapper be a rank."""
    config.addinivalue_line("markers", _MARK)
    if _FOLDER in os.environ:
        own = Path(os.environ[_FOLDER]) / f"rank-{os.environ.get('RANK', '0')}"
        config.option.basetemp = str(own)
        config.pluginmanager.register(_Rank(config, own.with_suffix(".json")))


@pytest.fixture
def shared_tmp_path(tmp_path: Path) -> Path:
    """A folder that all ranks of a test share, where `tmp_path` is each rank's own."""
    if _FOLDER in os.environ:
        return Path(os.environ[_FOLDER]) / "shared"
    return tmp_path


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Refuse a wrong mark before any test runs."""
    for item in items:
        mark = item.get_closest_marker("ranks")
        if mark is not None:
            _wanted_by(item, mark)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test that has the mark in ranks of its own."""
    mark = item.get_closest_marker("ranks")
    if mark is None or _FOLDER in os.environ:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item, _wanted_by(item, mark)):
        item.ihook.pytest_runtest_logreport(report=report)
    # Earlier tests may have set up fixtures for their module, which end with this test.
    state = item.session._setupstate  # noqa: SLF001 - its hook needs a test that was set up
    call = pytest.CallInfo.from_call(lambda: state.teardown_exact(nextitem), "teardown")
    if call.excinfo is not None:
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


class _Rank:
    """A rank of a test: writes its reports, and exits at the first failure: so all ranks end."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a report as a line of JSON."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with self._path.open("a") as file:
            file.write(json.dumps({"at": time.time(), "report": data}) + "\n")
        if _has_failed(report):
            os._exit(1)  # without the teardown, in which it might wait for the others


_Written = tuple[float, pytest.TestReport]  # with its time, in seconds since the epoch


class _Wanted(NamedTuple):
    """The arguments of the mark."""

    ranks: int
    timeout: float  # seconds
    launch: Launch | None


def _wanted_by(item: pytest.Item, mark: pytest.Mark) -> _Wanted:
    """What the mark of a test says."""
    try:
        return _wanted(*mark.args, **mark.kwargs)
    except TypeError:
        problem = f"@pytest.mark.ranks {_misuse(mark)}as in {_MARK}"
    except pytest.UsageError as error:
        problem = str(error)
    raise pytest.UsageError(f"{item.nodeid}: {problem}")


def _misuse(mark: pytest.Mark) -> str:
    """What is wrong with the arguments of a mark, as the beginning of a sentence."""
    unknown = sorted(mark.kwargs.keys() - _ARGUMENTS)
    if unknown:
        meant = did_you_mean(unknown[0], _ARGUMENTS)
        return f"has no argument {unknown[0]!r}: {meant}"
    if mark.args:
        return "takes one number; timeout= and as_= by name, "
    return "needs a number, "


def _wanted(count: int, *, timeout: object = _TIMEOUT, as_: object = None) -> _Wanted:
    if type(count) is not int or count < 1:
        problem = "a number of ranks is needed, at least 1"
        raise pytest.UsageError(f"@pytest.mark.ranks({count!r}): {problem}")
    limit = _timeout(count, timeout)
    if as_ is None:
        return _Wanted(count, limit, None)
    mark = f"@pytest.mark.ranks({count}, as_={as_!r})"
    if not isinstance(as_, str):
        raise pytest.UsageError(f"{mark}: as_ is not a str, as in {_MARK}")
    try:
        launch = parse(as_)
    except DistbootError as error:
        problem = in_one_line(error).replace("--as ", "as_=")
        raise pytest.UsageError(f"{mark}: {problem}") from None
    if launch.ranks != count:
        raise pytest.UsageError(f"{mark}: the two do not agree on the number of ranks")
    return _Wanted(count, limit, launch)


def _timeout(count: int, timeout: object) -> float:
    """The seconds for a test."""
    try:
        return seconds(given_by_option("timeout", timeout))
    except DistbootError as error:
        mark = f"@pytest.mark.ranks({count}, timeout={timeout!r})"
        raise pytest.UsageError(f"{mark}: {in_one_line(error)}") from None


def _reports(item: pytest.Item, wanted: _Wanted) -> list[pytest.TestReport]:
    """The reports of the rank that failed first, or of rank 0."""
    begin = time.time()
    config: Any = item.config
    factory = config._tmp_path_factory  # noqa: SLF001 - as xdist does
    folder: Path = factory.mktemp("ranks")
    (folder / "shared").mkdir()
    output, why = _run(item, wanted, folder)
    # By rank
    written = [_read(item, folder / f"rank-{rank}.json") for rank in range(wanted.ranks)]
    first = _first_failed(written)
    if first is not None:
        found = [report for _, report in written[first]]
        found[-1].sections.append((f"rank {first} of {wanted.ranks}", output))
        return found
    found = [report for _, report in written[0]]
    reasons = (why, _without_end(written), _skipped_alone(item, written))
    why = next(filter(None, reasons), "")
    if not why:
        return found
    # No rank has reported why: a signal has killed one, for example
    failed = pytest.TestReport(
        item.nodeid,
        item.location,
        dict.fromkeys(item.keywords, 1),
        "failed",
        f"{why}\n{output}",
        "call",
        duration=time.time() - begin,
        start=begin,
        stop=time.time(),
    )
    setup = [report for report in found if (report.when, report.passed) == ("setup", True)]
    return [*setup, failed]


def _first_failed(written: Sequence[Sequence[_Written]]) -> int | None:
    """The rank whose first failure is the earliest; None if no rank has failed."""
    failures = []
    for rank, reports in enumerate(written):
        for at, report in reports:
            if _has_failed(report):
                failures.append((at, rank))
            elif report.failed:  # passed on this rank against `xfail`: what fails elsewhere counts
                failures.append((inf, rank))
    _, first = min(failures, default=(0.0, None))
    return first


def _has_failed(report: pytest.TestReport) -> bool:
    """Whether the test failed on a rank, also if `xfail` expects that."""
    is_expected = report.skipped and hasattr(report, "wasxfail")
    is_strict = str(report.longrepr).startswith("[XPASS(strict)]")  # it has passed
    return is_expected or (report.failed and not is_strict)


def _without_end(written: Sequence[Sequence[_Written]]) -> str:
    """Which rank has not reported the end of the test: code may call `os._exit(0)`; or empty."""
    for rank, reports in enumerate(written):
        phases = {report.when for _, report in reports}
        if "teardown" not in phases:
            return f"rank {rank} ended with exit code 0 before the test did"
    return ""


def _skipped_alone(item: pytest.Item, written: Sequence[Sequence[_Written]]) -> str:
    """Why all ranks skip what this pytest would run: `--runslow`, for example, is not theirs."""
    marks = {
        report.skipped and "skip" in report.keywords for (_, report), *_ in filter(None, written)
    }
    if marks == {True} and item.get_closest_marker("skip") is None:
        return "its ranks skip it: options of this pytest do not reach them"
    return ""


def _run(item: pytest.Item, wanted: _Wanted, folder: Path) -> tuple[str, str]:
    """What the wrappers have printed, and why the test has failed; empty if it has not."""
    environ = {
        **os.environ,
        _FOLDER: str(folder),
        "DISTBOOT_SIGQUIT": "stacks",  # for `_ask_where`
        "DISTBOOT_GRACE": "1",  # nothing waits for a rank that fails
        "PYTEST_ADDOPTS": "",
    }
    if wanted.launch is None:
        command = _command(item, f"--nproc-per-node={wanted.ranks}")
        environs = [environ]
    else:
        command = _command(item)
        environs = wanted.launch.environs(free_port(), environ)
        for each in environs:
            each[_FOLDER] = str(folder)  # a launch removes it, as it may be that of an outer test
    with tempfile.TemporaryFile() as file:
        try:
            codes = run(
                command,
                environs,
                wanted.timeout,
                _ask_where,
                stdout=subprocess.DEVNULL,
                stderr=file,
            )
        except SystemExit as stop:
            code: Any = stop.code  # of a signal
            pytest.exit(f"stopped by {stopped_by(stop)} in {item.nodeid}", code)
        file.seek(0)
        output = file.read().decode(errors="replace")
    if None in codes:
        # The output shows that signal as one from outside
        late = f"the ranks have not ended within {wanted.timeout:g} s"
        return output, f"{late}: pytest stopped them with SIGTERM"
    code = max(filter(None, codes), default=0)
    if code:
        return output, f"the ranks ended with exit code {code}"
    return output, ""


def _command(item: pytest.Item, *options: str) -> list[str]:
    """The wrapper, with a pytest of this test alone."""
    config = item.config
    wrapper = [sys.executable, "-m", "distboot", "run", *options]
    words = ["-m", "pytest", "-q", "--rootdir", str(config.rootpath)]
    if config.inipath is not None:
        words += ["-c", str(config.inipath)]
    words += ["-o", "addopts=", "-p", "no:cacheprovider"]
    name = item.nodeid.partition("::")[2]
    return [*wrapper, *words, f"{item.path}::{name}"]


def _ask_where(first: subprocess.Popen[bytes]) -> None:
    """Let rank 0 print where all ranks are."""
    first.send_signal(signal.SIGQUIT)
    with suppress(subprocess.TimeoutExpired):
        first.wait(_STACKS)


def _read(item: pytest.Item, path: Path) -> list[_Written]:
    """The reports of a rank."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            one: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:  # it was killed while it wrote this line
            break
        report = item.config.hook.pytest_report_from_serializable(
            config=item.config, data=one["report"]
        )
        if isinstance(report.longrepr, list):  # that of a skip, as JSON has it
            report.longrepr = tuple(report.longrepr)
        found.append((one["at"], report))
    return found
