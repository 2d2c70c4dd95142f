"""What publishes a release: `make dist`, the workflows of GitHub, the recipe for conda, the labels of the images."""

import email
import importlib.util
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from environments import VERSIONS

import distboot

_SPEC = importlib.util.spec_from_file_location("dist", ROOT / "packaging" / "dist.py")
assert _SPEC is not None
assert _SPEC.loader is not None
dist: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(dist)

URL = "https://github.com/owner/name"
# The sources; an installed wheel may be what is tested, without its folder.
HAS_SOURCES = (ROOT / "distboot").exists()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


# -- make dist


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if not HAS_SOURCES:
        pytest.skip("there are no sources to build from")
    pytest.importorskip("hatchling")
    sdist, wheel = dist.build(URL, tmp_path_factory.mktemp("dist"))
    return sdist, wheel


@pytest.mark.all
def test_wheel_names_the_repository(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    urls = dict(each.split(", ") for each in metadata.get_all("Project-URL") or [])
    assert urls["Repository"] == URL
    assert urls.keys() == {"Repository", "Documentation", "Changelog", "Issues"}
    assert metadata["Author"] == "The distboot developers"
    assert f"]({URL}/blob/v{distboot.__version__}/docs/tutorial.md)" in str(metadata.get_payload())


def test_wheel_of_a_release_comes_from_its_sdist(
    built: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(built[0]) as archive:
        times = {int(each.mtime) for each in archive.getmembers()}
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    (source,) = tmp_path.iterdir()
    (time,) = times
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(time))
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=source, stdout=subprocess.DEVNULL, timeout=120, check=True)
    assert (tmp_path / built[1].name).read_bytes() == built[1].read_bytes()


def test_every_link_of_the_readme_leads_somewhere() -> None:
    text = dist.with_absolute_links((ROOT / "README.md").read_text(), URL, "v1")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert all(target.startswith("https://") for target in targets), targets
    ours = re.findall(rf"{URL}/(?:blob|raw)/v1/([^)#\s]+)", text)
    assert len(ours) > 30
    assert [path for path in ours if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[a](docs/a.md#part)", f"[a]({URL}/blob/v1/docs/a.md#part)"),
        ("![a](docs/a.png)", f"![a]({URL}/raw/v1/docs/a.png)"),
        (
            "[![a](docs/a.svg)](docs/a.md)",
            f"[![a]({URL}/raw/v1/docs/a.svg)]({URL}/blob/v1/docs/a.md)",
        ),
        ("[a](https://example.org/a.md)", "[a](https://example.org/a.md)"),
        ("[a](#part)", "[a](#part)"),
    ],
)
def test_absolute_links(link: str, expected: str) -> None:
    assert dist.with_absolute_links(link, URL, "v1") == expected


@pytest.mark.parametrize(
    ("tag", "heading", "problem"),
    [
        ("v1.2.0", "## [1.2.0] - 2026-12-01", None),
        ("v1.2.1", "## [1.2.0] - 2026-12-01", "the tag is v1.2.1"),
        ("1.2.0", "## [1.2.0] - 2026-12-01", "the tag is 1.2.0"),
        ("v1.2.0", "## [1.2.0] - unreleased", "CHANGELOG.md begins with"),
        ("v1.2.0", "## [1.1.0] - 2026-11-01", "CHANGELOG.md begins with"),
    ],
)
def test_tag_of_a_release(tag: str, heading: str, problem: str | None) -> None:
    changelog = f"# Changelog\n\n{heading}\n\n## [1.0.0] - 2026-10-01\n"
    problems = list(dist.tag_problems(tag, "1.2.0", changelog))
    assert [each for each in problems if problem is None or problem not in each] == []
    assert bool(problems) == (problem is not None)


def test_tag_without_an_address_builds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    if not HAS_SOURCES:
        pytest.skip("there are no sources to build from")
    assert dist.main(["--tag", "v0.0.0"]) == 1
    printed = capsys.readouterr().err
    assert "the tag is v0.0.0" in printed
    assert "use --url" in printed


@pytest.mark.parametrize("address", ["owner/name", "git@github.com:owner/name", "http://a/b/c", ""])
def test_address_of_no_repository(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dist.main(["--url", address])
    assert "is not https://HOST/OWNER/REPOSITORY" in capsys.readouterr().err


# -- the workflows


def _jobs() -> list[Any]:
    found = []
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {}, f"{path.name}: each job names its own"
        found += [
            pytest.param(path, job, id=f"{path.stem}-{name}")
            for name, job in workflow["jobs"].items()
        ]
    return found


def _commands(job: dict[str, Any]) -> list[list[str]]:
    scripts = [step["run"] for step in job.get("steps", ()) if "run" in step]
    return [shlex.split(line) for script in scripts for line in script.splitlines()]


def test_there_are_three_workflows() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "release"]


@pytest.mark.parametrize(("path", "job"), _jobs())
def test_job_of_a_workflow(path: Path, job: dict[str, Any]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in _commands(job):
        if command[0] == "make":
            assert command[1] in targets
            variables = {each.partition("=")[0] for each in command[2:]}
            assert variables <= {"URL", "TAG"}
        if command[0] == "bash":
            assert (ROOT / command[1]).exists()
    for each in [*job.get("steps", ()), job]:
        called = each.get("uses", "")
        if called.startswith("./"):
            assert (ROOT / called).exists()
        elif called:
            pinned = rf"uses: {re.escape(called)} # v\d+\.\d+\.\d+\n"
            assert re.search(pinned, path.read_text()), f"{called} has no version beside it"
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", called)
    assert "secrets." not in str(job)
    assert "timeout-minutes" in job or "uses" in job


def test_ci_runs_the_same_command_and_every_python() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert ["bash", ".ci/run"] in _commands(jobs["all"])
    assert ["make", "quick"] in _commands(jobs["quick"])
    assert jobs["quick"]["strategy"]["matrix"]["python"] == list(VERSIONS)


def test_a_release_publishes_only_after_ci() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    publishing = {
        name
        for name, job in jobs.items()
        if {"packages", "id-token"} & job.get("permissions", {}).keys()
    }
    assert publishing == {"pypi", "images"}
    assert all({"ci", "dist"} <= set(jobs[name]["needs"]) for name in publishing)
    (command,) = [each for each in _commands(jobs["dist"]) if each[0] == "make"]
    assert {each.partition("=")[0] for each in command[2:]} == {"URL", "TAG"}


def test_images_of_a_release_have_their_labels() -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["images"]
    files = [each["file"] for each in job["strategy"]["matrix"]["include"]]
    assert sorted(files) == sorted(
        f"docker/{each.name}" for each in ROOT.glob("docker/Dockerfile*")
    )
    (build,) = [step["with"] for step in job["steps"] if "build-args" in step.get("with", {})]
    assert (build["sbom"], build["provenance"]) == (True, "mode=max")
    given = {line.partition("=")[0] for line in build["build-args"].splitlines()}
    for file in files:
        last_stage = (ROOT / file).read_text().rpartition("\nFROM ")[2]
        assert given <= set(re.findall(r"^ARG (\w+)=$", last_stage, re.MULTILINE)), file
        labels = re.findall(r'org\.opencontainers\.image\.(\w+)="(.+)"', last_stage)
        assert {name for name, _ in labels} == {
            *("title", "description", "licenses", "source", "revision", "version")
        }, file
        assert {value for _, value in labels} >= {f"${{{name}}}" for name in given}, file


# -- the version


def test_conda_recipe() -> None:
    recipe = yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text())
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert recipe["context"]["version"] == distboot.__version__
    assert f'requires-python = ">={recipe["context"]["python_min"]}"' in pyproject
    assert f'description = "{recipe["about"]["summary"]}"' in pyproject
    name, _, target = recipe["build"]["python"]["entry_points"][0].partition(" = ")
    assert f'\n{name} = "{target}"\n' in pyproject
    hatchling = next(each for each in recipe["requirements"]["host"] if "hatchling" in each)
    assert f'requires = ["{hatchling.replace(" ", "")}"]' in pyproject


def test_pages_name_this_version() -> None:
    minor = distboot.__version__.rpartition(".")[0]
    assert f"\n| maturity | {minor}, " in (ROOT / "README.md").read_text()
    assert f"the newest release, {minor}, is supported" in (ROOT / "SECURITY.md").read_text()
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert newest.startswith(f"[{distboot.__version__}] - ")
    assert "\n### What breaks\n" in newest
