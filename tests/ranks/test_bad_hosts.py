"""The file of bad hosts: which hosts get into it, what a bad path does, and what Slurm makes of it."""

import os
import re
import sys
from pathlib import Path

import pytest
from conftest import Run
from hosts import Slurm
from launched import needs_slurm

HOST = os.uname().nodename
FAILS = """
import os, time
if os.environ["RANK"] == "1":
    raise RuntimeError({text!r})
time.sleep(60)
"""
OF_DEVICE = "CUDA error: uncorrectable ECC error encountered"
OF_SCRIPT = "CUDA error: device-side assert triggered"
COMMAND = (sys.executable, "-m", "distboot", "--nproc-per-node", "2", "train.py")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "bad-hosts"


def test_host_of_a_device_that_fails_is_added(run: Run, distboot: Run, file: Path) -> None:
    env = {"DISTBOOT_BAD_HOSTS_FILE": str(file), "DISTBOOT_SECRET": "s3cret"}
    for _ in range(2):
        assert (
            run(*COMMAND, train=FAILS.format(text=f"{OF_DEVICE} s3cret"), env=env).returncode == 1
        )
    lines = file.read_text().splitlines()
    assert len(lines) == 2
    for line in lines:
        assert re.match(rf"{HOST}  # \d+-\d\d-\d\dT\d\d:\d\d:\d\dZ rank 1 failed first: ", line)
        assert "s3cret" not in line
    assert distboot("badhosts", str(file)).stdout == f"{HOST}\n"
    assert distboot("badhosts", env=env).stdout == f"{HOST}\n"


def test_line_without_an_end_stays_whole(run: Run, distboot: Run, file: Path) -> None:
    file.write_text("node-3")  # as an editor may leave it
    env = {"DISTBOOT_BAD_HOSTS_FILE": str(file)}
    assert run(*COMMAND, train=FAILS.format(text=OF_DEVICE), env=env).returncode == 1
    assert distboot("badhosts", str(file)).stdout == f"node-3,{HOST}\n"


def test_host_of_a_failing_script_is_not_added(run: Run, file: Path) -> None:
    env = {"DISTBOOT_BAD_HOSTS_FILE": str(file)}
    assert run(*COMMAND, train=FAILS.format(text=OF_SCRIPT), env=env).returncode == 1
    assert not file.exists()


@pytest.mark.parametrize("kind", ["link", "folder", "device", "nowhere"])
def test_file_that_cannot_be_written_is_told(run: Run, tmp_path: Path, kind: str) -> None:
    other = tmp_path / "other"
    other.write_text("of somebody else\n")
    path = tmp_path / "bad-hosts"
    if kind == "link":
        path.symlink_to(other)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/full")
    else:
        path = tmp_path / "nowhere" / "bad-hosts"
    env = {"DISTBOOT_BAD_HOSTS_FILE": str(path)}
    done = run(*COMMAND, train=FAILS.format(text=OF_DEVICE), env=env)
    assert done.returncode == 1
    assert "warning: the file of bad hosts was not written: " in done.stderr
    assert "Traceback" not in done.stderr.partition("rank 1 failed first")[2]
    assert other.read_text() == "of somebody else\n"


def test_badhosts_without_a_file_is_refused(distboot: Run, tmp_path: Path) -> None:
    done = distboot("badhosts")
    assert done.returncode == 2
    assert "no file: name one, or set DISTBOOT_BAD_HOSTS_FILE" in done.stderr
    none = distboot("badhosts", str(tmp_path / "none yet"))
    assert none.stdout == "\n"
    assert "none yet' does not exist: no host is bad yet, or the name is wrong\n" in none.stderr
    endless = distboot("badhosts", "/dev/zero")
    assert endless.returncode == 2
    assert "'/dev/zero' has 16 MiB or more" in endless.stderr
    done = distboot("badhosts", str(tmp_path))
    assert done.returncode == 2
    assert "cannot be read: Is a directory" in done.stderr


@pytest.mark.parametrize(
    ("lines", "hosts", "warning"),
    [
        (["node-1", "", "# none", "node-2  # why"], "node-1,node-2", ""),
        (
            ["node-1", "vm 99", "node-2"],
            "node-1,node-2",
            "line 2 of 'bad-hosts' is not the name of one host: 'vm 99'; it is left out",
        ),
        (
            ["a,b", "node-1", "node-[1-2]"],
            "node-1",
            (
                "line 1 of 'bad-hosts' is not the name of one host: 'a,b', and 1 other line; "
                "they are left out"
            ),
        ),
    ],
)
def test_badhosts_warns_of_a_line_without_host(
    distboot: Run, file: Path, lines: list[str], hosts: str, warning: str
) -> None:
    file.write_text("\n".join(lines))
    done = distboot("badhosts", file.name)
    assert (done.returncode, done.stdout) == (0, f"{hosts}\n")
    said = f"distboot: warning: {warning}\n" if warning else ""
    assert done.stderr == said


@needs_slurm
def test_srun_leaves_these_hosts_out(slurm: Slurm) -> None:
    file = slurm.hosts.shared / "bad-hosts"
    file.write_text("nodea  # 2026-11-26T20:14:02Z 1.1 Gbit/s to nodeb, median 94 Gbit/s\n")
    for excluded in (f"--exclude={file}", "--exclude=nodea"):
        done = slurm.srun(["-N1", excluded, "hostname"])
        assert done.stdout == "nodeb\n", done.stderr
