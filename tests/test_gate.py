"""Barriers and `main_first` without any framework: real ranks that wait for each other at rank 0's socket."""

from __future__ import annotations

import sys

import pytest
from conftest import Run
from gates import BEGIN, Ranks
from hosts import Hosts, missing_for_hosts
from launched import MPI_ENV, MPIRUN, json_lines, needs_mpirun

_ORDER = """
with distboot.init("none", join_timeout=60, timeout=30) as ctx:
    others = [rank for rank in range(3) if rank != ctx.rank]
    for slow in range(3):  # all wait for whoever comes last
        if ctx.rank == slow:
            until(*(f"waits-{slow}-{rank}" for rank in others))
            touch(f"came-{slow}")
        touch(f"waits-{slow}-{ctx.rank}")
        ctx.barrier()
        say(Path(f"came-{slow}").exists())
    for _ in range(100):
        ctx.barrier()
    for first in (ctx.main_first, ctx.local_main_first):
        name = first.__name__
        touch(f"{name}-{ctx.rank}")
        with first():
            if ctx.is_main:
                until(*(f"{name}-{rank}" for rank in others))
                touch(f"{name}-done")
            say(Path(f"{name}-done").exists())
    say("end")
again = distboot.init("none", join_timeout=60)
again.barrier()
assert again is not ctx
"""


@pytest.mark.parametrize("before", [(), ("-m", "distboot")], ids=["init", "wrapper"])
def test_ranks_wait_for_each_other(ranks: Ranks, before: tuple[str, ...]) -> None:
    assert ranks(_ORDER, 3, *before) == [("True\n" * 5 + "end\n", 0)] * 3


def test_strangers_do_not_take_the_place_of_a_rank(ranks: Ranks) -> None:
    script = """
port = int(os.environ["MASTER_PORT"])  # of the roll call, which is the gate's from now on
ctx = distboot.init("none", join_timeout=60)
if ctx.is_main:
    until("crowd")
else:
    crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    for stranger in crowd[::2]:
        stranger.close()
    touch("crowd")
with ctx.main_first():
    say("through")
ctx.barrier()
"""
    for output, code in ranks(script, 2):
        assert ("through" in output.splitlines(), code) == (True, 0), output


@pytest.mark.parametrize("count", [1, 2])
def test_waiting_inside_main_first_is_refused(ranks: Ranks, count: int) -> None:
    script = """
with distboot.init("none", join_timeout=60) as ctx:
    with ctx.main_first():
        attempt(ctx.barrier)
        attempt(ctx.local_main_first().__enter__)
    ctx.barrier()
"""
    for output, code in ranks(script, count):
        said = [line.partition(" inside main_first(): ")[0] for line in output.splitlines() if "usage " in line]
        assert (said, code) == (["usage barrier()", "usage local_main_first()"], 0), output


@pytest.mark.parametrize("timeout", ["-1", "0", "float('nan')", "float('inf')", "None", "'x'"])
def test_time_limit_that_is_none_costs_nothing(ranks: Ranks, timeout: str) -> None:
    script = f"""
with distboot.init("none", join_timeout=60) as ctx:
    attempt(ctx.main_first(timeout={timeout}).__enter__)
    ctx.barrier()
"""
    for output, code in ranks(script, 2):
        assert (output.startswith("usage main_first(timeout="), code) == (True, 0), output


def test_alone(run: Run) -> None:
    script = """
with distboot.init("none", timeout=0.1) as ctx:
    ctx.barrier()
    for first in (ctx.main_first, ctx.local_main_first):
        with first(timeout=0.1):
            say(ctx.rank, ctx.is_main, ctx.is_local_main)
"""
    result = run(sys.executable, "-c", BEGIN + script)
    assert (result.stdout, result.stderr) == ("0 True True\n" * 2, "")


def test_without_the_roll_call_there_is_no_gate(run: Run, port: int) -> None:
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "DISTBOOT_ROLL_CALL": "0"}
    result = run(sys.executable, "-c", BEGIN + "attempt(distboot.init('none').barrier)", env={**job, **place})
    said = "roll-call-needed barrier() needs the roll call, and it is off | unset DISTBOOT_ROLL_CALL\n"
    assert (result.stdout, result.stderr) == (said, "")


_HOSTS = """
shared = Path("gate")
with distboot.init("none", join_timeout=60) as ctx:
    seen = {"rank": ctx.rank, "hosts": ctx.hosts}
    shared.mkdir(exist_ok=True)
    ctx.barrier()
    for first, mine in ((ctx.main_first, ctx.is_main), (ctx.local_main_first, ctx.is_local_main)):
        name = f"{first.__name__}-{0 if first == ctx.main_first else ctx.node_rank}"
        touch(shared / f"{name}-{ctx.rank}")
        with first(timeout=60):
            if mine:
                count = 4 if first == ctx.main_first else 2
                while len(list(shared.glob(f"{name}-[0-9]"))) < count:
                    time.sleep(0.01)
                touch(shared / f"{name}-done")
            seen[first.__name__] = (shared / f"{name}-done").exists()
    ctx.barrier()
say(json.dumps(seen))
"""


@needs_mpirun
@pytest.mark.skipif(missing_for_hosts() is not None, reason=str(missing_for_hosts()))
def test_on_two_hosts(hosts: Hosts) -> None:
    (hosts.shared / "gate.py").write_text(BEGIN + _HOSTS)
    ours = {"MASTER_ADDR": "nodea", "DISTBOOT_SECRET": "swordfish"}
    exports = [word for name in (*ours, "PATH") for word in ("-x", name)]
    launch = [str(MPIRUN), "--bind-to", "none", "-H", "nodea:2,nodeb:2", "--map-by", "node", *exports]
    done = hosts.run("nodea", [*launch, sys.executable, "gate.py"], {**MPI_ENV, **ours}, 120)
    assert json_lines(done) == [
        {"rank": rank, "hosts": ["nodea", "nodeb"], "main_first": True, "local_main_first": True} for rank in range(4)
    ]
