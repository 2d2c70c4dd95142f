"""`python -m distboot check` on real hosts, also with `--allreduce`: what it prints, and its exit code."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from bad_link import bad_link
from checked_hosts import BAD, four_hosts
from conftest import Run
from hosts import Hosts, side_by_side
from launched import needs_hosts, needs_torch
from ranks import RunRanks

_PAIR = (sys.executable, "-m", "distboot", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def four() -> Iterator[Hosts]:
    with four_hosts() as hosts:
        yield hosts


def _check(hosts: Hosts, port: int, *options: str, **more: str) -> list[tuple[int, str]]:
    """Start a rank on each host, as torch's own variables say."""
    commands = []
    for rank, name in enumerate(hosts.names):
        environ = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts.names)),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "10.77.0.10",
            "MASTER_PORT": str(port),
            **more,
        }
        command = hosts.command(name, [sys.executable, "-m", "distboot", "check", *options])
        commands.append((command, hosts.environment(environ)))
    return side_by_side(commands, 120)


def _json_of(output: str) -> dict[str, Any]:
    (line,) = [line for line in output.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(line)
    return found


@needs_hosts
def test_table_of_healthy_nodes_is_printed(four: Hosts, port: int) -> None:
    first, *others = _check(four, port)
    assert others == [(0, "")] * 3
    code, output = first
    assert code == 0, output
    lines = output.splitlines()
    assert lines[0] == "4 nodes checked, none is odd."
    assert lines[2].split()[:4] == ["node", "host", "free", "memory"]
    assert [line.split()[:2] for line in lines[3:]] == [
        ["0", "one"],
        ["1", "two"],
        ["2", "three"],
        ["3", "four"],
    ]


@needs_hosts
def test_odd_node_is_marked_and_ends_with_78(four: Hosts, port: int) -> None:
    with bad_link(four, "three", **BAD["slow"]):
        first, *others = _check(four, port)
    assert [code for code, _ in others] == [0, 0, 0]
    code, output = first
    assert code == 78, output
    assert "distboot: rank 0 on one: warning: t" in output
    marked = [line.split()[2] for line in output.splitlines() if line.startswith("! ")]
    assert set(marked) <= {"two", "three"}
    assert marked


@pytest.mark.all
@needs_hosts
@needs_torch
def test_all_reduce_names_the_node_with_slow_pairs(four: Hosts, port: int) -> None:
    with bad_link(four, "three", **BAD["slow"]):
        first, *others = _check(four, port, "--allreduce", "--json", DISTBOOT_CHECK="stop")
    assert [code for code, _ in others] == [0, 0, 0]
    code, output = first
    assert code == 78, output
    found = _json_of(output)
    assert not found["fit"]
    measured = found["allreduce"]
    assert measured["backend"] == "gloo"
    sizes = [one["bytes"] for one in measured["sizes"]]
    assert sizes[:2] == [4096, 65536]
    assert len(measured["pairs"]) == 6
    slowest = [pair["hosts"] for pair in measured["pairs"][:3]]
    assert all("three" in pair for pair in slowest)
    assert measured["findings"]
    for finding in measured["findings"]:
        assert "three" in finding.partition(":")[0]


@pytest.mark.all  # as above, with nodes
@needs_torch
def test_ranks_of_one_node_reduce(run_ranks: RunRanks) -> None:
    script = (
        "import sys; from distboot.cli.main import main; sys.exit(main(['check', '--allreduce']))"
    )
    first, second = run_ranks(script, places=[{}, {}])
    assert (first.code, second.code, second.out) == (0, 0, "")
    assert first.out.startswith("One node: there is no other to compare with. `doctor`")
    assert "all-reduce of 2 ranks, gloo:" in first.out
    assert "pairs of nodes" not in first.out


def test_single_rank_has_nothing_to_compare(run: Run) -> None:
    done = run(sys.executable, "-m", "distboot", "check")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("One rank: there is no node to compare with.")


def test_single_node_has_nothing_to_compare(run: Run) -> None:
    done = run(*_PAIR, "-m", "distboot", "check")
    assert done.returncode == 0, done.stderr
    said = "One node: there is no other to compare with. `doctor` looks at this one.\n"
    assert done.stdout == said


def test_check_that_the_wrapper_left_out(run: Run) -> None:
    done = run(*_PAIR, "--check", "off", "-m", "distboot", "check")
    assert done.returncode == 2
    assert "the nodes were not compared: DISTBOOT_CHECK=off holds for the wrapper" in done.stderr


@pytest.mark.parametrize("command", [["check"], ["show", "--job"]])
def test_ranks_have_to_meet(run: Run, command: list[str]) -> None:
    done = run(sys.executable, "-m", "distboot", *command, env={"DISTBOOT_RENDEZVOUS": "0"})
    assert (done.returncode, done.stdout) == (78, "")
    assert "error[rendezvous-needed]" in done.stderr
