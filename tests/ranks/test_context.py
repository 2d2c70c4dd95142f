"""What a script holds after `init`, with two real ranks started by hand: order, failures, and who may be a rank."""

import os
import socket
import sys
from pathlib import Path

import pytest
from conftest import Run
from launched import needs_torch
from ranks import BEGIN, Ranks

import distboot

pytestmark = needs_torch


def test_timeout_bounds_a_collective(ranks: Ranks) -> None:
    script = """
ctx = distboot.init(join_timeout=60, timeout=2)
if ctx.is_main:
    try:
        ctx.barrier()
    except RuntimeError as error:
        print("timed out", flush=True)
    touch("over")
else:
    until("over")  # never enters the barrier
os._exit(0)
"""
    assert ranks(script) == [("timed out\n", 0), ("", 0)]


def test_failure_of_one_rank_fails_all(ranks: Ranks) -> None:
    script = """
from distboot.frameworks import _process_group as framework
def too_few(*_, **__):
    raise distboot.DistbootError("too-few-accelerators", "none here")
def broken(*_, **__):
    raise RuntimeError("CUDA error: device busy")
before = dict(os.environ)
for fails in (too_few, broken):
    if os.environ["RANK"] == "1":
        framework.set_device = fails  # no accelerator can be had here
    try:
        distboot.init(join_timeout=60)
    except distboot.DistbootError as error:
        print(str(error).splitlines()[0], dict(os.environ) == before)
"""
    host = os.uname().nodename
    said = (
        ("error[too-few-accelerators]", "none here"),
        ("error[device-failed]", "CUDA error: device busy"),
    )
    told, own = (
        "".join(f"{code}: rank {rank} on {host}: {whose}{text} True\n" for code, text in said)
        for rank, whose in enumerate((f"rank 1 on '{host}': ", ""))
    )
    assert ranks(script) == [(told, 0), (own, 0)]


@pytest.mark.all
def test_group_that_cannot_be_started_is_an_error(ranks: Ranks) -> None:
    script = """
import torch
import distboot.host.network
distboot.host.network.refuse_unknown = lambda environ: None
os.environ["GLOO_SOCKET_IFNAME"] = "nope0"
try:
    distboot.init(join_timeout=15)
except distboot.DistbootError as error:
    print(error.code, torch.distributed.is_initialized())
"""
    # The one that comes later finds that the other has gone.
    expected = {"process-group-failed False", "join-timeout False"}
    assert all(expected & set(output.splitlines()) for output, _ in ranks(script))


@pytest.mark.all
def test_end_without_close(ranks: Ranks) -> None:
    # With DistributedDataParallel on Gloo, torch 2.13 aborts about every fourth such script; three in a row here.
    script = """
ctx = distboot.init(join_timeout=60)
import torch
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
for _ in range(10):
    model(torch.ones(2, 64)).sum().backward()
"""
    for _ in range(3):
        assert ranks(script) == [("", 0), ("", 0)]


def test_child_may_take_the_place_of_closed_rank(
    ranks: Ranks,
) -> None:
    join_again = """
try:
    distboot.init("none", join_timeout=60)
    print("joined")
except distboot.DistbootError as error:
    print(error.code, flush=True)
"""
    script = f"""
ctx = distboot.init("none", join_timeout=60)
again = {join_again!r}
def start():
    done = subprocess.run([sys.executable, "-c", "import distboot" + again], capture_output=True, text=True)
    print(done.stdout, end="", flush=True)
start()
if os.fork() == 0:
    exec(again)
    os._exit(0)
os.wait()
ctx.barrier()
ctx.close()
start()
"""
    assert [output.splitlines() for output, _ in ranks(script)] == [
        ["already-joined"] * 2 + ["joined"]
    ] * 2


@pytest.mark.parametrize("framework", ["none", pytest.param("torch", marks=pytest.mark.all)])
def test_second_process_of_a_rank_is_refused(ranks: Ranks, framework: str) -> None:
    # Children of the command, as after half of a move away from `mp.spawn`, or below a shell
    child = f"""
import sys, distboot
try:
    ctx = distboot.init({framework!r}, join_timeout=60)
    print("joined", flush=True)
    sys.stdin.readline()
    ctx.barrier()
    ctx.close()
    print("closed", flush=True)
    sys.stdin.readline()
except distboot.DistbootError as error:
    print(error.code, error.message, flush=True)
"""
    script = f"""
def start():
    return subprocess.Popen(
        [sys.executable, "-c", {child!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
def end(process):
    process.stdin.write("\\n")
    process.stdin.flush()
    return process.stdout.readline()
first = start()
say(first.stdout.readline().strip())
second = start()
refused = second.stdout.readline().strip()
say(refused.replace(str(first.pid), "FIRST"))
say(end(first).strip())
third = start()  # which may take the place of the first, as that has closed its context
say(third.stdout.readline().strip())
say(end(third).strip())
"""
    refused = "already-joined this rank has joined already, as process FIRST"
    expected = ["joined", refused, "closed", "joined", "closed"]
    ended = ranks(script, 2, "-m", "distboot")
    assert [(output.splitlines()[:5], code) for output, code in ended] == [(expected, 0)] * 2


def test_processes_of_a_world_of_one_all_start(distboot: Run, tmp_path: Path) -> None:
    # As without an agent, which this option asks for
    child = """
import sys, distboot
with distboot.init("none") as ctx:
    print(ctx.world_size, flush=True)
    sys.stdin.readline()
"""
    script = f"""
import subprocess, sys
command = [sys.executable, "-c", {child!r}]
pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
children = [subprocess.Popen(command, **pipes) for _ in range(2)]
print([child.stdout.readline() for child in children])
for child in children:
    child.communicate("")
"""
    report = str(tmp_path / "report.json")
    result = distboot("--report", report, "--", sys.executable, "-c", script)
    assert (result.stdout, result.returncode) == ("['1\\n', '1\\n']\n", 0)


@pytest.mark.ranks(2)
def test_barrier_in_a_fork_is_refused() -> None:
    with distboot.init("none", join_timeout=60) as ctx:
        child = os.fork()
        if child == 0:
            try:
                ctx.barrier()
            except distboot.DistbootError as error:
                os._exit(error.code == "already-joined")
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        ctx.barrier()


@pytest.mark.ranks(2)
def test_init_close_init() -> None:
    dist = pytest.importorskip("torch.distributed")
    for _ in range(3):
        with distboot.init(join_timeout=60) as ctx:
            ctx.barrier()
    open_files = []
    for _ in range(2):  # a group that the script ends leaves no port to the next one
        ctx = distboot.init(join_timeout=60)
        open_files.append(len(os.listdir("/proc/self/fd")))
        ctx.barrier()
        dist.destroy_process_group()
    assert open_files[0] == open_files[1]


@pytest.mark.all
def test_objects_from_before_init_are_still_collected(ranks: Ranks) -> None:
    script = """
import gc, weakref
class Model:
    pass
model = Model()
model.own = model
known = weakref.ref(model)
with distboot.init("torch", join_timeout=60):
    del model
    gc.collect()
    print(known())
"""
    assert ranks(script) == [("None\n", 0), ("None\n", 0)]


@pytest.mark.all
def test_group_that_the_script_itself_destroys(run: Run) -> None:
    script = """
import torch.distributed as dist
ctx = distboot.init()
dist.destroy_process_group()
ctx.close()
with distboot.init() as again:
    print(again is ctx, again.closed, ctx.closed)
old = distboot.init()
dist.destroy_process_group()
new = distboot.init()
old.close()
print(old.closed, new.closed, dist.is_initialized())
new.close()
"""
    result = run(sys.executable, "-c", BEGIN + script)
    assert (result.stdout, result.stderr) == ("False False True\nTrue False True\n", "")


def test_threads_share_one_context(run: Run) -> None:
    script = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    contexts = {id(ctx) for ctx in pool.map(lambda _: distboot.init("none"), range(8))}
print(len(contexts))
"""
    result = run(sys.executable, "-c", BEGIN + script)
    assert (result.stdout, result.stderr) == ("1\n", "")


@pytest.mark.all
def test_single_processes_with_one_placement_do_not_collide(run: Run) -> None:
    script = """
ctx = distboot.init()
child = "import distboot; print(distboot.init().launcher)"
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True))
"""
    result = run(
        sys.executable, "-m", "distboot", "run", "--", sys.executable, "-c", BEGIN + script
    )
    assert "stdout='single\\n', stderr=''" in result.stdout


@pytest.mark.all
def test_silent_peer_at_the_port_of_torchs_store(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = str(stranger.getsockname()[1])
        env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env |= {
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "NODE_RANK": "0",
            "DISTBOOT_RENDEZVOUS": "0",
        }
        script = (
            "try: distboot.init(join_timeout=1)\nexcept distboot.DistbootError "
            "as error: print(error.code)"
        )
        result = run(sys.executable, "-c", BEGIN + script, env=env, timeout=60)
    assert result.stdout == "join-timeout\n"


_SPAWNING = """
import multiprocessing, os, sys
import distboot
N = "2"
def train(rank):
    {first}
    try:
        with distboot.init("none", join_timeout=60) as ctx:
            os.write(1, f"{{ctx.rank}} {{ctx.world_size}}\\n".encode())
    except distboot.DistbootError as error:
        os.write(1, f"{{error.code}}\\n".encode())
if __name__ == "__main__":
    if sys.argv[1] == "torch":
        import torch.multiprocessing as mp
        mp.spawn(train, nprocs=2)
    else:
        context = multiprocessing.get_context(sys.argv[1])
        children = [context.Process(target=train, args=(rank,)) for rank in range(2)]
        [child.start() for child in children]
        [child.join() for child in children]
"""
_NUMBERS = (
    "os.environ.update(RANK=str(rank), WORLD_SIZE=N, MASTER_ADDR='127.0.0.1', "
    "MASTER_PORT=os.environ['PORT'])"
)
_STARTS = [(), ("-m", "distboot")]


# What a worker of Ray Train finds in its process: test_inside_platforms.py has the real one.
_IN_RAY = """
import sys, types
def get_context():
    if size == "tune":  # ray 2.60, in a function of Ray Tune
        raise DeprecationWarning("`ray.train.get_context` is deprecated")
    if size == "old":  # the same with RAY_TRAIN_V2_ENABLED=0
        return types.SimpleNamespace(get_world_size=lambda: None)
    if size is None:
        raise RuntimeError("`get_context` cannot be used outside of a Ray Train training function.")
    return types.SimpleNamespace(get_world_size=lambda: size)
size = {size}
sys.modules["ray.train"] = types.SimpleNamespace(get_context=get_context)
import distboot
try:
    print(distboot.init("none").world_size)
except distboot.DistbootError as error:
    print(error.code)
"""


@pytest.mark.parametrize(
    ("size", "env", "printed"),
    [
        (2, {}, "not-alone"),
        (2, {"DISTBOOT_LAUNCHER": "none"}, "1"),
        (1, {}, "1"),
        (None, {}, "1"),
        ("'tune'", {}, "1"),
        ("'old'", {}, "1"),
    ],
    ids=str,
)
def test_worker_of_ray_is_no_world(
    run: Run, size: int | None, env: dict[str, str], printed: str
) -> None:
    result = run(sys.executable, "train.py", train=_IN_RAY.format(size=size), env=env)
    assert (result.returncode, result.stdout) == (0, f"{printed}\n"), result.stderr


@pytest.mark.parametrize(
    ("method", "before"),
    [
        ("fork", _STARTS[0]),
        ("forkserver", _STARTS[0]),
        *(("spawn", start) for start in _STARTS),
        # Processes of multiprocessing as well, and nine times an import of torch
        pytest.param("torch", _STARTS[0], marks=pytest.mark.all),
    ],
)
def test_spawned_process_is_no_world(
    run: Run, port: int, method: str, before: tuple[str, ...]
) -> None:
    def printed(first: str = "pass", **env: str) -> list[str]:
        script = _SPAWNING.format(first=first)
        result = run(
            sys.executable,
            *before,
            "train.py",
            method,
            train=script,
            env={"PORT": str(port), **env},
        )
        assert result.returncode == 0, result.stderr
        return sorted(result.stdout.splitlines())

    assert printed() == ["spawned-process"] * 2
    assert printed(_NUMBERS) == ["0 2", "1 2"]
    assert printed(DISTBOOT_LAUNCHER="none") == ["0 1"] * 2


_EACH_WITH_ITS_RANK = """
import multiprocessing, distboot
def train():
    try:
        distboot.init("none", join_timeout={})
    except distboot.DistbootError as error:
        print(error.code, error.hint, flush=True)
for _ in range({}):
    multiprocessing.get_context("fork").Process(target=train).start()
"""


@pytest.mark.parametrize(
    ("processes", "code", "limit"), [(2, "duplicate-rank", "20"), (1, "missing-rank", "1")]
)
def test_workers_with_one_rank_get_a_hint(
    run: Run, port: int, processes: int, code: str, limit: str
) -> None:
    script = _EACH_WITH_ITS_RANK.format(limit, processes)
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    lines = run(sys.executable, "-c", script, env=env).stdout.splitlines()
    assert len(lines) == processes
    for line in lines:
        assert line.startswith(
            f"{code} multiprocessing started this process: if the launcher gave its rank to the "
            "process above it, call init() there; or "
        )


@pytest.mark.parametrize(
    ("launcher", "env"), [("'none'", {}), ("None", {"RANK": "0", "WORLD_SIZE": "1"})]
)
def test_process_of_multiprocessing_may_be_declared_alone(
    run: Run, launcher: str, env: dict[str, str]
) -> None:
    script = f"""
import multiprocessing, distboot
def train():
    print(distboot.init("none", launcher={launcher}).rank, flush=True)
multiprocessing.get_context("fork").Process(target=train).start()
"""
    assert run(sys.executable, "-c", script, env=env).stdout == "0\n"
