"""A podman of the tests' own, and the images of docker/ in it: no registry, no network, nothing installed twice.

Storage is in the user's cache folder. The image that the Dockerfiles start from is made of Debian's packages, under the
name that they use. What pip is to install there (torch, TensorFlow, scikit-learn, hatchling) is that of the virtual
environment, mounted read-only where pip finds it and has nothing left to do. So the real Dockerfiles are built in
seconds, but these downloads are not tried; what else is missing would show, as builds have no network.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import distribution, distributions, version
from pathlib import Path

from packaging.requirements import Requirement

import distboot

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
_PROGRAMS = ("podman", "runc", "conmon", "iptables", "mmdebstrap")
_DISTRIBUTIONS = ("torch", "scikit-learn", "tensorflow-cpu", "hatchling")
_HELPERS = ("netavark", "aardvark-dns")  # Debian has them outside of PATH
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distboot" / "podman"
# What is not to survive a restart of the machine.
_RUN = Path("/run", "distboot-podman-" + hashlib.sha256(bytes(_CACHE)).hexdigest()[:8])
_CAP_SYS_ADMIN = 21
_LIMIT = 120  # seconds for a container

# Links to what is needed of the next, as all of it would have an editable distboot, too
_PACKAGES = "/opt/packages"
_ENVIRONMENT = "/opt/site-packages"
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_DEBIANS_PYTHON = "3.11"
_BASE = (
    *(
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        "--include=python3,python3-pip,ca-certificates",
    ),
    '--aptopt=Apt::Install-Recommends "false"',
    *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "locale", "man")),
    '--customize-hook=ln -sf python3 "$1/usr/bin/python"',
    f'--customize-hook=rm -f "$1/usr/lib/python{_DEBIANS_PYTHON}/EXTERNALLY-MANAGED"',
    f'--customize-hook=mkdir "$1{_PACKAGES}" "$1{_ENVIRONMENT}"',
    (
        f"--customize-hook=echo {_PACKAGES} > "
        f'"$1/usr/local/lib/python{_DEBIANS_PYTHON}/dist-packages/packages.pth"'
    ),
    *("bookworm", "-"),
)
_BASE_LABEL = "distboot.base=" + hashlib.sha256("\n".join(_BASE).encode()).hexdigest()[:12]
_BASE_PATH = "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"


def missing() -> str | None:
    """Why podman cannot run here, in one line; None if it can."""
    if os.geteuid() != 0:
        return "podman is used as root here, and this is another user"
    capabilities = Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0]
    if not int(capabilities, 16) >> _CAP_SYS_ADMIN & 1:
        return "this machine's root may not mount (no CAP_SYS_ADMIN), as in a container"
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    absent += [name for name in _HELPERS if not Path("/usr/lib/podman", name).exists()]
    if absent:
        return f"{', '.join(absent)} not installed (see tests/cluster/packages.txt)"
    absent = [name for name in _DISTRIBUTIONS if not any(distributions(name=name))]
    if absent:
        return f"{', '.join(absent)} not in this Python, which the images are to use"
    if _PYTHON != _DEBIANS_PYTHON:
        return (
            f"the images' Python is Debian's {_DEBIANS_PYTHON}, and cannot use the "
            f"packages of this {_PYTHON}"
        )
    return None


def argument(dockerfile: Path, name: str) -> str:
    lines = [line.strip() for line in dockerfile.read_text().splitlines()]
    return next(line.partition("=")[2] for line in lines if line.startswith(f"ARG {name}="))


class Podman:
    """podman, with its storage, networks and settings apart from those of the machine."""

    def __init__(self, scratch: Path) -> None:
        # With which podman and podman-compose use all that
        self.environ = {**os.environ, **_settings()}
        # Volumes, as `--volume` takes them, that every container needs.
        self.mounts = [
            f"{scratch}:{_PACKAGES}:ro",
            f"{distribution('torch').locate_file('')}:{_ENVIRONMENT}:ro",
        ]
        self._volumes = [f"--volume={mount}" for mount in self.mounts]
        self._of_all = (f"--timeout={_LIMIT}", *self._volumes)
        scratch.chmod(0o755)  # the user in the images is another one
        _link_packages(scratch, *_DISTRIBUTIONS)
        self.context = _context(scratch.with_name(f"{scratch.name}-context"))
        with (_CACHE / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two at once would make it twice
            self._make_base(argument(DOCKER / "Dockerfile", "PYTHON"))

    def __call__(
        self, *words: str, ok: bool = True, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of podman's; `ok`: it has to end well."""
        done = subprocess.run(
            ["podman", *words],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert not ok or done.returncode == 0, (
            f"podman {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done

    def build(self, dockerfile: str, *, network: str = "none", **arguments: str) -> str:
        given = {"HATCHLING": version("hatchling"), **arguments}
        words = [f"--build-arg={name}={value}" for name, value in given.items()]
        words += [*self._volumes, "--file", str(DOCKER / dockerfile), str(self.context)]
        done = self(
            "build",
            "--quiet",
            "--pull=never",
            f"--network={network}",
            "--layers",
            *words,
            timeout=240,
        )
        return done.stdout.split()[-1]

    def run(
        self, image: str, *command: str, options: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run a container without network to its end."""
        own = ("--rm", "--network=none", *self._of_all)
        return self(
            "run",
            *own,
            *options,
            image,
            *command,
            ok=False,
            timeout=_LIMIT + 30,
        )

    @contextmanager
    def container(
        self, image: str, *command: str, options: Sequence[str] = ()
    ) -> Iterator[Container]:
        name = f"distboot-{uuid.uuid4().hex[:12]}"
        try:
            self(
                "run",
                "--detach",
                f"--name={name}",
                *self._of_all,
                *options,
                image,
                *command,
            )
            yield Container(self, name)
        finally:
            self("rm", "--force", "--time=0", "--ignore", name)

    @contextmanager
    def network(self) -> Iterator[str]:
        """A network that leads nowhere, in which containers find each other by name; removed at the end."""
        name = f"distboot-{uuid.uuid4().hex[:12]}"
        self("network", "create", "--internal", name)
        try:
            yield name
        finally:
            self("network", "rm", "--force", name)

    def _make_base(self, image: str) -> None:
        labels = self("image", "inspect", "--format={{.Labels}}", image, ok=False).stdout
        if _BASE_LABEL.replace("=", ":") in labels:
            return
        changes = [
            f"--change={change}"
            for change in ('CMD ["python3"]', f"ENV {_BASE_PATH}", f"LABEL {_BASE_LABEL}")
        ]
        # In a session of its own: mmdebstrap sends SIGHUP to its process group when it has to give up.
        with subprocess.Popen(_BASE, stdout=subprocess.PIPE, start_new_session=True) as rootfs:
            done = subprocess.run(
                ["podman", "import", "--quiet", *changes, "-"],
                env=self.environ,
                stdin=rootfs.stdout,
                stdout=subprocess.PIPE,
                text=True,
                timeout=300,
                check=False,
            )
        assert (rootfs.returncode, done.returncode) == (0, 0), "the base image could not be made"
        self("tag", done.stdout.strip(), image)  # not before it is known to be whole


class Container:
    def __init__(self, podman: Podman, name: str) -> None:
        self.name = name
        self._podman = podman

    def logs(self) -> str:
        done = self._podman("logs", self.name)
        return done.stdout + done.stderr

    def wait_for(self, text: str) -> None:
        """Return as soon as it has written this; it may not end before."""
        while text not in self.logs():
            is_running = (
                self._podman("inspect", "--format={{.State.Running}}", self.name).stdout.strip()
                == "true"
            )
            # It has a time limit
            assert is_running, f"{self.name} has ended without {text!r}:\n{self.logs()}"

    def exit_code(self) -> int:
        return int(self._podman("wait", self.name, timeout=180).stdout)


def _settings() -> Mapping[str, str]:
    """Where podman finds its settings, which are written again."""
    for folder in (_CACHE / "networks", _RUN):
        folder.mkdir(parents=True, exist_ok=True)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # runc and cgroupfs, as they need neither systemd nor the second version of cgroups.
    (_CACHE / "containers.conf").write_text(f"""
[containers]
default_ulimits = ["nofile={files}:{files}", "nproc=32768:32768"]
http_proxy = false
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
tmp_dir = "{_RUN / "libpod"}"
[network]
network_backend = "netavark"
network_config_dir = "{_CACHE / "networks"}"
""")
    (_CACHE / "storage.conf").write_text(f"""
[storage]
driver = "overlay"
graphroot = "{_CACHE / "storage"}"
runroot = "{_RUN / "storage"}"
""")
    variables = {"CONTAINERS_CONF": "containers.conf", "CONTAINERS_STORAGE_CONF": "storage.conf"}
    return {name: str(_CACHE / file) for name, file in variables.items()}


def _context(folder: Path) -> Path:
    """The root of the repository; where only the installed distboot is tested, a copy that has it again."""
    if (ROOT / "distboot").exists():
        return ROOT
    shutil.copytree(ROOT, folder)
    shutil.copytree(Path(distboot.__file__).parent, folder / "distboot")
    return folder


def _link_packages(folder: Path, *names: str) -> None:
    """Link, as seen in a container, these distributions and all that they require."""
    names_left = list(names)
    seen = set()
    while names_left:
        name = names_left.pop()
        if name in seen:
            continue
        seen.add(name)
        found = distribution(name)
        required = [Requirement(text) for text in found.requires or ()]
        names_left += [
            each.name for each in required if not each.marker or each.marker.evaluate({"extra": ""})
        ]
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            link = folder / top
            if not top.endswith(".pth") and not link.is_symlink():
                link.symlink_to(f"{_ENVIRONMENT}/{top}")


def history(podman: Podman, image: str) -> list[dict[str, object]]:
    layers: list[dict[str, object]] = json.loads(podman("history", "--format=json", image).stdout)
    return layers
