"""Launchers written in Python: DeepSpeed's, accelerate and PyTorch Lightning's own, as they really start processes."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import Run
from hosts import Hosts, missing_for_hosts
from launched import json_lines, places_of

BIN = Path(sys.executable).parent


def _needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed (pip install {package})")


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


@_needs("deepspeed")
def test_deepspeed_on_one_node(run: Run, seen: str, port: int) -> None:
    launch = [str(BIN / "deepspeed"), "--hostfile", "/nonexistent", "--num_gpus", "2", "--master_port", str(port), seen]
    lines = json_lines(run(*launch, env={"DS_ACCELERATOR": "cpu", "PATH": f"{BIN}:/usr/bin:/bin"}))
    assert [(line["detected"], line["RANK"], line["local"], line["total"]) for line in lines] == [
        ("deepspeed", 0, 0, 2.0),
        ("deepspeed", 1, 1, 2.0),
    ]
    assert [line["argv"] for line in lines] == [["--local_rank=0"], ["--local_rank=1"]]


@_needs("deepspeed")
@pytest.mark.skipif(missing_for_hosts() is not None, reason=str(missing_for_hosts()))
@pytest.mark.skipif(shutil.which("pdsh") is None, reason="no pdsh (see tests/cluster/packages.txt)")
def test_deepspeed_over_pdsh_on_uneven_nodes(hosts: Hosts) -> None:
    hostfile = hosts.shared / "hostfile"
    hostfile.write_text("nodea slots=1\nnodeb slots=2\n")
    launch = [str(BIN / "deepspeed"), "--hostfile", str(hostfile), str(hosts.shared / "who.py")]
    env = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    lines = json_lines(hosts.run("nodea", launch, env, 180))
    # DeepSpeed's own LOCAL_RANK is RANK % LOCAL_SIZE, here 0 and 1, 0: it stays, and is the index of the device.
    assert [(line["host"], line["NODE_RANK"], line["LOCAL_RANK"]) for line in lines] == [
        ("nodea", 0, 0),
        ("nodeb", 1, 1),
        ("nodeb", 1, 0),
    ]
    assert {(line["launcher"], line["total"]) for line in lines} == {("deepspeed", 6.0)}
    assert len(places_of(lines)) == 3


@_needs("accelerate")
def test_accelerate_launch_is_torchrun(run: Run, seen: str, port: int) -> None:
    options = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", *options, "--dynamo_backend", "no"]
    lines = json_lines(run(*launch, "--main_process_port", str(port), seen))
    assert [(line["detected"], line["RANK"], line["total"]) for line in lines] == [
        ("torchrun", 0, 2.0),
        ("torchrun", 1, 2.0),
    ]


@_needs("accelerate")
def test_accelerate_launch_on_the_cpu_starts_one_process(run: Run, seen: str) -> None:
    options = ["--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", *options, "--dynamo_backend", "no"]
    (line,) = json_lines(run(*launch, seen))
    assert (line["detected"], line["RANK"], line["total"]) == ("single", 0, 1.0)


_FABRIC = """
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


@_needs("lightning")
def test_lightnings_own_launcher_is_recognised_and_refused_by_init(run: Run, tmp_path: Path) -> None:
    (tmp_path / "fabric.py").write_text(_FABRIC)
    result = run(sys.executable, "fabric.py")
    lines = json_lines(result)
    # The first process is alone until Lightning starts the other one, which runs the script from its beginning.
    assert [line["first"] for line in lines] == [["single", 0], ["lightning", 1]]
    assert [line["refused"] for line in lines] == ["", "unsupported-launcher"]
    assert [line["after"] for line in lines] == [["lightning", rank, 2, rank] for rank in range(2)]


@_needs("lightning")
def test_lightning_under_torchrun_uses_its_processes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "fabric.py").write_text(_FABRIC.replace("distboot.init()", '""'))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "fabric.py"]
    result = run(*launch)
    lines = json_lines(result)
    assert [line["after"] for line in lines] == [["torchrun", rank, 2, rank] for rank in range(2)]
