"""Platforms that call a function in processes of their own: the pages' pieces are run with the real package.

The variables that these processes have are in the captures of ray and torchdistributor, for every run of the tests.
"""

import re
import shutil
import sys

import pytest
from conftest import Run
from launched import all_with, needs_torch
from pages import blocks

_RAY = "docs/how-to/ray-train.md"
_DATABRICKS = "docs/how-to/databricks.md"
_LIMIT = 600  # seconds: Ray and a Java machine start, two minutes on a busy machine
_HERE = {"RAY_USAGE_STATS_ENABLED": "0", "CUDA_VISIBLE_DEVICES": ""}
_ENDS_EACH_JOB = "failed first"
needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="no Java, which Spark needs")


def _piece(page: str) -> str:
    (block,) = [each for each in blocks("python") if each.page == page]
    return block.text


def _ranks(output: str) -> set[str]:
    return set(re.findall(r"rank \d of \d on node \d", output))


@all_with("ray")
@needs_torch
def test_workers_of_ray_are_one_job(run: Run) -> None:
    done = run(sys.executable, "train.py", train=_piece(_RAY), env=_HERE, timeout=_LIMIT)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert _ranks(output) == {"rank 0 of 2 on node 0", "rank 1 of 2 on node 0"}
    assert _ENDS_EACH_JOB not in output


@all_with("ray")
@needs_torch
@pytest.mark.parametrize(
    ("old", "new", "refusal"),
    [
        ('init("none")', "init()", "error[already-initialized]"),
        (
            "from ray.train.torch import TorchTrainer",
            "from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer as TorchTrainer",
            "error[not-alone]",
        ),
    ],
    ids=["torch", "without_rank"],
)
def test_ray_fails_as_the_page_says(run: Run, old: str, new: str, refusal: str) -> None:
    piece = _piece(_RAY)
    assert old in piece
    script = piece.replace(old, new)
    done = run(sys.executable, "train.py", train=script, env=_HERE, timeout=_LIMIT)
    assert done.returncode != 0
    assert refusal in done.stdout + done.stderr


@all_with("pyspark")
@needs_torch
@needs_java
@pytest.mark.parametrize(
    ("local_mode", "nodes"), [(True, (0, 0)), (False, (0, 1))], ids=["driver", "tasks"]
)
def test_ranks_of_spark_are_one_job(run: Run, local_mode: bool, nodes: tuple[int, ...]) -> None:
    script = _piece(_DATABRICKS)
    assert "local_mode=True" in script
    script = script.replace("local_mode=True", f"local_mode={local_mode}")
    script = script.replace("builder.getOrCreate()", 'builder.master("local[2]").getOrCreate()')
    env = {**_HERE, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    script += "print(f'returned {ranks}')\nspark.stop()\n"
    done = run(sys.executable, "train.py", train=script, env=env, timeout=_LIMIT)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "returned 2" in output
    expected = {f"rank {rank} of 2 on node {node}" for rank, node in enumerate(nodes)}
    assert _ranks(output) == expected
