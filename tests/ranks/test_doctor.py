"""`doctor` on recorded and documented machines, whatever else may come, the command, and the ranks of a job."""

import json
import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import ROOT, Run
from hosts import side_by_side
from ranks import RunRanks
from recorded import FOLDER, NAMES, Get, one_of
from rendezvous_peers import altered

from distboot import detect
from distboot.agent.session import Session
from distboot.rendezvous.protocol import Channel
from distboot.tools.doctor.command import examine, text
from distboot.tools.doctor.finding import Finding
from distboot.tools.doctor.job_findings import Findings, gathered, grouped
from distboot.tools.doctor.machine import Machine


@pytest.mark.parametrize("name", NAMES)
def test_machines(name: str, get: Get) -> None:
    """DISTBOOT_WRITE_MACHINES=1 writes what is said of each: read the difference, aloud."""
    one = get(name)
    said = text(examine(one), one.host) + "\n"
    file = FOLDER / f"{name}.txt"
    if os.environ.get("DISTBOOT_WRITE_MACHINES"):
        file.write_text(said)
    assert said == file.read_text()


@pytest.mark.parametrize(
    ("environ", "files", "how"),
    [
        ({}, {".dockerenv": ""}, "docker run --shm-size=8g"),
        ({"container": "podman"}, {}, "docker run --shm-size=8g"),
        (
            {"KUBERNETES_SERVICE_HOST": "10.96.0.1"},
            {},
            "emptyDir: {medium: Memory, sizeLimit: 8Gi}",
        ),
        ({"AZUREML_RUN_ID": "run"}, {}, "resources: {shm_size: 8g}"),
        ({}, {}, "mount -o remount,size=8g /dev/shm"),
    ],
)
def test_remedy_fits_the_container(
    get: Get, environ: Mapping[str, str], files: Mapping[str, str], how: str
) -> None:
    found = one_of(
        get(environ=environ, files=files, shared_memory=lambda: (64 << 20, 64 << 20)),
        "shared-memory",
    )
    assert (found.status, how in found.remedy) == ("problem", True), found


@pytest.mark.parametrize("name", NAMES)
def test_remedy_for_a_pod_is_yaml(name: str, get: Get) -> None:
    yaml = pytest.importorskip("yaml")
    found = examine(get(name, environ={"KUBERNETES_SERVICE_HOST": "10.96.0.1"}))
    for pod in [
        finding.remedy.removeprefix("in the pod:")
        for finding in found
        if "in the pod:" in finding.remedy
    ]:
        assert isinstance(yaml.safe_load(pod) or {}, dict), pod


def test_documents_show_what_is_really_said() -> None:
    how_to = ROOT / "docs" / "how-to"
    doctor = (how_to / "doctor.md").read_text()
    page = (how_to / "infiniband.md").read_text()
    shown = doctor.partition("$ python -m distboot doctor\n")[2].partition("…\n```")[0]
    said = (FOLDER / "azure-nd-h100.txt").read_text()
    assert (said.startswith(shown), len(shown) > 500) == (True, True)
    yaml = pytest.importorskip("yaml")
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert [set(yaml.safe_load(block)) >= {"resources"} for block in blocks] == [False, False, True]


def test_what_is_set_cannot_forge_lines(get: Get) -> None:
    one = get(environ={"NCCL_TOPO_FILE": "/x\nok all is well\x1b[31m", "container": "docker"})
    said = text(examine(one), one.host)
    assert ("\x1b" in said, "\nok all" in said) == (False, False)


def test_clock_that_is_behind(get: Get) -> None:
    assert one_of(get(now=1_700_000_000.0), "clock").status == "problem"


def test_check_that_crashes_is_a_finding(get: Get) -> None:
    def broken(_: Machine) -> list[Finding]:
        raise ZeroDivisionError("so it is")

    (found,) = examine(get(), (broken,))
    assert (found.name, found.status) == ("broken", "unknown")
    assert found.seen == "the check itself failed: ZeroDivisionError: so it is"


@pytest.mark.parametrize("name", NAMES)
def test_machine_without_proc_and_sys(name: str, tmp_path: Path, get: Get) -> None:
    one = get(name, root=tmp_path / "empty")
    assert [finding for finding in examine(one) if "the check itself failed" in finding.seen] == []


def test_files_full_of_nonsense_are_no_traceback(get: Get, tmp_path: Path) -> None:
    one = get("azure-nd-h100")
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        path.write_bytes(b"\xff\x00 : - nonsense\n")
    assert len(examine(one)) >= 20


def test_other_systems_get_only_checks_that_apply(get: Get) -> None:
    names = {finding.name for finding in examine(get(system="darwin"))}
    assert names == {"launcher", "host-name", "master-addr", "ports", "proxies", "clock"}


_COMMAND = """
import os, sys
from distboot.cli.main import main
code = main(os.environ["COMMAND"].split())
loaded = {name.partition(".")[0] for name in sys.modules} & {"torch", "tensorflow", "jax", "horovod", "numpy"}
sys.exit(f"loaded: {loaded}" if loaded else code)
"""


def test_command_on_this_very_machine(run: Run) -> None:
    done = run(sys.executable, "-c", _COMMAND, env={"COMMAND": "doctor --json"})
    said = json.loads(done.stdout)
    assert [set(finding) for finding in said["findings"]] == [
        {"name", "status", "seen", "remedy"}
    ] * 20
    assert said["ready"] == ("problem" not in {finding["status"] for finding in said["findings"]})
    assert (done.returncode, done.stderr) == (0 if said["ready"] else 78, "")
    assert not [
        finding for finding in said["findings"] if "the check itself failed" in finding["seen"]
    ]


def test_command_names_problems_and_exits_with_78(distboot: Run) -> None:
    done = distboot("doctor", env={"RANK": "3"})
    assert done.returncode == 78
    headline, _, first, remedy, *_ = done.stdout.splitlines()
    assert headline.startswith("Not ready: ")
    assert first.startswith("problem  launcher: ")
    assert remedy.startswith("           remedy: ")
    assert done.stderr == ""


@pytest.mark.parametrize("job", [[], ["--job"]], ids=["here", "--job"])
def test_unknown_launcher_is_that_of_the_option(distboot: Run, job: list[str]) -> None:
    done = distboot("doctor", *job, "--launcher", "foo")
    assert done.returncode == 78
    said = done.stdout + done.stderr
    assert "--launcher='foo' is not a valid launcher" in said
    assert "DISTBOOT_LAUNCHER=" not in said


def test_rank_0_prints_findings_with_their_ranks(run_ranks: RunRanks) -> None:
    places: list[dict[str, str]] = [{}, {"NCCL_SOCKET_IFNAME": "nosuch0"}]
    rank_0, rank_1 = run_ranks(_COMMAND, COMMAND="doctor --job", places=places)
    headline, empty, *lines = rank_0.out.splitlines()
    assert (
        headline.startswith("Not ready: "),
        headline.endswith("(2 ranks on 1 node)."),
        empty,
    ) == (True, True, "")
    host = os.uname().nodename
    seen = (
        f"interfaces: rank 1 on {host}: NCCL_SOCKET_IFNAME='nosuch0', but this "
        "host has no interface 'nosuch0'"
    )
    (index,) = (index for index, line in enumerate(lines) if line.startswith(f"problem  {seen}"))
    assert lines[index + 1].startswith(
        "           remedy: name one of these, or unset NCCL_SOCKET_IFNAME"
    )
    assert not [line for line in lines if line.startswith("ok")]
    assert (rank_0.code, rank_1.code, rank_1.out) == (78, 0, ""), rank_0.err + rank_1.err


def test_json_of_all_ranks(run_ranks: RunRanks) -> None:
    env = {
        "COMMAND": "doctor --job --json",
        "DISTBOOT_SECRET": "of this job",
        "NCCL_P2P_DISABLE": "1",
    }
    rank_0, rank_1 = run_ranks(_COMMAND, places=[{}, {"NCCL_SHM_DISABLE": "1"}], **env)
    said = json.loads(rank_0.out)
    found = [(finding["seen"].partition("=1:"), finding["ranks"]) for finding in said["findings"]]
    about = {name: ranks for (name, is_set, _), ranks in found if is_set}
    assert about == {"NCCL_P2P_DISABLE": [0, 1], "NCCL_SHM_DISABLE": [1]}
    assert (said["hosts"], rank_1.out) == ([os.uname().nodename], "")
    assert rank_0.code == (0 if said["ready"] else 78)


# A rank that joins, and ends
_JOINS = """
import os
from distboot.agent.joining import join_here
from distboot.detection.here import detect_here
with join_here(detect_here(os.environ), os.environ, 60.0):
    pass
"""


def test_rank_that_sends_no_findings_is_named(run_ranks: RunRanks) -> None:
    script = (
        f"import os\nif os.environ['RANK'] == '1':\n    exec({_JOINS!r})\n    raise SystemExit\n"
    )
    rank_0, _ = run_ranks(script + _COMMAND, places=[{"COMMAND": "doctor --job"}] * 2)
    said = (
        f"unknown  doctor: rank 1 on {os.uname().nodename}: the findings of this "
        "rank did not arrive: "
    )
    assert said in rank_0.out


def test_rank_that_runs_another_command_is_named(run_ranks: RunRanks) -> None:
    places = [{"COMMAND": "doctor --job"}, {"COMMAND": "show --job"}]
    for rank in run_ranks(_COMMAND, places=places):
        assert rank.code == 78
        assert "rank 1 (node 0): framework to start none" in rank.err


def test_one_check_a_node_where_nodes_are_numbered(clean_env: dict[str, str], port: int) -> None:
    # The environment of an init container of Kubeflow Trainer v2, on two nodes.
    pods = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_MASTER_ADDR": "127.0.0.1"}
    env = {**clean_env, **pods, "PET_MASTER_PORT": str(port), "DISTBOOT_JOIN_TIMEOUT": "60"}
    command = [sys.executable, "-m", "distboot", "doctor", "--job"]
    places = [{"PET_NODE_RANK": "0"}, {"PET_NODE_RANK": "1", "NCCL_SOCKET_IFNAME": "nosuch0"}]
    (code, output), (other_code, other) = side_by_side(
        [(command, {**env, **place}) for place in places], 90
    )
    assert output.splitlines()[0].endswith("(2 nodes)."), output
    assert f"interfaces: node 1 on {os.uname().nodename}: NCCL_SOCKET_IFNAME='nosuch0'" in output
    assert (code, other_code, other) == (78, 0, "")


def test_findings_with_name_and_remedy_are_merged() -> None:
    small, other = (Finding("shared-memory", "problem", f"{size} MiB", "more") for size in (64, 32))
    slow = Finding("cpus", "warning", "2 CPUs", "fewer threads")
    assert grouped({0: [slow], 1: [small], 2: [slow, other]}) == [(small, [1, 2]), (slow, [0, 2])]


def _sent(data: bytes) -> list[Finding]:
    """What rank 0 makes of a rank that sends this."""
    here, there = socket.socketpair()
    job = Session(detect({"RANK": "0", "WORLD_SIZE": "2"}), 10.0)
    job.detach_all = lambda: [(1, here, Channel())]  # type: ignore[method-assign]
    with there:
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        return gathered(job, [Finding("cpus", "ok", "2 CPUs")])[1]


def test_findings_of_a_peer_are_printable() -> None:
    found = _sent(
        Channel().sign(Findings((Finding("cpus\r", "problem", "a\x1b[31m\nb", "c\nd\r"),)))
    )
    *_, seen, remedy, more = text(found, "host\n").splitlines()
    assert (seen, remedy.strip(), more.strip()) == (
        "problem  cpus\\r: a\\x1b[31m\\nb",
        "remedy: c",
        "d\\r",
    )


_FINE = {"name": "a", "status": "ok", "seen": "b", "remedy": "c"}


@pytest.mark.parametrize(
    "findings",
    [
        "x",
        [1],
        [{}],
        [{**_FINE, "status": "fine"}],
        [{"name": "a", "status": "ok"}],
        [{**_FINE, "remedy": "c" * 2001}],
    ],
)
def test_what_is_no_finding_is_one(findings: object) -> None:
    (found,) = _sent(altered(Findings(), findings=findings))
    assert (found.name, found.status) == ("doctor", "unknown")
