"""How the faults of the fault matrix are done to a job, and undone."""

import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from faults_job import Job, processes
from hosts import Hosts

SHORT = 3  # seconds for which a rank may be silent, in faults about silence
ADDRESSES = {"nodea": "10.77.0.11", "nodeb": "10.77.0.12"}
_MEMORY = Path("/sys/fs/cgroup/memory")  # of cgroup version 1


def nothing(_: Hosts) -> None:
    """Nothing to prepare, nothing to undo."""


def go(job: Job) -> None:
    job.go([3])


def end_well(_: Job) -> None:
    """The end of the training is the fault."""


def kill(number: int, *ranks: int) -> Callable[[Job], None]:
    return lambda job: job.send(number, *(job.scripts[rank] for rank in ranks))


def _goes_on(job: Job, seconds: float) -> None:
    assert job.await_end_of([0], seconds) is None, job.output()


def kill_launcher(job: Job) -> None:
    job.send(signal.SIGKILL, job.launcher_of(3))


def stop_launcher_for_a_while(job: Job) -> None:
    launcher = job.launcher_of(3)
    job.send(signal.SIGSTOP, launcher)
    _goes_on(job, 5)
    job.send(signal.SIGCONT, launcher)
    job.go_on()


def stop_for_a_while(job: Job) -> None:
    job.send(signal.SIGSTOP, job.scripts[3])
    _goes_on(job, 5)
    job.send(signal.SIGCONT, job.scripts[3])
    job.go_on()


def hold_the_lock(job: Job) -> None:
    job.go([3])
    _goes_on(job, SHORT + 2)


def kill_beside_a_busy_rank(job: Job) -> None:
    job.go([1])
    job.began = 0.0
    job.send(signal.SIGKILL, job.scripts[3])


def kill_watcher(job: Job) -> None:
    job.send(signal.SIGKILL, job.watcher_of(0))


def freeze(job: Job) -> None:
    job.send(signal.SIGSTOP, job.watcher_of(3), job.scripts[3])


def kill_host(job: Job) -> None:
    members = job.members("nodeb")
    job.send(signal.SIGKILL, *sorted(members, key=lambda one: not one.watches))


def stop_politely(job: Job) -> None:
    job.send(signal.SIGTERM, job.watcher_of(3) if job.way == "wrapper" else job.scripts[3])


def cut_link(job: Job) -> None:
    job.send(0)  # the clock
    job.shell("nodeb", "ip link set eth0 down")


def mend_link(hosts: Hosts) -> None:
    hosts.run("nodeb", ["ip", "link", "set", "eth0", "up"])


def drop(source: str, target: str) -> Callable[[Job], None]:
    def inject(job: Job) -> None:
        job.send(0)
        # To a network card that does not exist.
        job.shell(
            source,
            f"ip neigh replace {ADDRESSES[target]} lladdr 02:00:00:00:00:01 dev eth0 nud permanent",
        )

    return inject


def let_pass(source: str, target: str) -> Callable[[Hosts], object]:
    return lambda hosts: hosts.run(source, ["ip", "neigh", "del", ADDRESSES[target], "dev", "eth0"])


def eat_in_a_group(job: Job) -> None:
    group = _group()
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text("200M")
    (group / "cgroup.procs").write_text(str(job.scripts[3].pid))
    job.go([3])


def _group() -> Path:
    return _MEMORY / f"distboot-faults-{os.getpid()}"


def remove_group(_: Hosts) -> None:
    with suppress(FileNotFoundError):
        _group().rmdir()


def small_disk(hosts: Hosts) -> None:
    command = "mkdir /tmp/disk && mount -n -t tmpfs -o size=4k tmpfs /tmp/disk"
    hosts.run("nodea", ["sh", "-c", f"{command}; cat /dev/zero > /tmp/disk/full 2>/dev/null; true"])


def no_disk(hosts: Hosts) -> None:
    hosts.run("nodea", ["sh", "-c", "umount -n /tmp/disk; rmdir /tmp/disk"])


def close_port(job: Job) -> None:
    """Let the hosts drop what goes over the port at which the ranks met; the others stay open."""
    job.send(0)
    _close(job, supervision_port(job))
    _goes_on(job, SHORT + 3)


def cut_and_mend(job: Job) -> None:
    """Let the hosts drop all that the agents say to each other, and let it through again."""
    _close_agents(job)
    _goes_on(job, SHORT + 3)
    open_ports(job.hosts)
    job.await_(lambda: _are_back(job), 20, "the agents to be connected again")


def stop_while_cut(job: Job) -> None:
    """Ask a rank to stop that cannot reach rank 0's agent."""
    _close_agents(job)
    _goes_on(job, SHORT + 3)
    job.send(signal.SIGUSR1, job.scripts[3])
    _goes_on(job, 1)
    open_ports(job.hosts)


def _are_back(job: Job) -> bool:
    return job.output().count("answered again after") >= 4  # two agents, and rank 0's of each


def _close_agents(job: Job) -> None:
    watcher = job.watcher_of(0).pid
    shown = job.hosts.run("nodea", ["ss", "-Hltnp"]).stdout
    own = next(own for own, pid in processes(job.hosts, "nodea").items() if pid == watcher)
    ports = {
        int(line.split()[3].rpartition(":")[2])
        for line in shown.splitlines()
        if f"pid={own}," in line
    }
    job.send(0)
    _close(job, supervision_port(job), *ports)


def _close(job: Job, *ports: int) -> None:
    for port in set(ports):
        for host, end, other in (("nodea", "sport", "nodeb"), ("nodeb", "dport", "nodea")):
            rule = f"ipproto tcp {end} {port} to {ADDRESSES[other]} blackhole"
            job.shell(host, f"ip rule add pref 1 {rule}")


def supervision_port(job: Job) -> int:
    shown = job.hosts.run("nodeb", ["ss", "-Htnp", "dst", ADDRESSES["nodea"]]).stdout
    loop = {
        own for own, pid in processes(job.hosts, "nodeb").items() if pid == job.watcher_of(3).pid
    }
    lines = [line for line in shown.splitlines() if any(f"pid={own}," in line for own in loop)]
    (port,) = {
        int(match[1]) for line in lines for match in [re.search(r":(\d+)\s+users:", line)] if match
    }
    return port


def open_ports(hosts: Hosts) -> None:
    for host in ADDRESSES:
        hosts.run(host, ["sh", "-c", "while ip rule del pref 1 2>/dev/null; do :; done"])


def no_groups() -> str | None:
    there = os.access(_MEMORY / "memory.limit_in_bytes", os.R_OK)
    return None if there else "no memory controller of cgroup version 1"
