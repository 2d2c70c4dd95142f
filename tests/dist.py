"""Tests what users install: `make dist` builds the sdist and, from that alone, the wheel, and tests those two.

The wheel is installed, and the tests of the sdist run in a temporary folder from which its distboot/ is gone. After
that the Python that this runs in has the editable install of `make test` again.

    python tests/dist.py FOLDER [ARGUMENTS OF PYTEST]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# About half of the time of all tests, and what takes most of the machine. Both halves wait more than they work, so they
# run side by side; for hosts and containers each waits until the other has done (`hosts.py`, `podman.py`).
_HEAVY = (
    "docs_console", "faults", "images", "matrix", "nested_launchers", "per_node", "process1", "process1_inputs",
    "process1_terminal", "real_launchers", "report_page", "rollcall_hosts", "several_hosts", "terminal",
)  # fmt: skip


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist of this repository, and the wheel that is built from it."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("distboot-*"):
        old.unlink()
    hatchling = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)]
    subprocess.run(hatchling, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    (sdist,) = folder.glob("distboot-*.tar.gz")
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(sdist))
    (wheel,) = folder.glob("distboot-*.whl")
    return sdist, wheel


def pip(python: str, command: str, *arguments: str, environ: Mapping[str, str] = os.environ) -> None:
    """Run pip for a Python."""
    quiet = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", command]
    subprocess.run([*quiet, *arguments], env=environ, check=True)


def install(python: str, wheel: Path) -> None:
    """Replace the distboot of a Python, whatever it is, by the wheel."""
    pip(python, "install", "--no-deps", "--no-index", "--force-reinstall", str(wheel))


def unpacked(sdist: Path, folder: Path) -> Path:
    """The one folder of an sdist, in an empty one."""
    subprocess.run(["tar", "-xzf", str(sdist), "-C", str(folder)], check=True)
    (only,) = folder.iterdir()
    return only


@contextmanager
def tests_of(sdist: Path) -> Iterator[Path]:
    """The sdist, unpacked into a temporary folder, without its distboot/."""
    with tempfile.TemporaryDirectory(prefix="distboot-dist-") as scratch:
        folder = unpacked(sdist, Path(scratch))
        shutil.rmtree(folder / "distboot")
        yield folder


def command(python: str, *arguments: str) -> list[str]:
    """What runs tests with a Python."""
    return [python, "-m", "pytest", "-p", "no:cacheprovider", *arguments]


def environment(python: str, folder: Path) -> dict[str, str]:
    """That of the tests: with the Python's own programs first, and where the two archives are."""
    programs = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": programs, "DISTBOOT_DIST": str(folder.resolve())}


def _run(tests: Path, environ: Mapping[str, str], arguments: Sequence[str]) -> int:
    """The tests that the arguments of pytest name; or all, in two halves at the same time: the exit code."""
    if arguments:
        return subprocess.run(command(sys.executable, *arguments), cwd=tests, env=environ, check=False).returncode
    heavy = [f"tests/test_{name}.py" for name in _HEAVY]
    with tempfile.TemporaryFile("w+") as output:
        first = subprocess.Popen(
            command(sys.executable, *heavy), cwd=tests, env=environ, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            rest = command(sys.executable, *(f"--ignore={name}" for name in heavy))
            code = subprocess.run(rest, cwd=tests, env=environ, check=False).returncode
            print(f"distboot: the other half: {len(heavy)} files", flush=True)
            failed = first.wait() != 0 or code != 0  # whatever the codes are: a signal's is negative
        finally:
            first.terminate()
            first.wait()
        output.seek(0)
        sys.stdout.write(output.read())
    return int(failed)


def main(folder: Path, arguments: Sequence[str]) -> int:
    sdist, wheel = build(folder)
    try:
        install(sys.executable, wheel)
        with tests_of(sdist) as tests:
            print(f"distboot: testing {wheel.name}", flush=True)
            return _run(tests, environment(sys.executable, folder), arguments)
    finally:
        pip(sys.executable, "install", "--no-deps", "-e", str(ROOT))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
