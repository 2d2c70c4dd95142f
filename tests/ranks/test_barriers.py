"""Barriers and `main_first` without any framework: ranks that wait for each other, and what fails among them."""

import os
import signal
import sys
from pathlib import Path

import pytest
from conftest import Run
from ranks import BEGIN, Ranks
from supervised import raised, until

import distboot


@pytest.mark.parametrize("before", [(), ("-m", "distboot")], ids=["init", "wrapper"])
def test_ranks_wait_for_each_other(ranks: Ranks, before: tuple[str, ...]) -> None:
    script = """
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
    assert ranks(script, 3, *before) == [("True\n" * 5 + "end\n", 0)] * 3


def test_unauthenticated_peers_never_replace_a_rank(ranks: Ranks) -> None:
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


@pytest.mark.parametrize(
    "count", [pytest.param(count, marks=pytest.mark.ranks(count)) for count in (1, 2)]
)
def test_nested_waiting_and_invalid_time_limits_are_refused(count: int) -> None:
    with distboot.init("none", join_timeout=60) as ctx:
        assert ctx.world_size == count
        for timeout in (-1, 0, float("nan"), float("inf"), None, "x"):
            with pytest.raises(distboot.DistbootError, match=r"main_first\(timeout="):
                ctx.main_first(timeout=timeout).__enter__()  # type: ignore[arg-type]
        with ctx.main_first():
            with pytest.raises(
                distboot.DistbootError, match=r"barrier\(\) inside main_first\(\): "
            ):
                ctx.barrier()
            with pytest.raises(
                distboot.DistbootError, match=r"local_main_first\(\) inside main_first\(\): "
            ):
                ctx.local_main_first().__enter__()
        with ctx.local_main_first(timeout=9):
            pass
        ctx.barrier()


def test_generator_that_is_left_early_is_in_order(ranks: Ranks) -> None:
    script = """
def items():
    with ctx.main_first(timeout=60):
        yield 1
        yield 2
ctx = distboot.init("none", join_timeout=60)
for item in items():
    if ctx.is_main:
        break
say("went on")
"""
    ended = ranks(script, 2, DISTBOOT_FAILURE_DETECTION="0")
    assert [code for _, code in ended] == [0, 0], ended
    output, _ = ended[1]
    assert "went on" in output.splitlines()


@pytest.mark.parametrize("first", ["main_first", "local_main_first"])
def test_block_inside_the_same_block_keeps_the_order(ranks: Ranks, first: str) -> None:
    script = f"""
with distboot.init("none", join_timeout=60) as ctx:
    first = ctx.{first}
    touch(f"came-{{ctx.rank}}")
    with first():
        if ctx.is_main:
            until("came-1")
        say(Path("outer").exists() or ctx.is_main)
        with first():
            say(Path("outer").exists() or ctx.is_main)
        if ctx.is_main:
            time.sleep(0.5)  # in which a rank that comes too early says so
            touch("outer")
    with first():
        say("end")
"""
    assert ranks(script, 2) == [("True\nTrue\nend\n", 0)] * 2


def test_without_the_rendezvous_there_is_no_gate(run: Run, port: int) -> None:
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place = {
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "DISTBOOT_RENDEZVOUS": "0",
    }
    result = run(
        sys.executable, "-c", BEGIN + "attempt(distboot.init('none').barrier)", env={**job, **place}
    )
    said = (
        "rendezvous-needed barrier() needs the roll call, and it is off | unset "
        "DISTBOOT_RENDEZVOUS\n"
    )
    assert (result.stdout, result.stderr) == (said, "")


_READY = '{"kind":"Ready"}'
_HELLO = '{"kind":"Hello","job":"","nonce":"00000000000000000000000000000000","version":2}'
_DOOR = (
    f"TEXTS = {('GET / HTTP/1.0', _READY, _HELLO)}\n"
    """
port = int(os.environ["MASTER_PORT"])  # what the script finds there later is another one
with distboot.init("none", join_timeout=60, timeout=1) as ctx:
    with ctx.main_first():
        if ctx.is_main:
            begin = time.monotonic()  # longer than the limit of a barrier, which is no limit here
            while time.monotonic() < begin + 1.2:
                time.sleep(0.05)
            strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
            for stranger, text in zip(strangers, TEXTS):
                stranger.sendall(len(text).to_bytes(4, "big") + bytes(40) + text.encode())
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
)


def test_block_of_rank_0_may_last_or_fail(ranks: Ranks) -> None:
    first, second = ranks(_DOOR, 2, DISTBOOT_SECRET="swordfish")
    refused = [
        line.rpartition("the connecting process ")[2]
        for line in first[0].splitlines()
        if "refused" in line
    ]
    assert refused == [
        "sent data that is not JSON; the job continues",
        "does not send the expected Hello; the job continues",
        "belongs to another job; the job continues",
    ]
    said = [line for line in first[0].splitlines() if "refused" not in line]
    assert (said, first[1]) == (["True", "disk full", "again", "end"], 0)
    failed, hint = second[0].splitlines()[1:3]
    assert failed.endswith("main_first(): the block failed on rank 0: OSError: disk full")
    assert second == (f"True\n{failed}\n{hint}\nagain\nend\n", 0)


def test_failure_reaches_late_ranks_without_secret_and_bounded(
    ranks: Ranks,
) -> None:
    script = """
with distboot.init("none", join_timeout=60) as ctx:
    denied = OSError("denied for " + os.environ["DISTBOOT_SECRET"] + "\\x07 disk full" * 10_000)
    for error in (denied, None):
        if error is not None and not ctx.is_main:
            until("failed")
        try:
            with ctx.main_first(timeout=30):
                if ctx.is_main and error is not None:
                    raise error
                say("inside")
        except (OSError, distboot.DistbootError) as failure:
            if not ctx.is_main:
                say(type(failure).__name__, len(str(failure)) < 1000, failure)
            touch("failed")
"""
    (first, first_code), (second, second_code) = ranks(script, DISTBOOT_SECRET="it's me")
    assert (first, first_code, second_code) == ("inside\n", 0, 0)
    assert second.startswith("DistbootError True ")
    assert (
        "the block failed on rank 0: OSError: denied for ***\\x07 disk full\\x07 disk full"
        in second
    )
    assert "me" not in second.partition("denied")[2].partition("\n")[0]
    assert second.endswith("\ninside\n")


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
    found = [
        [line.partition(" | ")[0] for line in output.splitlines()] for output, _ in ranks(script, 3)
    ]
    came = "barrier(): 2 of 3 ranks arrived within 1 s; missing: rank 2 (node 0)"
    late = "barrier(): 2 of 3 ranks arrived within 1 s; missing: rank 0 (node 0)"
    assert found == [
        [
            f"missing-rank {came}",
            "missing-rank barrier(): ranks 1-2 timed out after 1 s waiting for this one",
        ],
        [f"missing-rank {came}", f"missing-rank {late}"],
        [f"missing-rank {late}"],
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
    for rank, (output, _) in zip((1, 0), (first, second), strict=True):
        said = (
            f"missing-rank barrier(): rank {rank} (node 0) ended, or closed its "
            "context, without getting here"
        )
        assert output.startswith(said)
    # So whoever ended is the one that failed first, also if failure detection hears later of it than of these.
    assert all(
        raised(f"distboot.DistbootError: {output}").is_secondary for output, _ in (first, second)
    )


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
_HINT = (
    "look at its output: it is still in that block, or never comes to main_first(); or give the "
    "block more time: main_first(timeout=…)"
)


def test_block_past_its_timeout_fails_all_ranks(ranks: Ranks) -> None:
    first, second = ranks(_LATE.format(how="attempt(step)\ntouch('late')"))
    assert second == (
        (f"missing-rank main_first(): rank 0 did not finish its block within 0.5 s | {_HINT}\n"),
        0,
    )
    said = "missing-rank main_first(): rank 1 timed out after 0.5 s waiting for this one | "
    assert first == (f"{said}give the block more time: main_first(timeout=…)\n", 0)


def test_block_that_takes_too_long_ends_the_job(ranks: Ranks) -> None:
    first, second = ranks(_LATE.format(how="step()"))  # rank 0's block would take a minute
    host = os.uname().nodename
    late = "main_first(): rank 0 did not finish its block within 0.5 s"
    assert f"rank 1 failed first: error[missing-rank]: {late}, on {host}, in " in first[0]
    assert f"error[missing-rank]: rank 1 on {host}: {late}" in second[0]
    assert second[1] == 1
    assert first[1] != 0


@pytest.mark.ranks(2)
def test_interrupted_wait_leaves_the_next_one_intact(shared_tmp_path: Path) -> None:
    given_up = shared_tmp_path / "given up"
    with distboot.init("none", join_timeout=60) as ctx:
        if ctx.is_main:
            until(given_up.exists)
        else:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt), ctx.main_first():
                pass
            given_up.touch()
        for _ in range(2 if ctx.is_main else 1):
            with ctx.main_first():
                pass
