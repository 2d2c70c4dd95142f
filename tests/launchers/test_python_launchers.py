"""Launchers written in Python: DeepSpeed's, accelerate and PyTorch Lightning's own, as they really start processes."""

import shutil
import sys
from pathlib import Path

import pytest
from conftest import Run
from hosts import Hosts
from launched import BIN, json_lines, needs, needs_deepspeed, needs_hosts, places_of

pytestmark = pytest.mark.all


_SEEN = """
import json, os, sys
import distboot
p = distboot.detect()
with distboot.init(join_timeout=60) as ctx:
    import torch
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    line = {"detected": p.launcher, "RANK": ctx.rank, "local": ctx.local_rank, "total": total.item(),
            "LOCAL_RANK": os.environ["LOCAL_RANK"], "argv": sys.argv[1:]}
os.write(1, (json.dumps(line) + "\\n").encode())
"""


@pytest.fixture
def seen(tmp_path: Path) -> str:
    path = tmp_path / "seen.py"
    path.write_text(_SEEN)
    return str(path)


_DEEPSPEED = [str(BIN / "deepspeed"), "--hostfile", "/nonexistent", "--num_gpus", "2"]
_PLAIN = "--num_machines 1 --num_processes 2 --mixed_precision no --dynamo_backend no"
_ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", *_PLAIN.split()]


@pytest.mark.parametrize(
    ("launch", "launcher"),
    [
        pytest.param([*_DEEPSPEED, "--master_port"], "deepspeed", marks=needs_deepspeed),
        pytest.param(
            [*_ACCELERATE, "--multi_gpu", "--main_process_port"],
            "torchrun",
            marks=needs("accelerate"),
        ),
        pytest.param(
            [*_ACCELERATE, "--cpu", "--main_process_port"], "single", marks=needs("accelerate")
        ),
    ],
    ids=["deepspeed", "accelerate", "accelerate-cpu"],
)
def test_launcher_on_one_node(
    run: Run, seen: str, port: int, launch: list[str], launcher: str
) -> None:
    ranks = 1 if launcher == "single" else 2
    lines = json_lines(
        run(*launch, str(port), seen, env={"DS_ACCELERATOR": "cpu", "PATH": f"{BIN}:/usr/bin:/bin"})
    )
    found = [(line["detected"], line["RANK"], line["local"], line["total"]) for line in lines]
    assert found == [(launcher, rank, rank, ranks) for rank in range(ranks)]
    if launcher == "deepspeed":
        assert [line["argv"] for line in lines] == [["--local_rank=0"], ["--local_rank=1"]]


@needs_deepspeed
@needs_hosts
@pytest.mark.skipif(shutil.which("pdsh") is None, reason="no pdsh (see tests/cluster/packages.txt)")
def test_deepspeed_over_pdsh_on_uneven_nodes(hosts: Hosts) -> None:
    hostfile = hosts.shared / "hostfile"
    hostfile.write_text("nodea slots=1\nnodeb slots=2\n")
    launch = [str(BIN / "deepspeed"), "--hostfile", str(hostfile), str(hosts.shared / "who.py")]
    env = {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    lines = json_lines(hosts.run("nodea", launch, env, 180))
    # DeepSpeed's own LOCAL_RANK is RANK % LOCAL_SIZE, here 0 and 1, 0: it stays, and is the index of the device.
    assert [place[:3] for place in places_of(lines)] == [
        ("nodea", 0, 0),
        ("nodeb", 1, 1),
        ("nodeb", 1, 0),
    ]
    assert {(line["launcher"], line["total"]) for line in lines} == {("deepspeed", 6.0)}


@needs("lightning")
def test_lightnings_own_launcher_is_recognized_and_refused(run: Run) -> None:
    script = """
import json, os
import distboot
first = distboot.detect()
try:
    refused = "" if first.launcher == "single" else distboot.init()
except distboot.DistbootError as error:
    refused = error.code
import lightning
fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
after = distboot.detect()
line = {"RANK": fabric.global_rank, "refused": refused, "first": [first.launcher, first.rank],
        "after": [after.launcher, after.rank, after.world_size, after.local_rank]}
os.write(1, (json.dumps(line) + "\\n").encode())
"""
    lines = json_lines(run(sys.executable, "train.py", train=script))
    # The first process is alone until Lightning starts the other one, which runs the script from its beginning.
    assert [line["first"] for line in lines] == [["single", 0], ["lightning", 1]]
    assert [line["refused"] for line in lines] == ["", "unsupported-launcher"]
    assert [line["after"] for line in lines] == [["lightning", rank, 2, rank] for rank in range(2)]
