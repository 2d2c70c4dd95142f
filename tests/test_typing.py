"""What a type checker says of a user's program: the package has types (py.typed), and the right ones."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytest.importorskip("mypy")

RIGHT = """\
import distboot
from distboot import Context, DistbootError, Placement, detect, init
from distboot.lightning import DistbootEnvironment

ctx = distboot.init()
reveal_type(ctx)  # distboot.context.Context
reveal_type(ctx.rank)  # int
reveal_type(ctx.local_rank)  # int
reveal_type(ctx.node_rank)  # int
reveal_type(ctx.master_addr)  # str
reveal_type(ctx.job_id)  # str | None
reveal_type(ctx.hosts)  # tuple[str, ...]
reveal_type(ctx.device)  # Any
reveal_type(ctx.task_id)  # int | None
reveal_type(ctx.is_main)  # bool
reveal_type(ctx.preempted)  # bool

with init("tensorflow", strategy="parameter_server", ps=1, timeout=60) as inner:
    reveal_type(inner)  # distboot.context.Context
    with inner.main_first(timeout=10), inner.local_main_first():
        inner.barrier()

placement = detect({"RANK": "0", "WORLD_SIZE": "1"}, launcher="torch")
reveal_type(placement)  # distboot.placement.Placement
reveal_type(placement.rank)  # int
reveal_type(placement.node_rank)  # int | None
reveal_type(placement.master_port)  # int | None
reveal_type(placement.sources)  # Mapping[str, str]
reveal_type(placement.notes)  # tuple[str, ...]
reveal_type(detect().platform)  # str | None

def place(given: Placement, context: Context) -> int:
    try:
        return given.rank + context.world_size
    except DistbootError as error:
        reveal_type(error.code)  # str
        reveal_type(error.hint)  # str
        return error.exit_code

reveal_type(DistbootEnvironment().global_rank())  # int
reveal_type(distboot.__version__)  # str
"""
WRONG = """\
import distboot
from distboot import detect, init
from distboot import nothing  # attr-defined
from distboot import Launcher  # attr-defined

init(3)  # arg-type
init("torch", "nccl")  # call-arg
init(rank=1)  # call-arg
init(timeout="long")  # arg-type
detect({"RANK": 0})  # dict-item
detect().rank = 1  # misc
detect().node_rank + 1  # operator
detect().rank_of  # attr-defined
ctx = distboot.init()
ctx.is_main = True  # misc
ctx.barrier(10)  # call-arg
with ctx.main_first("long"):  # arg-type
    pass
ctx.master_addr.port  # attr-defined
distboot.start()  # attr-defined
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, list[str]]]:
    """For each of the programs, by line: what mypy reveals, and the codes of its errors."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "right.py").write_text(RIGHT)
    (folder / "wrong.py").write_text(WRONG)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(folder / "cache")]
    done = subprocess.run(
        [*mypy, "right.py", "wrong.py"], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stderr == ""
    lines: dict[str, dict[int, list[str]]] = {"right.py": {}, "wrong.py": {}}
    for file, line, text in re.findall(r"^(\w+\.py):(\d+): (.*)$", done.stdout, re.MULTILINE):
        revealed = re.fullmatch(r'note: Revealed type is "(.*)"', text)
        error = re.fullmatch(r"error: .*\[([\w-]+)\]", text)
        if revealed or error:
            lines[file].setdefault(int(line), []).append((revealed or error)[1])  # type: ignore[index]
    return lines


def _expected(program: str) -> dict[int, list[str]]:
    comments = (line.partition("  # ")[2] for line in program.splitlines())
    return {number: [text] for number, text in enumerate(comments, 1) if text}


def test_right_uses_have_the_right_types(said: dict[str, dict[int, list[str]]]) -> None:
    spelled = re.compile(
        r"\b(?:builtins|typing)\.|tuple\[.*, fallback=(.*)\]"
    )  # a named tuple's fields are spelled out
    plain = {line: [spelled.sub(r"\1", text) for text in texts] for line, texts in said["right.py"].items()}
    assert plain == _expected(RIGHT)


def test_wrong_uses_are_errors(said: dict[str, dict[int, list[str]]]) -> None:
    assert said["wrong.py"] == _expected(WRONG)
