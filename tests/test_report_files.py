"""The file of a report: whether it can be written, who may read it, and what links and pipes in its place lead to."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest
from lifelines import Start

from distboot.errors import DistbootError
from distboot.report.files import refuse_unwritable, write

PROTECTED = Path("/proc/sys/fs/protected_symlinks")


@pytest.mark.parametrize("path", ["/proc/no/report.json", "/", "/proc/report.json"])
@pytest.mark.parametrize("way", ["wrapper", "init"])
def test_report_that_cannot_be_written_is_an_error_before_anything_starts(
    request: pytest.FixtureRequest, way: str, path: str
) -> None:
    begin: Start = request.getfixturevalue("start" if way == "wrapper" else "start_init")
    running = begin("ready()", ranks=2, DISTBOOT_REPORT=path)
    assert running.codes() == ([74, 74] if way == "wrapper" else [1, 1])
    for rank in (0, 1):
        assert f"error[output-failed]: rank {rank} on " in running.output(rank)
        assert f"the report '{path}' cannot be written" in running.output(rank)
        assert not (running.folder / f"pid-{rank}").exists()


def test_earlier_report_stays_when_a_new_one_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text("earlier")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))  # as if the disk were full
    try:
        with pytest.raises(OSError, match="File too large"):
            write(str(path), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/2"])
def test_own_output_is_no_file_for_a_report(path: str) -> None:
    with pytest.raises(DistbootError, match="another file for each process"):
        refuse_unwritable(path)


def test_link_stays_a_link_and_a_pipe_needs_no_reader_yet(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("job.json")
    refuse_unwritable(str(tmp_path / "link.json"))
    write(str(tmp_path / "link.json"), {"outcome": "ended"})
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "job.json").read_text()) == {"outcome": "ended"}
    os.mkfifo(tmp_path / "pipe")
    refuse_unwritable(str(tmp_path / "pipe"))


def test_report_is_for_no_more_eyes_than_the_one_that_it_replaces(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    for mode in (0o600, 0o666):
        path.touch()
        path.chmod(mode)
        write(str(path), {})
        assert path.stat().st_mode & 0o777 == mode


def test_link_that_cannot_be_followed_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "job.json").symlink_to("job.json")
    with pytest.raises(DistbootError, match="Too many levels of symbolic links"):
        refuse_unwritable(str(tmp_path / "job.json"))
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        write(str(tmp_path / "job.json"), {})
    assert (tmp_path / "job.json").is_symlink()


@pytest.mark.skipif(
    os.geteuid() != 0 or not PROTECTED.exists() or PROTECTED.read_text().strip() == "0",
    reason="needs root, for another user's link, and fs.protected_symlinks",
)
def test_link_of_another_user_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("earlier")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "job.json").symlink_to(tmp_path / "precious")
    os.chown(shared / "job.json", 65534, 65534, follow_symlinks=False)
    with pytest.raises(DistbootError, match="Permission denied"):
        refuse_unwritable(str(shared / "job.json"))
    with pytest.raises(PermissionError):
        write(str(shared / "job.json"), {})
    assert (tmp_path / "precious").read_text() == "earlier"
