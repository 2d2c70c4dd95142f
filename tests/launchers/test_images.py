"""The images of docker/ in real containers, what becomes of them and their jobs; and ranks in containers below mpirun.

For the other tools and for srun, test_docs_console.py and test_docs_yaml.py have a stand-in (container_stub.py).
"""

import json
import re
import shlex
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from conftest import Run
from launched import MPI_ENV, MPIRUN, json_lines, needs_mpirun
from podman import DOCKER, Container, Podman, argument, history, missing

pytestmark = [pytest.mark.all, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

_PACKAGES = f"numpy=={version('numpy')} scikit-learn=={version('scikit-learn')}"
_TWO_RANKS = '--entrypoint=["python", "-m", "distboot", "run", "--nproc-per-node=2", "--"]'
_OFFLINE = "--network=none"
_WAITS = """import signal
print("READY", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Podman:
    return Podman(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def image(podman: Podman) -> str:
    return podman.build("Dockerfile", PACKAGES=_PACKAGES)


@contextmanager
def _nodes(
    podman: Podman, image: str, count: int, *command: str, options: tuple[str, ...] = ()
) -> Iterator[list[Container]]:
    job = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
    }
    given = [*(f"--env={name}={value}" for name, value in job.items()), *options]
    with podman.network() as network, ExitStack() as stack:
        nodes = []
        for node in range(count):
            name = [f"--hostname=node{node}", f"--network-alias=node{node}"]
            own = [f"--network={network}", *name, f"--env=RANK={node}"]
            of_node = [option.replace("{node}", str(node)) for option in [*given, *own]]
            nodes.append(stack.enter_context(podman.container(image, *command, options=of_node)))
        yield nodes


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "Dockerfile.tensorflow"])
def test_image_is_little_more_than_its_base(podman: Podman, image: str, dockerfile: str) -> None:
    built = image if dockerfile == "Dockerfile" else podman.build(dockerfile)
    (config,) = json.loads(podman("image", "inspect", built).stdout)
    assert config["Config"]["Entrypoint"] == ["python", "-m", "distboot", "run", "--"]
    assert (config["Config"]["User"], config["Config"].get("Cmd") or []) == ("1000", [])
    of_oci = {
        name.rpartition(".")[2]: text
        for name, text in config["Config"]["Labels"].items()
        if name.startswith("org.opencontainers.image.")
    }
    assert (of_oci["title"][:13], of_oci["licenses"]) == ("distboot for ", "Apache-2.0")
    assert {"description", "source", "revision", "version"} <= of_oci.keys()
    *layers, base = history(podman, built)
    added = sum(int(str(layer["size"])) for layer in layers)
    assert int(str(base["size"])) > 100e6, "the last line is the base"
    # Torch and its like are mounted, see podman.py: what there is to add is distboot. The aim is 5 MB
    # (bench/container.py): sources and bytecode.
    assert 100e3 < added <= 5e6


def test_distboot_is_installed_beside_torch(podman: Podman, image: str) -> None:
    torch = podman.run(
        image, "python", "-c", "import distboot, torch; print(distboot.__file__, torch.__version__)"
    )
    assert torch.stdout.split() == [torch.stdout.split()[0], version("torch")], torch.stderr
    assert not torch.stdout.startswith(("/opt", "/workspace"))


def test_mpirun_starts_ranks_in_an_mpi_image(podman: Podman) -> None:
    """As Azure ML does it for an MPI job, which has no use for the ENTRYPOINT."""
    try:
        # The one build that downloads something
        image = podman.build("Dockerfile", network="host", APT="openmpi-bin")
    except subprocess.TimeoutExpired:
        pytest.skip("the mirror of Debian's does not answer in time")
    except AssertionError as error:
        if re.search(
            "Failed to fetch|Temporary failure resolving|Could not connect|Unable to locate",
            str(error),
        ):
            pytest.skip("no mirror of Debian's within reach")
        raise
    # In one write: the image has PYTHONUNBUFFERED, and mpirun passes on what each rank writes as it comes
    script = "import os; os.write(1, b'rank %(RANK)s of %(WORLD_SIZE)s\\n' % os.environb)"
    job = (
        "--oversubscribe",
        "-n",
        "2",
        "python",
        "-m",
        "distboot",
        "run",
        "--",
        "python",
        "-c",
        script,
    )
    done = podman.run(image, *job, options=["--entrypoint=mpirun"])
    assert (done.returncode, sorted(done.stdout.splitlines())) == (
        0,
        ["rank 0 of 2", "rank 1 of 2"],
    ), done.stderr


@pytest.mark.parametrize(
    ("handler", "code"), [("lambda *_: sys.exit(7)", 7), ("signal.SIG_IGN", 143)]
)
def test_stop_reaches_the_command_and_has_a_grace(
    podman: Podman, image: str, handler: str, code: int
) -> None:
    script = f"import signal, sys; signal.signal(signal.SIGTERM, {handler}); {_WAITS}"
    options = [_OFFLINE, "--env=DISTBOOT_GRACE=3"]
    with podman.container(image, "python", "-c", script, options=options) as container:
        container.wait_for("READY")
        # Podman itself would kill it only after that
        podman("stop", "--time=100", container.name, timeout=90)
        assert container.exit_code() == code


@pytest.mark.parametrize(
    "options",
    [
        ("--read-only", "--read-only-tmpfs=false"),
        ("--user=12345:0",),
        ("--user=12345:54321",),
        ("--ipc=none",),
        ("--init",),
        ("--cap-drop=all", "--security-opt=no-new-privileges"),
    ],
    ids=[
        "read-only",
        "no-passwd-entry",
        "no-group-entry",
        "no-dev-shm",
        "not-process-1",
        "no-capabilities",
    ],
)
def test_container_with_less_than_usual(
    podman: Podman, image: str, options: tuple[str, ...]
) -> None:
    script = "import os, torch; print(os.getuid(), os.environ['RANK'], torch.ones(2).sum().item())"
    done = podman.run(image, "python", "-c", script, options=options)
    user = "12345" if "12345" in options[0] else "1000"
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [user, "0", "2.0"], "")


def test_home_and_workdir_fit_users_of_group_0(podman: Podman, image: str) -> None:
    done = podman.run(
        image, "sh", "-c", "touch ~/here here && pwd && echo ~", options=["--user=12345:0"]
    )
    assert (done.returncode, done.stdout.split()) == (0, ["/workspace", "/home/train"]), done.stderr


def test_doctor_in_a_container_names_docker_run_options(podman: Podman, image: str) -> None:
    done = podman.run(
        image, "python", "-m", "distboot", "doctor", "--json", options=["--shm-size=1m"]
    )
    assert done.returncode == 78, done.stderr
    (finding,) = [
        each for each in json.loads(done.stdout)["findings"] if each["name"] == "shared-memory"
    ]
    assert (finding["status"], finding["remedy"].partition("=")[0]) == (
        "problem",
        "docker run --shm-size",
    )


def test_killed_container_is_named_by_the_others(podman: Podman, image: str) -> None:
    script = f"import distboot; distboot.init('none'); {_WAITS}"
    with _nodes(
        podman,
        image,
        2,
        "python",
        "-c",
        script,
        options=(_TWO_RANKS,),
    ) as nodes:
        for node in nodes:
            node.wait_for("READY")
        podman("kill", "--signal=KILL", nodes[1].name)
        assert nodes[0].exit_code() != 0
        assert re.search(
            r"node 0 on node0: ranks 2-3 became unreachable first: .*, on node1 ", nodes[0].logs()
        )


def test_compose_file_builds_and_trains(podman: Podman, tmp_path: Path) -> None:
    build_of = {
        "context": str(podman.context),
        "args": {"PACKAGES": _PACKAGES, "HATCHLING": version("hatchling")},
    }
    both = {"build": build_of, "volumes": podman.mounts}
    (tmp_path / "mounts.yaml").write_text(
        yaml.safe_dump({"services": {"node0": both, "node1": both}})
    )
    project = f"distboot-{uuid.uuid4().hex[:12]}"
    build = " ".join(
        ["--pull=never", "--network=none", *(f"--volume={mount}" for mount in podman.mounts)]
    )
    files = [f"--file={DOCKER / 'compose.yaml'}", f"--file={tmp_path / 'mounts.yaml'}"]
    compose = [
        "podman-compose",
        "--no-ansi",
        f"--project-name={project}",
        *files,
        f"--podman-build-args={build}",
    ]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*compose, *words],
            env=podman.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    nodes = [f"{project}_node{node}_1" for node in (0, 1)]
    try:
        # Not --abort-on-container-exit: of two nodes that end well, it stops the second one
        up = run("up", "--build", "--detach")
        assert up.returncode == 0, up.stdout + up.stderr
        codes = podman("wait", *nodes, timeout=150).stdout.split()
        output = podman("logs", nodes[0]).stdout
    finally:
        down = run("down", "--timeout=0")
    assert (codes, down.returncode) == (["0", "0"], 0), output + down.stderr
    result = json.loads(re.search(r"result (\{.*)", output)[1])  # type: ignore[index]
    assert (result["ranks"], result["accuracy"] >= 0.93) == (4, True), output


Start = Callable[[str], list[dict[str, object]]]

_WHO = """
import json, os, distboot
names = ("launcher", "rank", "world_size", "local_rank", "num_nodes", "master_addr")
with distboot.init("none", join_timeout=60) as ctx:
    os.write(1, (json.dumps({name: getattr(ctx, name) for name in names}) + "\\n").encode())
"""


@pytest.fixture
def started(run: Run, podman: Podman, tmp_path: Path, port: int) -> Start:
    """Runs two containers below mpirun, with these options, and gives what the ranks say there."""
    (tmp_path / "who.py").write_text(_WHO)
    mounted = (
        f"--volume={podman.context}:/distboot:ro "
        f"--volume={tmp_path}:/job:ro -e PYTHONPATH=/distboot"
    )
    image = argument(DOCKER / "Dockerfile", "PYTHON")  # alone, as nothing of a framework is needed
    env = {
        **podman.environ,
        **MPI_ENV,
        "MASTER_ADDR": "127.0.0.1",
        "AZ_BATCHAI_MPI_MASTER_NODE": "localhost",
    }

    def start(options: str) -> list[dict[str, object]]:
        container = (
            f"podman run --rm --timeout=120 --network=host {mounted} "
            f"{options} {image} python /job/who.py"
        )
        command = f"eval {shlex.quote(container)}" if "docker" in options else f"exec {container}"
        lines = json_lines(
            run(
                str(MPIRUN), "-n", "2", "bash", "-c", command, env={**env, "MASTER_PORT": str(port)}
            )
        )
        assert {line["master_addr"] for line in lines} == {"127.0.0.1"}
        return lines

    return start


_RANK_AND_SIZE = "-e OMPI_COMM_WORLD_RANK -e OMPI_COMM_WORLD_SIZE"
_LOCAL = "-e OMPI_COMM_WORLD_LOCAL_RANK -e OMPI_COMM_WORLD_LOCAL_SIZE"


@needs_mpirun
@pytest.mark.parametrize(
    ("options", "launcher"),
    [
        (f"{_RANK_AND_SIZE} -e AZ_BATCHAI_MPI_MASTER_NODE -e MASTER_PORT", "openmpi"),
        (f"{_RANK_AND_SIZE} {_LOCAL} -e MASTER_PORT", "openmpi"),
        ("$(python -m distboot env --format docker)", "torch"),
        ("--env-file <(python -m distboot env --format dotenv)", "torch"),
    ],
)
def test_ranks_in_containers_below_mpirun(started: Start, options: str, launcher: str) -> None:
    lines = started(options)
    assert [(line["rank"], line["world_size"], line["local_rank"]) for line in lines] == [
        (0, 2, 0),
        (1, 2, 1),
    ]
    assert {(line["launcher"], line["num_nodes"]) for line in lines} == {(launcher, 1)}
