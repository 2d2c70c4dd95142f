"""pbsdsh of PBS, jsrun and blaunch of LSF, by whichever name this is called: what they start, without their daemons.

A command is started on hosts of the tests by ssh, with the variables that the program sets for it: pbsdsh as OpenPBS's
src/resmom/start_exec.c, jsrun as Lightning's LSFEnvironment reads them. pbsdsh does not pass those of the job script.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("pbsdsh", "jsrun", "blaunch")
_JOB = {
    "pbsdsh": {"PBS_JOBID": "4242.head", "PBS_ENVIRONMENT": "PBS_BATCH"},
    "jsrun": {"LSB_JOBID": "1234"},
    "blaunch": {"LSB_JOBID": "1234"},
}
# What a site's login shell sets on every host, here the one of the tests
_OF_THE_SITE = ("PYTHONPATH", "DISTBOOT_GRACE")


def install(folder: Path) -> None:
    """Put these programs into a new folder."""
    folder.mkdir()
    for name in PROGRAMS:
        (folder / name).write_text(f"#!{sys.executable}\n{Path(__file__).read_text()}")
        (folder / name).chmod(0o755)


def job_environment(
    system: str, folder: Path, hosts: tuple[str, ...], slots: int
) -> dict[str, str]:
    """The variables of a job script of PBS or LSF that has so many slots on each of these hosts."""
    lines = [host for host in hosts for _ in range(slots)]
    (folder / "slots").write_text("\n".join([*lines, ""]))
    (folder / "rankfile").write_text("\n".join(["head", *lines, ""]))
    of_system = {
        "pbs": {
            **_JOB["pbsdsh"],
            "PBS_NODEFILE": f"{folder}/slots",
            "PBS_O_WORKDIR": str(folder),
            "PBS_NODENUM": "0",
            "PBS_TASKNUM": "1",
        },
        "lsf": {
            **_JOB["jsrun"],
            "LSB_DJOB_HOSTFILE": f"{folder}/slots",
            "LSB_DJOB_RANKFILE": f"{folder}/rankfile",
        },
    }
    return of_system[system]


Start = tuple[str, dict[str, str], list[str]]


def _pbsdsh(words: list[str]) -> Iterator[Start]:
    """One for each line of the file, which has each host once."""
    command = words[words.index("--") + 1 :]
    for number, host in enumerate(Path(os.environ["PBS_NODEFILE"]).read_text().split()):
        task = {"PBS_NODENUM": str(number), "PBS_TASKNUM": str(number * 20000000 + 2)}
        yield host, task, command


def _jsrun(words: list[str]) -> Iterator[Start]:
    """The options of the page: -n resource sets, one a host, of -a tasks each."""
    options = dict(zip(words[::2], words[1::2], strict=False))
    tasks = int(options["-a"])
    command = words[2 * list(options).index("python") :]
    hosts = list(dict.fromkeys(Path(os.environ["LSB_DJOB_RANKFILE"]).read_text().split()[1:]))
    passed = {options["-E"]: os.environ[options["-E"]]}
    size = tasks * int(options["-n"])
    for rank in range(size):
        local = rank % tasks
        numbers = {
            "JSM_NAMESPACE_RANK": rank,
            "JSM_NAMESPACE_SIZE": size,
            "JSM_NAMESPACE_LOCAL_RANK": local,
            "JSM_NAMESPACE_LOCAL_SIZE": tasks,
            "OMPI_COMM_WORLD_RANK": rank,
            "OMPI_COMM_WORLD_SIZE": size,
            "OMPI_COMM_WORLD_LOCAL_RANK": local,
        }
        of_task = {name: str(number) for name, number in numbers.items()}
        yield hosts[rank // tasks], {**passed, "PATH": os.environ["PATH"], **of_task}, command


def _blaunch(words: list[str]) -> Iterator[Start]:
    """As ssh, with the environment of the job script."""
    yield words[0], {"PATH": os.environ["PATH"], "LSF_PM_TASKID": "1"}, words[1:]


def main(program: str, words: list[str]) -> int:
    starts = {"pbsdsh": _pbsdsh, "jsrun": _jsrun, "blaunch": _blaunch}[program](words)
    site = {name: os.environ[name] for name in _OF_THE_SITE if name in os.environ}
    started = []
    for host, own, command in starts:
        environ = {**site, **_JOB[program], **own}
        assignments = [f"{name}={value}" for name, value in environ.items()]
        line = (
            shlex.join(["cd", os.getcwd()]) + " && " + shlex.join(["env", *assignments, *command])
        )
        started.append(subprocess.Popen(["ssh", host, line]))
    codes = [process.wait() for process in started]
    if program == "pbsdsh":  # openpbs, pbsdsh.c: whatever its tasks have returned
        return 0
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[0]).name, sys.argv[1:]))
