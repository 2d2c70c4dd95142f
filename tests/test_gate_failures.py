"""Barriers and `main_first` that fail: blocks that raise or take too long, and ranks that are missing, leave or die."""

from __future__ import annotations

import os
import re

import pytest
from gates import Ranks

from distboot.lifeline.ends import End

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
