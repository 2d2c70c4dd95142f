"""Tests what users install: `make test-all` builds the sdist and, from that alone, the wheel, and tests those two.

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


def build(folder: Path) -> tuple[Path, Path]:
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
    quiet = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", command]
    subprocess.run([*quiet, *arguments], env=environ, check=True)


def install(python: str, wheel: Path) -> None:
    """Replace the distboot of a Python, whatever it is, by the wheel."""
    pip(python, "install", "--no-deps", "--no-index", "--force-reinstall", str(wheel))


def unpacked(sdist: Path, folder: Path) -> Path:
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
    return [python, "-m", "pytest", *arguments]


def environment(python: str, folder: Path) -> dict[str, str]:
    """That of the tests: with the Python's own programs first, and where the two archives are."""
    programs = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": programs, "DISTBOOT_DIST": str(folder.resolve())}


def main(folder: Path, arguments: Sequence[str]) -> int:
    sdist, wheel = build(folder)
    try:
        install(sys.executable, wheel)
        with tests_of(sdist) as tests:
            print(f"distboot: testing {wheel.name}", flush=True)
            tested = command(sys.executable, *arguments)
            return subprocess.run(tested, cwd=tests, env=environment(sys.executable, folder), check=False).returncode
    finally:
        pip(sys.executable, "install", "--no-deps", "-e", str(ROOT))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
