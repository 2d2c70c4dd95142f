"""Barriers and `main_first` without any framework: real ranks that wait for each other at rank 0's socket."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Run
from hosts import Hosts, missing_for_hosts
from launched import MPI_ENV, MPIRUN, json_lines, needs_mpirun

from distboot.lifeline.ends import End

_BEGIN = """
import json, os, socket, sys, time
from pathlib import Path
import distboot
def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()
def until(*names):
    end = time.monotonic() + 60
    while not all(Path(name).exists() for name in names):
        assert time.monotonic() < end, names
        time.sleep(0.01)
def touch(name):
    Path(name).touch()
def attempt(step):
    try:
        step()
    except distboot.DistbootError as error:
        say(error.code, error.message, "|", error.hint)
"""
Ranks = Callable[..., list[tuple[str, int]]]


@pytest.fixture
def ranks(clean_env: dict[str, str], port: int, tmp_path: Path) -> Ranks:
    """Run a script as so many ranks in one folder: what each printed, errors included, and its exit code."""

    def run_them(script: str, count: int = 2, *before: str, **env: str) -> list[tuple[str, int]]:
        (tmp_path / "script.py").write_text(_BEGIN + script)
        job = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **env}
        processes = [
            subprocess.Popen(
                [sys.executable, *before, "script.py"], env={**clean_env, **job, "RANK": str(rank)}, cwd=tmp_path,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(count)
        ]  # fmt: skip
        try:
            outputs = [process.communicate(timeout=120)[0] for process in processes]
            # What rank 0 says at the end of a job.
            outputs = [re.sub(r"distboot: rank 0 on .*: summary: .*\n", "", text) for text in outputs]
            return [(output, process.returncode) for output, process in zip(outputs, processes, strict=True)]
        finally:
            for process in processes:
                process.kill()
                process.wait(10)

    return run_them


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


_DOOR = """
port = int(os.environ["MASTER_PORT"])  # what the script finds there later is another one
with distboot.init("none", join_timeout=60, timeout=1) as ctx:
    with ctx.main_first():
        if ctx.is_main:
            begin = time.monotonic()  # longer than the limit of a barrier, which is no limit here
            while time.monotonic() < begin + 1.2:
                time.sleep(0.05)
            strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
            for stranger, text in zip(strangers, ["GET / HTTP/1.0", '{"gate":["",1],"mac":""}', '{"distboot":1}']):
                stranger.sendall(len(text).to_bytes(4, "big") + text.encode())
            child = os.fork()
            if child == 0:
                touch("forked")
                until("closed")
                os._exit(0)
            touch("done")
        say(Path("done").exists())
    try:
        with ctx.main_first():
            if ctx.is_main:
                raise OSError("disk full")
    except (OSError, distboot.DistbootError) as error:
        say(error)
    with ctx.main_first():
        say("again")
ctx.close()
if ctx.is_main:
    until("forked")
    socket.create_server(("", port)).close()  # nobody holds it any more, not even the child
    touch("closed")
    os.waitpid(child, 0)
say("end")
"""


def test_block_of_rank_0_may_be_long_or_fail(ranks: Ranks) -> None:
    first, second = ranks(_DOOR, 2, DISTBOOT_SECRET="swordfish")
    refused = [line.rpartition("the peer ")[2] for line in first[0].splitlines() if "refused" in line]
    assert refused == [
        "sends no JSON; the job goes on",
        "belongs to another job; the job goes on",
        "comes when the roll call is over, and is none of the ranks that have met; the job goes on",
    ]
    said = [line for line in first[0].splitlines() if "refused" not in line]
    assert (said, first[1]) == (["True", "disk full", "again", "end"], 0)
    failed, hint = second[0].splitlines()[1:3]
    assert failed.endswith("main_first(): the block failed on rank 0: OSError: disk full")
    assert second == (f"True\n{failed}\n{hint}\nagain\nend\n", 0)


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


def test_failure_is_told_also_to_a_rank_that_connects_later_and_is_not_endless(ranks: Ranks) -> None:
    script = """
import distboot.rollcall.visitor as visitor
if os.environ["RANK"] == "1":  # its first attempt to connect fails, as where rank 0 has no room
    connect = visitor.Visitor._connect
    def late(self, limit):
        visitor.Visitor._connect = connect
        raise TimeoutError("no room")
    visitor.Visitor._connect = late
with distboot.init("none", join_timeout=60) as ctx:
    for error in (OSError("disk full" * 10_000), None):
        try:
            with ctx.main_first(timeout=30):
                if ctx.is_main and error is not None:
                    raise error
                say("inside")
        except (OSError, distboot.DistbootError) as failure:
            say(type(failure).__name__, len(str(failure)) < 1000)
    if ctx.is_main:
        touch("opened twice")
    until("opened twice")
"""
    first, second = ranks(script, 2)
    assert (first[0].splitlines()[0], first[1]) == ("OSError False", 0), first
    assert [line for line in second[0].splitlines() if "distboot:" not in line] == ["DistbootError True", "inside"]


@pytest.mark.parametrize("timeout", ["-1", "0", "float('nan')", "float('inf')", "None", "'x'"])
def test_time_limit_that_is_none_costs_nothing(ranks: Ranks, timeout: str) -> None:
    script = f"""
with distboot.init("none", join_timeout=60) as ctx:
    attempt(ctx.main_first(timeout={timeout}).__enter__)
    ctx.barrier()
"""
    for output, code in ranks(script, 2):
        assert (output.startswith("usage main_first(timeout="), code) == (True, 0), output


def test_who_is_missing_at_a_barrier_is_named(ranks: Ranks) -> None:
    script = """
ctx = distboot.init("none", join_timeout=60, timeout=1)
if ctx.rank < 2:
    attempt(ctx.barrier)
    touch(f"first-{ctx.rank}")
until("first-0", "first-1")
ctx.close()
ctx = distboot.init("none", join_timeout=60, timeout=1)
if ctx.is_main:
    until("second-1", "second-2")
attempt(ctx.barrier)
touch(f"second-{ctx.rank}")
"""
    found = [[line.partition(" | ")[0] for line in output.splitlines()] for output, _ in ranks(script, 3)]
    came = "barrier(): 2 of 3 ranks came within 1 s, missing 2 (node 0)"
    late = "missing-rank barrier(): rank 0 did not come within 1 s"
    assert found == [
        [f"missing-rank {came}", "missing-rank barrier(): ranks 1-2 did not wait longer than 1 s for this one"],
        [f"missing-rank rank 0 says: {came}", late],
        [late],
    ]


def test_rank_that_has_left_is_not_waited_for(ranks: Ranks) -> None:
    script = """
for leaves in (1, 0):
    ctx = distboot.init("none", join_timeout=60, timeout=60)
    if ctx.rank == leaves:
        touch(f"leaves-{leaves}")
    else:
        until(f"leaves-{leaves}")
        attempt(ctx.barrier)
        touch(f"tried-{leaves}")
    ctx.close()
    until(f"tried-{leaves}")
"""
    first, second = ranks(script)
    assert first[0].startswith("missing-rank barrier(): rank 1 (node 0) ended, or closed its context, without coming")
    assert re.match(
        r"missing-rank barrier\(\): rank 0 is not at 127\.0\.0\.1:\d+ any more( \(.*\))?: it ended, or closed its ",
        second[0],
    )
    # So whoever ended is the one that failed first, also if the lifeline hears later of it than of these.
    assert all(End(words=f"distboot.DistbootError: {output}").is_consequence for output, _ in (first, second))


@pytest.mark.parametrize("dies", [0, 1])
def test_rank_that_dies_and_not_one_that_waits_for_it_failed_first(ranks: Ranks, dies: int) -> None:
    script = """
ctx = distboot.init("none", join_timeout=60)
if ctx.rank == DIES:
    os.kill(os.getpid(), 9)
ctx.barrier()
"""
    outputs = ranks(script.replace("DIES", str(dies)), 3)
    first = f"rank {dies} failed first: "
    assert all(first in output for rank, (output, _) in enumerate(outputs) if rank != dies), outputs


_LATE = """
ctx = distboot.init("none", join_timeout=60)
def step():
    with ctx.main_first(timeout=0.5):
        if ctx.is_main:
            until("late")
        else:
            say("never")
{how}
"""
_HINT = "give its block more time: main_first(timeout=…)"


def test_block_that_takes_too_long_is_an_error_on_all(ranks: Ranks) -> None:
    first, second = ranks(_LATE.format(how="attempt(step)\ntouch('late')"))
    assert second == (
        f"missing-rank main_first(): rank 0 was not through within 0.5 s | look at its output, or {_HINT}\n",
        0,
    )
    said = "missing-rank main_first(): rank 1 did not wait longer than 0.5 s for this one | "
    assert first == (f"{said}give the block more time: main_first(timeout=…)\n", 0)


def test_block_that_takes_too_long_ends_the_job(ranks: Ranks) -> None:
    first, second = ranks(_LATE.format(how="step()"))  # rank 0's block would take a minute
    host = os.uname().nodename
    assert "rank 1 failed first: uncaught exception: " in first[0]
    assert f"error[missing-rank]: rank 1 on {host}: main_first(): rank 0 was not through within 0.5 s" in first[0]
    assert second[1] == 1
    assert first[1] != 0


def test_alone(run: Run) -> None:
    script = """
with distboot.init("none", timeout=0.1) as ctx:
    ctx.barrier()
    for first in (ctx.main_first, ctx.local_main_first):
        with first(timeout=0.1):
            say(ctx.rank, ctx.is_main, ctx.is_local_main)
"""
    result = run(sys.executable, "-c", _BEGIN + script)
    assert (result.stdout, result.stderr) == ("0 True True\n" * 2, "")


def test_without_the_roll_call_there_is_no_gate(run: Run, port: int) -> None:
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "DISTBOOT_ROLL_CALL": "0"}
    result = run(sys.executable, "-c", _BEGIN + "attempt(distboot.init('none').barrier)", env={**job, **place})
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
    (hosts.shared / "gate.py").write_text(_BEGIN + _HOSTS)
    ours = {"MASTER_ADDR": "nodea", "DISTBOOT_SECRET": "swordfish"}
    exports = [word for name in (*ours, "PATH") for word in ("-x", name)]
    launch = [str(MPIRUN), "--bind-to", "none", "-H", "nodea:2,nodeb:2", "--map-by", "node", *exports]
    done = hosts.run("nodea", [*launch, sys.executable, "gate.py"], {**MPI_ENV, **ours}, 120)
    assert json_lines(done) == [
        {"rank": rank, "hosts": ["nodea", "nodeb"], "main_first": True, "local_main_first": True} for rank in range(4)
    ]
