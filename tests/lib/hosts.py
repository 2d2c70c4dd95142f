"""Several hosts on one machine, for tests whose ranks must not share one.

Everything about the hosts themselves is in `cluster/`, shell scripts that also work by hand. This module
brings hosts up for a test session, runs commands on them under a time limit, and takes everything down again.
Hosts of sessions that run at the same time do not meet: see `cluster/README.md`.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Done = subprocess.CompletedProcess[str]
    Env = Mapping[str, str] | None

SCRIPTS = Path(__file__).resolve().parents[1] / "cluster"
REPOSITORY = SCRIPTS.parents[1]
NAMES = ("head", "nodea", "nodeb")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PREFIX = "distboot-hosts-"

# What a host needs from the kernel, and nothing that outlives the command.
PROBE = """
set -e
mount -n -t proc proc /proc
ip link add probe0 type bridge
ip link add probe1 type veth peer name probe2
"""


class HostsError(Exception):
    """The hosts, or Slurm on them, could not be brought up or down; the message holds the script's output."""


@functools.cache
def missing_for_hosts() -> str | None:
    if not sys.platform.startswith("linux"):
        return "several hosts need Linux"
    if os.geteuid() != 0:
        return "several hosts need root"
    absent = _absent("bash", "ip", "unshare", "nsenter", "setsid", "ssh", "ssh-keygen", "sshd")
    if absent:
        return absent
    namespaces = [
        "unshare",
        "--net",
        "--uts",
        "--ipc",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
    ]
    try:
        probe = _call([*namespaces, "bash", "-c", PROBE], {"PATH": SYSTEM_PATH}, timeout=20)
    except TimeoutError as error:
        return f"cannot create network namespaces: {error}"
    if probe.returncode != 0:
        return (
            "cannot create network namespaces: "
            f"{' '.join(probe.stderr.split()) or probe.returncode}"
        )
    return None


def missing_for_slurm() -> str | None:
    programs = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "squeue", "scancel")
    return missing_for_hosts() or _absent(*programs)


@dataclass(frozen=True)
class Hosts:
    """Hosts that are up: `with Hosts.up() as hosts: hosts.run("nodea", ["hostname"])`.

    Process ids are each host's own: end a process with `run(host, ["kill", ...])`, never with `os.kill`.
    """

    root: Path
    """Scratch folder, visible on all hosts at the same path; the logs are in `run`."""
    names: tuple[str, ...]
    """The first is the head node."""

    @classmethod
    @contextmanager
    def up(cls, names: Sequence[str] = NAMES) -> Iterator[Hosts]:
        """Bring hosts up, and down at the end.

        A host has a `/tmp` of its own; below the machine's it sees the repository and the Python that runs the tests.
        """
        absent = missing_for_hosts()
        if absent:
            raise HostsError(absent)
        _take_down_crashed()
        hosts = cls(Path(tempfile.mkdtemp(prefix=PREFIX)).resolve(), tuple(names))
        lock = _lock(hosts.root)
        folders = (REPOSITORY, Path(sys.prefix), Path(sys.base_prefix))
        visible = ":".join(str(path) for folder in folders for path in (folder, folder.resolve()))
        try:
            hosts.shared.mkdir()
            _script("cluster.sh", "up", hosts.root, HC_NODES=" ".join(names), HC_SHOW=visible)
            yield hosts
        finally:
            _take_down(hosts.root, lock)

    @property
    def shared(self) -> Path:
        return self.root / "shared"

    def command(self, host: str, command: Sequence[str], cwd: Path | None = None) -> list[str]:
        process = (self.root / "run" / f"{host}.pid").read_text().strip()
        nsenter = shutil.which("nsenter", path=SYSTEM_PATH) or "nsenter"
        enter = [nsenter, "--target", process, "--net", "--uts", "--ipc", "--mount", "--pid", "--"]
        return [*enter, "/usr/bin/env", f"--chdir={cwd or self.shared}", *command]

    @staticmethod
    def environment(env: Env = None) -> dict[str, str]:
        """The environment of a fresh login, with the tests' Python first on PATH, extended by `env`."""
        path = f"{sys.prefix}/bin:{SYSTEM_PATH}"
        # Also where the Python that runs the tests has another one installed
        ours = {"PYTHONPATH": str(REPOSITORY)}
        return {
            **ours,
            "PATH": path,
            "HOME": str(Path("~root").expanduser()),
            "LANG": "C.UTF-8",
            **(env or {}),
        }

    def run(
        self,
        host: str,
        command: Sequence[str],
        env: Env = None,
        timeout: float = 60,
        cwd: Path | None = None,
    ) -> Done:
        return _call(self.command(host, command, cwd), self.environment(env), timeout)


@dataclass(frozen=True)
class Slurm:
    """Slurm that is up on hosts: the controller on the first, 4 CPUs on each other one."""

    hosts: Hosts

    @classmethod
    @contextmanager
    def up(cls, hosts: Hosts, conf: str = "") -> Iterator[Slurm]:
        """Bring Slurm up, with `conf` appended to slurm.conf, and down at the end."""
        absent = missing_for_slurm()
        if absent:
            raise HostsError(absent)
        _script("slurm.sh", "up", hosts.root, HC_SLURM_EXTRA=conf)
        try:
            yield cls(hosts)
        finally:
            _script("slurm.sh", "down", hosts.root)

    def run(self, command: Sequence[str], env: Env = None, timeout: float = 60) -> Done:
        return self.hosts.run(self.hosts.names[0], command, env, timeout)

    def srun(self, args: Sequence[str], env: Env = None, timeout: float = 60) -> Done:
        return self.run(["srun", *args], env, timeout)


def _absent(*programs: str) -> str | None:
    absent = [name for name in programs if shutil.which(name, path=SYSTEM_PATH) is None]
    return (
        f"not installed: {', '.join(absent)} (see tests/cluster/packages.txt)" if absent else None
    )


def _lock(root: Path) -> int:
    """Mark a scratch folder as in use, while this process lives; BlockingIOError when it is already."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _take_down_crashed() -> None:
    """End the hosts of a session that was killed: its folder is there, its lock went with it."""
    for root in Path(tempfile.gettempdir()).resolve().glob(f"{PREFIX}*"):
        with suppress(OSError):  # another session may have taken it down in between
            # Anybody may make such a folder in a common /tmp. One without `run` was made this very moment.
            if root.lstat().st_uid == os.geteuid() and (root / "run").is_dir():
                _take_down(root, _lock(root))


def _take_down(root: Path, lock: int) -> None:
    """End the hosts and remove their folder; where that fails it stays, for the next session to try."""
    try:
        _script("cluster.sh", "down", root)
        shutil.rmtree(root)
    finally:
        os.close(lock)


def _script(name: str, action: str, root: Path, **settings: str) -> None:
    environment = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "HCROOT": str(root), **settings}
    done = _call([str(SCRIPTS / name), action], environment, timeout=90)
    if done.returncode != 0:
        message = f"{name} {action} failed with {done.returncode}:\n{done.stdout}{done.stderr}"
        raise HostsError(message)


def _text_file() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _call(command: Sequence[str], env: Mapping[str, str], timeout: float) -> Done:
    """Run a command under a time limit. Output goes to files: what it leaves behind may hold a pipe open."""
    with _text_file() as stdout, _text_file() as stderr:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        late = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            if process.returncode is None:
                _end(process)
        stdout.seek(0)
        stderr.seek(0)
        out = stdout.read()
        err = stderr.read()
    if late:
        message = f"not done after {timeout} s: {' '.join(command)}\n{out[-4000:]}\n{err[-4000:]}"
        raise TimeoutError(message)
    return subprocess.CompletedProcess(list(command), process.returncode, out, err)


def side_by_side(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], limit: float
) -> list[tuple[int, str]]:
    """Run commands, each in its environment, at the same time and to their end; exit codes, and what each printed."""
    with ExitStack() as stack:
        started = []
        for command, env in commands:
            output = stack.enter_context(_text_file())
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(_end, process)
            started.append((process, output))
        try:
            codes = [process.wait(limit) for process, _ in started]
        except subprocess.TimeoutExpired:
            for process, _ in started:
                _show_where(process)
            codes = []
        texts = []
        for _, output in started:
            output.seek(0)
            texts.append(output.read())
        if not codes:
            shown = "\n".join(text[-20000:] for text in texts)
            raise TimeoutError(f"not done after {limit:g} s:\n{shown}")
        return list(zip(codes, texts, strict=True))


def _show_where(process: subprocess.Popen[bytes]) -> None:
    """Abort the innermost processes, so that those which report how they end show where they were."""
    for pid in _innermost(process.pid):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            waits = Path(f"/proc/{pid}/wchan").read_text()
            print(f"process {pid}, {words}: in {waits}")
            os.kill(pid, signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)


def _innermost(pid: int) -> list[int]:
    """The processes below this one that have started none; itself, if it has not."""
    children: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (thread / "children").read_text().split())
    found = []
    for child in children:
        found += _innermost(child)
    return found or [pid]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process group that this process leads, gently first, and wait until nobody is in it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + 5
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            while time.monotonic() < deadline:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.02)
