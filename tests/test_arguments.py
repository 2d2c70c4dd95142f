"""`--local_rank` in a command line: put in, taken out, or warned of."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import Run

from distboot.arguments import with_local_rank, without_local_rank, wrong_local_rank


@pytest.mark.parametrize(
    ("arguments", "without"),
    [
        (["--lr", "1"], ["--lr", "1"]),
        (["--local_rank=3", "--lr", "1"], ["--lr", "1"]),
        (["--local-rank=3", "data"], ["data"]),
        (["--local_rank", "3", "data"], ["data"]),
        (["data", "--local-rank", "-1"], ["data"]),
        (["--local_rank", "--lr", "1"], ["--lr", "1"]),
        (["data", "--local_rank"], ["data"]),
        (["--local_rank=0", "--local-rank", "1", "data"], ["data"]),
        (["data", "--", "--local_rank=3"], ["data", "--", "--local_rank=3"]),
        (["--local_rank_file=x", "--my-local-rank=2"], ["--local_rank_file=x", "--my-local-rank=2"]),
        ([], []),
    ],
)
def test_local_rank_is_put_in_once_or_taken_out(arguments: list[str], without: list[str]) -> None:
    assert without_local_rank(arguments) == without
    assert with_local_rank(arguments, 2) == ["--local_rank=2", *without]
    assert with_local_rank(with_local_rank(arguments, 1), 2, "--local-rank") == ["--local-rank=2", *without]


def test_other_name_for_it() -> None:
    arguments = ["--gpu", "1", "--local_rank=1", "data"]
    assert with_local_rank(arguments, 0, "--gpu") == ["--gpu=0", "data"]


@pytest.mark.parametrize("arguments", [["--local_rank=1"], ["--local-rank", "-1"], ["--", "--local_rank=0"], ["0"]])
def test_right_one_is_not_warned_of(arguments: list[str]) -> None:
    assert wrong_local_rank(arguments, 1) is None


def test_wrong_one_is_named() -> None:
    assert "say --local_rank=0, and the local rank is 1" in str(wrong_local_rank(["--local-rank", "0"], 1))


_INIT = """
import json, sys
import distboot
framework, first, again = (sys.argv.pop(1) for _ in range(3))
try:
    distboot.init(framework, join_timeout=60, pass_local_rank=json.loads(first))
    distboot.init(framework, pass_local_rank=json.loads(again))
except distboot.DistbootError:
    pass
print(json.dumps(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("framework", "first", "again", "expected"),
    [
        ("none", "null", "null", ["--local_rank=7", "data"]),
        ("none", "false", "null", ["data"]),
        ("none", "true", "true", ["--local_rank=0", "data"]),
        ("none", "null", "true", ["--local_rank=0", "data"]),
        ("bogus", "true", "true", ["--local_rank=7", "data"]),
    ],
)
def test_init_adjusts_what_the_script_will_parse(
    run: Run, framework: str, first: str, again: str, expected: list[str]
) -> None:
    result = run(sys.executable, "-c", _INIT, framework, first, again, "--local_rank=7", "data")
    assert json.loads(result.stdout) == expected
    said = "distboot: warning: the arguments say --local_rank=7, and the local rank is 0"
    assert result.stderr.count(said) == (1 if first == "null" else 0)


def test_each_rank_has_its_own(clean_env: dict[str, str], port: int) -> None:
    job = {**clean_env, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", _INIT, "none", "true", "null", "--local_rank", "0", "data"]
    started = [
        subprocess.Popen(command, env={**job, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [json.loads(process.communicate(timeout=120)[0]) for process in started]
    assert said == [[f"--local_rank={rank}", "data"] for rank in range(2)]
