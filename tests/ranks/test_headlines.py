"""What a person reads of a failed job: the cause in the headline, word for word, and lines that are short enough."""

import os
import re
import sys

import pytest
from conftest import Run
from launched import MPIRUN, needs_mpirun

from distboot.job.exit_status import LONGEST_HEADLINE, ExitStatus, UncaughtException, shown
from distboot.job.root_cause import RankState, from_exit
from distboot.script.exceptions import last_line

HOST = os.uname().nodename
WRAPPER = (sys.executable, "-m", "distboot")
BY_WRAPPER = (*WRAPPER, "--nproc-per-node", "2", "train.py")
BY_MPIRUN = (
    *(str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-n", "2"),
    *(*WRAPPER, "train.py"),
)
IN_BOTH_WAYS = pytest.mark.parametrize(
    "command",
    [BY_WRAPPER, pytest.param(BY_MPIRUN, marks=needs_mpirun)],
    ids=["--nproc-per-node", "mpirun"],
)
PARSER = """
import argparse, os, sys, time
if os.environ["RANK"] == "0":
    time.sleep(60)
parser = argparse.ArgumentParser("train.py")
parser.add_argument("--data", required=True)
parser.parse_args()
"""
ARGPARSE = "train.py: error: the following arguments are required: --data"
# Of torch 2.13, where a host has no more memory
ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 40000000000000 bytes. Error code 12 (Cannot allocate memory)"
)


def _lines(text: str) -> list[str]:
    """The lines of distboot, without who prints them."""
    return re.findall(rf"^distboot: (?:rank|node) 0 on {HOST}: (.*)$", text, re.MULTILINE)


@IN_BOTH_WAYS
def test_error_of_argparse_is_in_the_headline(run: Run, command: tuple[str, ...]) -> None:
    done = run(*command, train=PARSER)
    headline, summary = _lines(done.stderr)
    assert headline == (
        f"rank 1 failed first: exit code 2, last line on stderr: {ARGPARSE}, on {HOST}"
    )
    assert summary.endswith("; exit codes: 2 (job), 143 (rank 0), 2 (rank 1)")
    assert done.returncode == 2


@pytest.mark.all
@pytest.mark.parametrize(
    "command",
    [BY_WRAPPER, pytest.param(BY_MPIRUN, marks=needs_mpirun)],
    ids=["--nproc-per-node", "mpirun"],
)
def test_cause_of_torchs_allocator_is_in_the_headline(run: Run, command: tuple[str, ...]) -> None:
    pytest.importorskip("torch")
    script = """
import os, time
if os.environ["RANK"] == "0":
    time.sleep(60)
import torch
def allocate():
    torch.empty(10**13)
allocate()
"""
    headline = _lines(run(*command, train=script).stderr)[0]
    assert headline.startswith(
        "rank 1 failed first: RuntimeError: DefaultCPUAllocator: can't allocate memory: "
    )
    assert headline.endswith(f"(Cannot allocate memory), on {HOST}, in allocate (train.py:7)")
    assert len(headline) <= LONGEST_HEADLINE


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("print('why', file=sys.stderr); os._exit(3)", "exit code 3"),
        ("sys.exit(3)", "exit code 3"),
        ("sys.stderr.close(); sys.exit(3)", "exit code 3"),
        ("sys.stderr = None; sys.exit(3)", "exit code 3"),
        (
            "sys.stderr.write('1%\\r50%\\r'); sys.exit(3)",
            "exit code 3, last line on stderr: 50%",
        ),
        (
            "print('a', 'b\\n\\n', file=sys.stderr); sys.exit(3)",
            "exit code 3, last line on stderr: a b",
        ),
        (
            "print('the \\x1b[31msecret', file=sys.stderr); sys.exit(3)",
            r"exit code 3, last line on stderr: the \x1b[31m***",
        ),
    ],
)
def test_exit_code_comes_with_last_stderr_line(run: Run, script: str, said: str) -> None:
    done = run(
        *BY_WRAPPER,
        train=(
            f"import os, sys\nif os.environ['RANK'] == '1': {script}\nimport time; time.sleep(60)"
        ),
        env={"DISTBOOT_SECRET": "secret"},
    )
    assert done.returncode == 3
    assert _lines(done.stderr)[0] == f"rank 1 failed first: {said}, on {HOST}"


def test_a_megabyte_without_a_newline_is_cut(run: Run) -> None:
    script = "import sys\nsys.stderr.write('x' * 1000000 + 'end'); sys.exit(3)"
    headlines = re.findall("rank . failed first: .*", run(*BY_WRAPPER, train=script).stderr)
    assert headlines
    for line in headlines:
        assert re.match(
            "rank . failed first: exit code 3, last line on stderr: x+…x+end, on ", line
        )
        assert len(line) <= LONGEST_HEADLINE


def test_message_that_is_too_long_keeps_its_end() -> None:
    exception = UncaughtException(type="RuntimeError", message=ALLOCATOR, place="load (data.py:41)")
    end = ExitStatus(code=1, exception=exception)
    assert from_exit(RankState(1, "node-1", 0, 1), end, 0.0).headline == (
        "rank 1 failed first: RuntimeError: DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate…2 (Cannot allocate memory), on node-1, in load (data.py:41)"
    )


def test_cut_lines_end_with_an_ellipsis() -> None:
    cut = "x" * 199 + "…"
    assert shown("x" * 200 + "\n" + "x" * 201) == f"\n  | {'x' * 200}\n  | {cut}"
    assert ExitStatus(cause="x" * 201).describe() == cut
    assert last_line("first\n" + "x" * 301) == "x" * 299 + "…"


def test_long_headline_keeps_why_the_block_failed() -> None:
    message = (
        "error[rank-failed]: rank 12 on node-1: local_main_first() on node 1: the block failed on "
        "rank 8 (node 1): OSError: [Errno 28] No space left on device: '/data/set-1.tar'"
    )
    exception = UncaughtException(
        is_secondary=True,
        type="distboot.DistbootError",
        message=message,
        place="load (data.py:41)",
    )
    end = ExitStatus(code=1, exception=exception)
    assert from_exit(RankState(12, "node-1", 1, 4), end, 0.0).headline == (
        "rank 12 failed first: block failed on rank 8 (node 1): OSError: [Errno 28] "
        "No space left on device: '/data/set-1.tar', on node-1, in load (data.py:41)"
    )


INIT = "import distboot\ndistboot.init()"


def test_variables_that_a_person_has_set_are_named(run: Run) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2"}
    text = run(sys.executable, "train.py", train=INIT, env=env).stderr
    assert (
        f"error[no-master-addr]: rank 0 on {HOST}: WORLD_SIZE=2, "
        "but no variable names the host of rank 0\n"
    ) in text


def test_unknown_rank_is_in_no_line(run: Run) -> None:
    env = {"RANK": "two", "WORLD_SIZE": "x"}
    *_, first, second, third, hint = run(
        sys.executable, "train.py", train=INIT, env=env
    ).stderr.splitlines()
    assert first.endswith(f"error[broken-environment]: on {HOST}: launcher 'torch': 2 problems:")
    assert second.startswith("distboot:   RANK='two' is not ")
    assert third.startswith("distboot:   WORLD_SIZE='x' is not ")
    assert hint.startswith(("hint: set RANK ", "distboot: hint: set RANK "))


@pytest.mark.parametrize(
    "end",
    ["sys.exit(3)", "os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 15)", "raise ValueError"],
)
def test_summary_has_the_exit_code_of_the_job(run: Run, end: str) -> None:
    script = f"import os, sys, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep(60)"
    done = run(*BY_WRAPPER, train=script)
    assert f"; exit codes: {done.returncode} (job), " in _lines(done.stderr)[-1]


LOOPBACK = "MASTER_ADDR is 127.0.0.1, which works on one machine only"


@pytest.mark.parametrize(
    ("options", "env", "texts"),
    [
        (
            [],
            {"RANK": "0", "WORLD_SIZE": "3"},
            (
                f"rank 0 on {HOST}: 1 of 3 ranks joined within 1 s; missing: ranks 1-2; {LOOPBACK}",
                (
                    f"set MASTER_ADDR to the host of rank 0, which is {HOST}; "
                    "or look at the output of the missing ranks: "
                    "they ended early, never started, or cannot reach rank 0; or WORLD_SIZE=3 is too large"
                ),
            ),
        ),
        (
            ["--nproc-per-node", "2"],
            {"NODE_RANK": "0", "NUM_NODES": "2"},
            (
                f"node 0 on {HOST}: 1 of 2 nodes joined within 1 s; missing: node 1; {LOOPBACK}",
                (
                    f"set MASTER_ADDR to the host of node 0, which is {HOST}; "
                    "or look at the output of the missing nodes: "
                    "they ended early, never started, or cannot reach node 0; or NUM_NODES=2 is too large"
                ),
            ),
        ),
        (
            ["--nproc-per-node", "2"],
            {"NODE_RANK": "1", "NUM_NODES": "2"},
            (
                (
                    f"node 1 on {HOST}: node 0 did not answer at 127.0.0.1:PORT (from MASTER_ADDR) within 1 s: "
                    "Connection refused"
                ),
                (
                    "look at the output of node 0: it ended early, never started, is on a different host, or behind a "
                    "firewall; 127.0.0.1 is this host: if node 0 is on a different one, set MASTER_ADDR to its name"
                ),
            ),
        ),
    ],
    ids=["rank 0", "node 0", "node 1"],
)
def test_missing_ranks_and_nodes_are_named_correctly(
    distboot: Run, port: int, options: list[str], env: dict[str, str], texts: tuple[str, str]
) -> None:
    said, hint = texts
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DISTBOOT_JOIN_TIMEOUT": "1"}
    done = distboot(*options, "train.py", train="", env={**where, **env})
    who = said.partition(": ")[0]
    assert f"error[missing-rank]: {said.replace('PORT', str(port))}\n" in done.stderr
    assert f"hint: {who}: {hint}\n" in done.stderr


@pytest.mark.all
def test_healthy_job_says_nothing_while_its_framework_starts(run: Run) -> None:
    script = """
import distboot, os, sys, time
if os.environ["RANK"] == "0":
    class Slow:
        def find_spec(self, name, *_):
            if name == "torch":
                sys.meta_path.remove(self)
                time.sleep(3)
    sys.meta_path.insert(0, Slow())
distboot.init(backend="gloo")
"""
    pytest.importorskip("torch")
    done = run(*BY_WRAPPER, train=script)
    (summary,) = _lines(done.stderr)
    assert re.fullmatch(
        r"summary: 2 ranks on 1 node, \d+\.\d s: all ended well; exit codes: 0 \(ranks 0-1\)",
        summary,
    )
    assert float(summary.split(" s: ")[0].split()[-1]) > 3  # the import was slow


def test_lines_of_all_rounds_begin_alike(run: Run) -> None:
    script = """
import os
if os.environ["DISTBOOT_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    raise ValueError("x")
"""
    done = run(*WRAPPER, "--nproc-per-node", "2", "--max-restarts", "1", "train.py", train=script)
    assert done.returncode == 0
    own = [line for line in done.stderr.splitlines() if line.startswith("distboot: ")]
    assert len(own) >= 3
    assert all(line.startswith(f"distboot: node 0 on {HOST}: ") for line in own)
    assert "restart 1 of 1: " in done.stderr
