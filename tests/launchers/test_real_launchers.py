"""Real launchers on this machine: what they start is placed right, by `show`, by `init` and through the wrapper."""

import re
import sys
from pathlib import Path

import pytest
from conftest import Run
from launched import FILES, MPIRUN, json_lines, needs_mpirun, needs_torch

pytestmark = needs_torch

PYTHON = sys.executable
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCH = [PYTHON, "-m", "torch.distributed.launch", "--nproc-per-node", "2"]
MPIRUN_1, MPIRUN_2, MPIRUN_4 = (
    [str(MPIRUN), "--map-by", ":OVERSUBSCRIBE", "-n", count] for count in ("1", "2", "4")
)


@pytest.fixture
def who(tmp_path: Path) -> str:
    for name in ("who.py", "where.py"):
        (tmp_path / name).write_text(FILES[name])
    return str(tmp_path / "where.py")


def _numbers(size: int) -> list[tuple[int, int, int, int, int]]:
    return [(rank, rank, 0, size, size) for rank in range(size)]


def _seen(lines: list[dict[str, object]]) -> list[tuple[object, ...]]:
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return [tuple(line[name] for name in names) for line in lines]


@pytest.mark.parametrize(
    ("command", "launcher", "script"),
    [
        pytest.param(TORCHRUN, "torchrun", "who.py", id="torchrun"),
        pytest.param(
            [*LAUNCH, "--use-env"],
            "torchrun",
            "where.py",
            id="launch-use-env",
            marks=pytest.mark.all,
        ),
        pytest.param(
            [*MPIRUN_2, PYTHON],
            "openmpi",
            "who.py",
            id="mpirun",
            marks=[needs_mpirun, pytest.mark.all],
        ),
        pytest.param(
            [*MPIRUN_4, PYTHON],
            "openmpi",
            "where.py",
            id="mpirun-oversubscribed",
            marks=needs_mpirun,
        ),
    ],
)
@pytest.mark.usefixtures("who")
def test_init_under_a_launcher(run: Run, command: list[str], launcher: str, script: str) -> None:
    size = 4 if "4" in command else 2
    lines = json_lines(run(*command, script))
    # The local rank is the launcher's own: 0, 2, 1, 3 with four processes of Open MPI 5 on two slots.
    assert [(rank, *rest) for rank, _, *rest in _seen(lines)] == [
        (rank, *rest) for rank, _, *rest in _numbers(size)
    ]
    assert [line["local_ranks"] for line in lines] == [[line["LOCAL_RANK"]] * 2 for line in lines]
    assert {rank for _, rank, *_ in _seen(lines)} == set(range(size))
    assert {line["launcher"] for line in lines} == {launcher}
    assert {line["total"] for line in lines} == {
        size * (size + 1) / 2 if script == "who.py" else None
    }


@pytest.mark.all
def test_launch_without_use_env_keeps_its_argument(run: Run, who: str) -> None:
    lines = json_lines(run(*LAUNCH, who, "--mine"))
    assert _seen(lines) == _numbers(2)
    assert {line["launcher"] for line in lines} == {"torchrun"}
    assert [line["argv"] for line in lines] == [
        ["--local-rank=0", "--mine"],
        ["--local-rank=1", "--mine"],
    ]


WRAPPED = [PYTHON, "-m", "distboot"]


@needs_mpirun
@pytest.mark.parametrize(
    ("command", "env"),
    [
        ([*MPIRUN_2, *WRAPPED], {}),
        pytest.param(
            [*MPIRUN_1, *TORCHRUN],
            {"LOCAL_RANK": "9", "WORLD_SIZE": "16"},  # left over
            marks=pytest.mark.all,
        ),
        pytest.param([*MPIRUN_1, *TORCHRUN], {}, marks=pytest.mark.all),
        # An ENTRYPOINT that wraps whatever the job runs.
        pytest.param([*WRAPPED, "run", "--", *TORCHRUN], {}, marks=pytest.mark.all),
        ([*WRAPPED, "run", "--", *MPIRUN_2, PYTHON], {}),
    ],
    ids=["init", "torchrun-left-over", "torchrun", "wrapper-torchrun", "wrapper-mpirun"],
)
def test_one_inside_the_other(run: Run, who: str, command: list[str], env: dict[str, str]) -> None:
    lines = json_lines(run(*command, who, env=env))
    assert _seen(lines) == _numbers(2)
    assert {line["launcher"] for line in lines} == {
        "torchrun" if "--standalone" in command else "openmpi"
    }


STRIPPED = ["bash", "-c", 'exec env -i PATH="$PATH" PYTHONPATH="$PYTHONPATH" "$@"', "-"]
SHOW = "import distboot; ctx = distboot.init('none'); print(f'{ctx.rank} of {ctx.world_size}')"
ALONE = [PYTHON, "-c", SHOW]


@pytest.mark.all
@needs_mpirun
@pytest.mark.parametrize(
    ("command", "name"),
    [
        ([*MPIRUN_2, *STRIPPED, *WRAPPED, "--", *ALONE], "(prterun|mpirun)"),
        ([*TORCHRUN, "--no-python", *STRIPPED, *ALONE], "torch.distributed.run"),
    ],
    ids=["wrapper", "init"],
)
def test_stripped_variables_of_a_launcher_are_named(
    run: Run, command: list[str], name: str
) -> None:
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("0 of 1") == 2
    warning = (
        rf"distboot: warning: this process runs below {name} \(process \d+\), but its variables"
    )
    assert len(re.findall(warning, done.stderr)) == 2, done.stderr


@needs_mpirun
@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("show", r"note: this process runs below (prterun|mpirun) \(process \d+\), but its"),
        ("doctor", r"warning  launcher: this process runs below (prterun|mpirun) \(process \d+\),"),
    ],
)
def test_launcher_above_is_named_by(run: Run, command: str, line: str) -> None:
    done = run(*MPIRUN_1, *STRIPPED, *WRAPPED, command)
    assert len(re.findall(line, done.stdout)) == 1, done.stdout + done.stderr


@needs_mpirun
def test_process_meant_to_be_alone_is_not_warned(run: Run) -> None:
    done = run(*MPIRUN_1, *STRIPPED, "env", "DISTBOOT_LAUNCHER=none", *ALONE)
    assert done.returncode == 0, done.stderr
    assert "0 of 1" in done.stdout
    assert "this process runs below" not in done.stderr
