"""A plugin for pytest: `@pytest.mark.ranks(4)` runs a test in four ranks of this host, each a pytest of that one test.

The ranks are those of the wrapper (`python -m distboot --nproc-per-node 4`), or, with `ranks(4, as_="mpirun 2x2")`,
find what that launcher sets: when one fails all others end, and its report becomes that of the test. Fixtures are made
in every rank. It costs a run without the mark nothing but this file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ..base.errors import DistbootError
from ..host import free_port
from .trial import Launch, parse, run

_FOLDER = "DISTBOOT_PYTEST"  # where a rank writes its reports
_TIMEOUT = 300.0  # seconds for a test
_STACKS = 3.0  # seconds for the ranks to say where they are
_MARK = "ranks(count, timeout=300, as_=None): run the test in so many ranks, in so many seconds; as 'mpirun 2x2', say"


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
    """A folder that all ranks of a test have in common, where `tmp_path` is each rank's own."""
    return Path(os.environ[_FOLDER]) / "shared" if _FOLDER in os.environ else tmp_path


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test that has the mark in ranks of its own."""
    mark = item.get_closest_marker("ranks")
    if mark is None or _FOLDER in os.environ:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    try:
        wanted = _wanted(*mark.args, **mark.kwargs)
    except TypeError:
        raise pytest.UsageError(
            f"{item.nodeid}: @pytest.mark.ranks needs a number, as in {_MARK}"
        ) from None
    for report in _reports(item, *wanted):
        item.ihook.pytest_runtest_logreport(report=report)
    # What the tests before have set up for their module may end with this one.
    state = item.session._setupstate  # noqa: SLF001 - the hook for it wants the test itself to be set up
    call = pytest.CallInfo.from_call(lambda: state.teardown_exact(nextitem), "teardown")
    if call.excinfo is not None:
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


class _Rank:
    """A rank of a test: writes its reports, and ends with the first that is not good, so that all others end, too."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config, self._path = config, path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with self._path.open("a") as file:
            file.write(json.dumps({"at": time.time(), "report": data}) + "\n")
        if report.failed or (report.when == "call" and hasattr(report, "wasxfail")):
            os._exit(1)  # without the teardown, in which it might wait for the others


def _wanted(
    count: int, *, timeout: float = _TIMEOUT, as_: str | None = None
) -> tuple[int, float, Launch | None]:
    if type(count) is not int or count < 1:
        raise pytest.UsageError(
            f"@pytest.mark.ranks({count!r}): a number of ranks is needed, at least 1"
        )
    if as_ is None:
        return count, timeout, None
    try:
        launch = parse(as_)
    except DistbootError as error:
        raise pytest.UsageError(
            f"@pytest.mark.ranks({count}, as_={as_!r}): {error.message}; {error.hint}"
        ) from None
    if launch.nodes * launch.per_node != count:
        raise pytest.UsageError(
            f"@pytest.mark.ranks({count}, as_={as_!r}): the two do not agree on the number of ranks"
        )
    return count, timeout, launch


def _reports(
    item: pytest.Item, count: int, timeout: float, launch: Launch | None
) -> list[pytest.TestReport]:
    """The reports of the rank that failed first, or of rank 0."""
    begin = time.time()
    folder = item.config._tmp_path_factory.mktemp("ranks")  # type: ignore[attr-defined] # noqa: SLF001 - as xdist does
    (folder / "shared").mkdir()
    # A signal that asks where all are; and a rank that fails is not waited for.
    more = {
        _FOLDER: str(folder),
        "DISTBOOT_SIGQUIT": "stacks",
        "DISTBOOT_GRACE": "1",
        "PYTEST_ADDOPTS": "",
    }
    options, environs = [f"--nproc-per-node={count}"], [{**os.environ, **more}]
    if launch is not None:
        options, environs = [], launch.environs(free_port(), environs[0])
    said, why = _run(_command(item, *options), environs, timeout)
    found = [
        (at, rank, one)
        for rank in range(count)
        for at, one in _read(item, folder / f"rank-{rank}.json")
    ]
    bad = [(at, rank) for at, rank, one in found if one.failed or hasattr(one, "wasxfail")]
    _, shown = min(bad, default=(0.0, 0))
    reports = [one for _, rank, one in found if rank == shown]
    if bad:
        reports[-1].sections.append((f"rank {shown} of {count}", said))
    elif why:  # no rank has said why: one was killed, say
        failed = pytest.TestReport(
            item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", f"{why}\n{said}", "call",
            duration=time.time() - begin, start=begin, stop=time.time(),
        )  # fmt: skip
        return [*(one for one in reports if one.when == "setup"), failed]
    return reports


def _command(item: pytest.Item, *options: str) -> list[str]:
    """The wrapper, with a pytest of this test alone."""
    config, name = item.config, f"{item.path}::{item.nodeid.partition('::')[2]}"
    ini = [] if config.inipath is None else ["-c", str(config.inipath)]
    here = ["--rootdir", str(config.rootpath), *ini, "-o", "addopts=", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "distboot", "run", *options, "-m", "pytest", "-q", *here, name]


def _run(
    command: list[str], environs: Sequence[Mapping[str, str]], timeout: float
) -> tuple[str, str]:
    """What the wrappers have printed, and why the test has failed; empty: it has not."""
    with tempfile.TemporaryFile() as output:
        codes = run(
            command, environs, timeout, _ask_where, stdout=subprocess.DEVNULL, stderr=output
        )
        output.seek(0)
        said = output.read().decode(errors="replace")
    if None in codes:
        return said, f"the ranks have not ended within {timeout:g} s"
    return said, f"the ranks ended with exit code {max(filter(None, codes))}" if any(codes) else ""


def _ask_where(first: subprocess.Popen[bytes]) -> None:
    """Let rank 0 print where all ranks are."""
    first.send_signal(signal.SIGQUIT)
    with suppress(subprocess.TimeoutExpired):
        first.wait(_STACKS)


def _read(item: pytest.Item, path: Path) -> list[tuple[float, pytest.TestReport]]:
    """The reports of a rank, each with its time."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        one: dict[str, Any] = json.loads(line)
        report = item.config.hook.pytest_report_from_serializable(
            config=item.config, data=one["report"]
        )
        if isinstance(report.longrepr, list):  # that of a skip, as JSON has it
            report.longrepr = tuple(report.longrepr)
        found.append((one["at"], report))
    return found
