"""A context in several threads: which calls take turns, and which are refused rather than hang."""

import pytest
from ranks import Ranks

BOTH = pytest.mark.parametrize("before", [(), ("-m", "distboot")], ids=["init", "wrapper"])
BEGIN = """
import signal, threading
def start(work):
    thread = threading.Thread(target=work)
    thread.start()
    return thread
"""
MEET = BEGIN + 'ctx = distboot.init("none", join_timeout=60, timeout=30)\n'
WHILE_WAITING = (
    "usage barrier(): this rank closed its context while it waited | "
    "close it after all threads have left barrier() and main_first()"
)


def lines(output: str, *beginnings: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(beginnings)]


@BOTH
def test_threads_take_turns_in_barriers(ranks: Ranks, before: tuple[str, ...]) -> None:
    script = """
done = []
def wait():
    for _ in range(20):
        ctx.barrier()
    done.append(1)
threads = [start(wait) for _ in range(3)]
for thread in threads:
    thread.join(30)
say("done:", len(done))
os._exit(0)
"""
    ended = ranks(MEET + script, 2, *before)
    assert [(lines(output, "done"), code) for output, code in ended] == [(["done: 3"], 0)] * 2


def test_barrier_beside_another_wait_is_refused(ranks: Ranks) -> None:
    script = """
def first():
    with ctx.main_first(timeout=30):
        pass
    say("first")
if ctx.is_main:
    until("refused")
    first()
else:
    thread = start(first)
    while not ctx._turns._place:
        time.sleep(0.01)
    attempt(ctx.barrier)
    attempt(lambda: ctx.main_first().__enter__())
    touch("refused")
    thread.join()
ctx.barrier()
"""
    (_, first), (output, second) = ranks(MEET + script, 2)
    assert (first, second) == (0, 0), output
    refused = [
        f"usage {what} while another thread of this rank is in main_first() | let one thread of the script wait for "
        "other ranks, or let its threads take turns"
        for what in ("barrier()", "main_first()")
    ]
    assert lines(output, "usage") == refused, output


@BOTH
def test_close_beside_a_barrier_ends_it(ranks: Ranks, before: tuple[str, ...]) -> None:
    script = """
if ctx.is_main:
    thread = start(lambda: attempt(ctx.barrier))
    while not ctx._turns._place:
        time.sleep(0.01)
    time.sleep(0.3)  # until the agent has its question
    ctx.close()
    thread.join(20)
    attempt(ctx.barrier)
    attempt(lambda: ctx.local_main_first().__enter__())
    touch("closed")
else:
    until("closed")
    attempt(ctx.barrier)
"""
    (first, code), (second, code_1) = ranks(MEET + script, 2, *before)
    assert (code, code_1) == (0, 0)
    assert lines(first, "usage") == [
        WHILE_WAITING,
        "usage barrier() after close() | call it before, or init() again",
        "usage local_main_first() after close() | call it before, or init() again",
    ], first
    assert "missing-rank barrier(): rank 0" in second


@BOTH
def test_close_inside_a_block_is_refused(ranks: Ranks, before: tuple[str, ...]) -> None:
    script = """
def run():
    with ctx.main_first(timeout=30):
        if ctx.is_main:
            ctx.close()

attempt(run)
"""
    (first, code), (second, code_1) = ranks(MEET + script, 2, *before)
    assert (code, code_1) == (0, 0)
    assert lines(first, "usage") == [
        "usage close() inside main_first(): other ranks wait for its end | call it after the block"
    ], first
    assert "missing-rank main_first(): rank 0 (node 0) ended, or closed its context" in second


@pytest.mark.parametrize("what", ["ctx.barrier", "ctx.close"])
def test_handler_that_interrupts_a_barrier_does_not_hang(ranks: Ranks, what: str) -> None:
    script = f"""
if ctx.is_main:
    signal.signal(signal.SIGALRM, lambda *_: attempt({what}))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    attempt(ctx.barrier)
    touch("over")
else:
    if "close" in "{what}":
        until("over")
    else:
        time.sleep(0.6)
    attempt(ctx.barrier)
"""
    (output, code), (_, second) = ranks(MEET + script, 2)
    assert (code, second) == (0, 0), output
    said = {
        "ctx.barrier": "usage barrier() in a signal handler, while this thread is in barrier() | ",
        "ctx.close": "usage barrier(): this rank closed its context while it waited | ",
    }
    assert said[what] in output


def test_init_in_several_threads_is_one_context(ranks: Ranks) -> None:
    script = (
        BEGIN
        + """
found = []
threads = [start(lambda: found.append(distboot.init("none", join_timeout=60))) for _ in range(4)]
for thread in threads:
    thread.join(60)
say(len(found), len(set(map(id, found))))
found[0].barrier()
"""
    )
    assert ranks(script, 2) == [("4 1\n", 0)] * 2


def test_init_in_a_handler_of_init_is_refused(ranks: Ranks) -> None:
    script = (
        BEGIN
        + """
from distboot import initialize
def call_init(*_):
    if initialize._initializing:
        attempt(lambda: distboot.init("none"))
        touch("called")
    else:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
signal.signal(signal.SIGALRM, call_init)
if os.environ["RANK"] == "0":
    call_init()
else:
    until("called")
distboot.init("none", join_timeout=60).barrier()
"""
    )
    (output, code), (_, second) = ranks(script, 2)
    assert (code, second) == (0, 0), output
    assert lines(output, "usage") == [
        "usage init() in a signal handler, while this thread is in init() | call it in the script, and there once"
    ]
