"""The check of all nodes: the seconds that it adds to a start, how often a bad link is named, and a good one.

python bench/check.py cost --rounds 10       a job of 2 and of 8 hosts, with and without the check, interleaved
python bench/check.py named --rounds 20      four hosts, of which one has bad links, for each kind of them
python bench/check.py false --rounds 50      four healthy hosts beside a busy loop for each CPU
python bench/check.py simulated              rank 0's decisions for 1,000 and 10,000 nodes
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/lib")]

from bad_link import bad_link  # noqa: E402 - shared with the tests, and so are the next
from checked_hosts import BAD, check, four_hosts  # noqa: E402
from checked_nodes import Checked  # noqa: E402
from hosts import Hosts  # noqa: E402

from distboot.host import free_port  # noqa: E402
from distboot.job.messages import NodeSeen, Probeable  # noqa: E402


def cost(rounds: int) -> None:
    """Seconds from the start of the wrappers to their end, and those of the check by its own clock."""
    for count in (2, 8):
        names = [f"host{number}" for number in range(count)]
        seconds: dict[str, list[float]] = {"off": [], "warn": []}
        own = []
        with Hosts.up(names) as hosts:
            for _ in range(rounds):
                for mode in random.sample(["off", "warn"], 2):
                    begin = time.monotonic()
                    found = check(hosts, free_port(), DISTBOOT_CHECK=mode)
                    seconds[mode].append(time.monotonic() - begin)
                    if mode == "warn":
                        own.append(found.seconds)
        medians = {mode: statistics.median(times) for mode, times in seconds.items()}
        print(
            f"{count} hosts: off {medians['off']:.2f} s, warn {medians['warn']:.2f} s, "
            f"of which the check says {statistics.median(own):.2f} s (at most {max(own):.2f} s)"
        )


def named(rounds: int) -> None:
    """How often the links of a host are named, and others."""
    with four_hosts() as hosts:
        for kind, how in BAD.items():
            right = 0
            wrong = []
            for _ in range(rounds):
                with bad_link(hosts, "three", **how):
                    found = check(hosts, free_port())
                of_three = [finding for finding in found.findings if "three" in finding]
                right += bool(of_three)
                wrong += [finding for finding in found.findings if finding not in of_three]
            print(f"{kind}: named in {right} of {rounds}; others: {wrong}")


def without_reason(rounds: int) -> None:
    """How often a healthy link is named on a busy machine."""
    loop = [sys.executable, "-c", "while True: pass"]
    with four_hosts() as hosts, ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            process = stack.enter_context(subprocess.Popen(loop))
            stack.callback(process.kill)
        found = [check(hosts, free_port()) for _ in range(rounds)]
    findings = [finding for one in found for finding in one.findings]
    seconds = [one.seconds for one in found]
    print(
        f"{rounds} runs: {len(findings)} findings {findings}; the check took "
        f"{statistics.median(seconds):.2f} s (at most {max(seconds):.2f} s)"
    )


def simulated() -> None:
    """The processor time of rank 0 for all messages of a check, without the network."""
    for count in (1000, 10_000):
        job = Checked(nodes=count)
        begin = time.process_time()
        for rank in range(count):
            job.take(rank, Probeable(4000, "token"))
        job.answer()
        for rank in range(count):  # last, as drivers take their time
            job.take(rank, NodeSeen())
        assert job.findings == []
        print(f"{count} nodes: {time.process_time() - begin:.3f} s of a processor")


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("cost", "named", "false", "simulated"))
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    if options.what == "simulated":
        simulated()
    else:
        measure = {"cost": cost, "named": named, "false": without_reason}[options.what]
        measure(options.rounds)


if __name__ == "__main__":
    main()
