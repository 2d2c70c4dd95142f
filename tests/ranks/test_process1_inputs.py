"""The wrapper as process 1 of a container that lacks something, or is told to run what cannot be run."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import Run
from process1 import (
    EXEC_PROCESS_1,
    NAMESPACE,
    PROCESS_1,
    Mode,
    Wrapped,
    in_modes,
    needs_namespace,
    wrapped,
)


def _prepared(script: str) -> tuple[str, ...]:
    return ("sh", "-ec", f'{script}\nexec "$@"', "sh")


# What makes a container of the namespace; each ends in a check that it has.
_READ_ONLY = """
while read -r _ where _; do
    case $where in /proc*) ;; *) mount -o remount,bind,ro "$where" ;; esac
done < /proc/self/mounts
! touch /read-only /dev/shm/read-only 2> /dev/null
"""
_NO_PROC = """
mount -t tmpfs none /proc
! test -e /proc/self
"""
_NO_SHM = """
mount -t tmpfs none "$DEV"
for device in null zero random urandom; do
    touch "$DEV/$device"
    mount --bind "/dev/$device" "$DEV/$device"
done
mount --move "$DEV" /dev
! test -e /dev/shm
"""
_NOBODY = """
test "$(id -u)" = 12345
! id -un 2> /dev/null
"""
_CONTAINERS = {
    "read-only": _prepared(_READ_ONLY),
    "no /proc": _prepared(_NO_PROC),
    "no /dev/shm": _prepared(_NO_SHM),
    "nobody's user id": ("unshare", "--user", "--map-user=12345", *_prepared(_NOBODY)),
}
containers = pytest.mark.parametrize("container", _CONTAINERS)
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can mount what these containers lack"
)

_JOINS = """
import os, sys, distboot
with distboot.init("none") as ctx:
    ctx.barrier()
sys.stdout.write(f"{ctx.rank} of {ctx.world_size}\\n")
"""
_FAILS = (
    "import os, signal\nif os.environ['RANK'] == '1': os.kill(os.getpid(), "
    "signal.SIGKILL)\nsignal.pause()"
)


@contextmanager
def _two(
    mode: Mode, env: dict[str, str], port: int, container: str, program: str
) -> Iterator[tuple[Wrapped, Wrapped]]:
    """Two containers of one rank each, on one network."""
    job = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "HOME": "/nonexistent",
    }
    command = [sys.executable, "-c", program]
    before = _CONTAINERS[container]
    with (
        wrapped(mode, {**env, **job, "RANK": "0"}, *command, before=before) as rank_0,
        wrapped(mode, {**env, **job, "RANK": "1"}, *command, before=before) as rank_1,
    ):
        yield rank_0, rank_1


@pytest.fixture
def env(clean_env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return {**clean_env, "DEV": str(tmp_path), "DISTBOOT_GRACE": "1"}


@needs_root
@containers
@in_modes(PROCESS_1, EXEC_PROCESS_1)
def test_job_in_containers_that_lack_something(
    env: dict[str, str], mode: Mode, container: str, port: int
) -> None:
    with _two(mode, env, port, container, _JOINS) as ranks:
        for number, rank in enumerate(ranks):
            assert f"{number} of 2\n" in rank.rest()
            assert rank.code() == 0


@needs_root
@containers
@in_modes(PROCESS_1)
def test_failure_in_containers_that_lack_something(
    env: dict[str, str], mode: Mode, container: str, port: int
) -> None:
    with _two(mode, env, port, container, _FAILS) as (rank_0, rank_1):
        assert "rank 1 failed first: killed by SIGKILL" in rank_0.rest()
        assert rank_0.code() == 128 + signal.SIGKILL
        assert rank_1.code() == 128 + signal.SIGKILL


@needs_root
@needs_namespace
@containers
@pytest.mark.parametrize("command", ["show", "doctor"])
def test_other_commands_where_something_is_missing(
    env: dict[str, str], run: Run, container: str, command: str
) -> None:
    done = run(
        *NAMESPACE,
        *_CONTAINERS[container],
        sys.executable,
        "-m",
        "distboot",
        command,
        "--json",
        env=env,
    )
    expected = 78 if (container, command) == ("no /dev/shm", "doctor") else 0
    assert (done.returncode, done.stderr) == (expected, "")
