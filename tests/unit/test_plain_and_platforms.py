"""Plain RANK/WORLD_SIZE, Azure ML as a platform, addresses and ports of rank 0."""

import pytest
from captured import one, refused
from documented import AZUREML_PYTORCH, PYTORCHJOB
from inside import DERIVED_PORTS

from distboot import Placement, detect

TWO_NODES = "openmpi-4.1.4/2nodes_2procs"
ONE_NODE = "openmpi-4.1.4/1node_4procs"
ONE_A_NODE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
AZURES = ("10.0.0.4", 6105)


def _address(placement: Placement) -> tuple[str | None, int | None]:
    return placement.master_addr, placement.master_port


@pytest.mark.parametrize(
    ("environ", "platform", "job_id", "numbers", "address"),
    [
        # Nothing in the environment proves how many there are on this node, and how many nodes.
        (AZUREML_PYTORCH, "azureml", "dreamy_clock_1f2z7", (3, 4, 1, None, 1, None), AZURES),
        # One process per node is a rank until the node is known.
        (
            {**AZUREML_PYTORCH, **ONE_A_NODE},
            "azureml",
            "dreamy_clock_1f2z7",
            (1, 2, 0, None, 1, None),
            AZURES,
        ),
        (
            PYTORCHJOB,
            "kubernetes",
            None,
            (2, 3, None, None, None, None),
            ("digits-master-0", 23456),
        ),
    ],
)
def test_job_with_plain_variables(
    environ: dict[str, str],
    platform: str,
    job_id: str,
    numbers: tuple[int | None, ...],
    address: tuple[str, int],
) -> None:
    placement = detect(environ)
    assert (placement.launcher, placement.platform, placement.job_id) == ("torch", platform, job_id)
    assert placement[2:8] == numbers
    assert _address(placement) == address


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        (
            {"AZ_BATCH_MASTER_NODE": "10.0.0.4:6000", "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.9"},
            "10.0.0.4",
        ),
        ({"AZ_BATCH_MASTER_NODE": "10.0.0.4"}, "10.0.0.4"),
        ({"AZ_BATCH_MASTER_NODE": "[fd00::4]:6000"}, "fd00::4"),
        ({"AZ_BATCH_MASTER_NODE": "fd00::4"}, "fd00::4"),
        ({"AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.4"}, "10.0.0.4"),
        (
            {"AZ_BATCHAI_MPI_MASTER_NODE": "localhost", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"},
            "10.0.0.4",
        ),
    ],
)
def test_azureml_mpi_job_on_two_nodes(variables: dict[str, str], host: str) -> None:
    placements = [detect({**one(TWO_NODES, rank), **variables}) for rank in range(4)]
    assert {p.platform for p in placements} == {"azureml"}
    assert {p.master_addr for p in placements} == {host}
    ports = {p.master_port for p in placements}
    # The port in AZ_BATCH_MASTER_NODE belongs to the Azure Batch service: its documentation forbids using it.
    assert len(ports) == 1
    assert ports <= set(DERIVED_PORTS)
    refusal = refused({**one(TWO_NODES, 3), **variables, "AZ_BATCH_MASTER_NODE": "10.0.0.999:6000"})
    assert "AZ_BATCH_MASTER_NODE='10.0.0.999:6000' is not an IPv4 address" in refusal.message


@pytest.mark.parametrize(
    "variables", [{"AZ_BATCHAI_MPI_MASTER_NODE": "localhost"}, {"AZUREML_RUN_ID": "dreamy_clock"}]
)
def test_azureml_mpi_job_on_one_node(variables: dict[str, str]) -> None:
    placement = detect({**one(ONE_NODE, 2), **variables})
    assert (placement.platform, placement.master_addr) == ("azureml", "127.0.0.1")


_AZUREML_OF_TWO = {"AZUREML_NODE_COUNT": "2", "AZ_BATCH_MASTER_NODE": "192.0.2.9:6000"}
_SAGEMAKER_OF_TWO = {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2"}


@pytest.mark.parametrize("of_two_nodes", [_AZUREML_OF_TWO, _SAGEMAKER_OF_TWO])
@pytest.mark.parametrize(
    "name",
    [
        ONE_NODE,
        "openmpi-5.0.11/1node_4procs",
        "mpich-4.0.2/1node_4procs",
        "horovodrun-0.28.1/gloo_1node_4procs",
    ],
)
def test_job_of_one_node_needs_no_other(name: str, of_two_nodes: dict[str, str]) -> None:
    environ = {**of_two_nodes, **one(name, 2)}
    placement = detect(environ)
    assert (placement.num_nodes, placement.master_addr) == (1, "127.0.0.1")
    assert placement.platform in ("azureml", "sagemaker")
    given = detect({**environ, "MASTER_ADDR": "192.0.2.7"})
    assert given.master_addr == "192.0.2.7"


_GIVEN = {"MASTER_ADDR": "nodea", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("more", "address"),
    [
        ({}, ("127.0.0.1", None)),
        ({"MASTER_PORT": "29500"}, ("127.0.0.1", 29500)),
        ({"AZ_BATCH_MASTER_NODE": "10.0.0.4:6000", "MASTER_PORT": "29500"}, ("10.0.0.4", 29500)),
        ({"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}, ("node-0", 29500)),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, (None, None)),  # two nodes
        (
            {**one(TWO_NODES, 3), **_GIVEN, "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"},
            ("nodea", 29500),
        ),
    ],
)
def test_azureml_says_localhost_for_one_node(
    more: dict[str, str], address: tuple[str | None, int | None]
) -> None:
    passed = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "AZ_BATCHAI_MPI_MASTER_NODE": "localhost",
    }
    placement = detect({**passed, **more})
    assert _address(placement) == address
    assert "MASTER_ADDR" not in more or placement.sources["master_addr"] == "MASTER_ADDR"
    assert "MASTER_PORT" not in more or placement.sources["master_port"] == "MASTER_PORT"


@pytest.mark.parametrize(
    "here",
    [
        "localhost",
        "LOCALHOST",
        "localhost:6000",
        "127.0.0.1:6000",
        "[::1]:6000",
        "::ffff:127.0.0.1",
    ],
)
def test_loopback_is_no_address_for_two_nodes(here: str) -> None:
    for name in ("AZ_BATCHAI_MPI_MASTER_NODE", "AZ_BATCH_MASTER_NODE"):
        assert detect({**one(TWO_NODES, 3), name: here}).master_addr is None


def test_port_in_the_address_must_not_contradict() -> None:
    environ = {**one(TWO_NODES, 3), "MASTER_ADDR": "[fd00::4]:29501"}
    assert _address(detect(environ)) == ("fd00::4", 29501)
    assert "MASTER_PORT='29500' contradicts" in refused({**environ, "MASTER_PORT": "29500"}).message


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "LocalHost", "::1", "::ffff:127.0.0.1", "0.0.0.0"]
)
def test_loopback_address_for_several_hosts_isrefused(host: str) -> None:
    assert "loopback" in refused({**one(TWO_NODES, 0), "MASTER_ADDR": host}).message
    assert detect({**one(ONE_NODE, 0), "MASTER_ADDR": host}).master_addr is not None


def test_derived_ports_fit_a_job_and_spread() -> None:
    ports = [
        detect({**one(ONE_NODE, 0), "PMIX_NAMESPACE": f"prterun-nodea-{n}@1"}).master_port
        for n in range(500)
    ]
    assert ports[0] == 65381, "the same in every process"
    assert set(ports) <= set(DERIVED_PORTS)
    assert len(set(ports)) > 400
    steps = [
        detect({**one("slurm-srun-22.05.8/2nodes_2procs", 0), "SLURM_STEP_ID": str(step)})
        for step in (0, 1)
    ]
    assert (steps[0].platform, steps[0].master_addr) == ("slurm", "nodea")
    assert steps[0].job_id != steps[1].job_id
    assert steps[0].master_port != steps[1].master_port


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK='0' is not below WORLD_SIZE='0'"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK='2' is not below",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"},
            "LOCAL_WORLD_SIZE='4' is more than WORLD_SIZE='2'",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"},
            "LOCAL_WORLD_SIZE='0' cannot be 0",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "99999999999"},
            "WORLD_SIZE='99999999999' is larger than any job",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "4"},
            "LOCAL_RANK='4' is not below WORLD_SIZE='2'",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "NODE_RANK": "2"},
            "NODE_RANK='2' is not below WORLD_SIZE='2'",
        ),
        ({"RANK": "01", "WORLD_SIZE": "2"}, "RANK='01' is not a whole number"),
        ({"WORLD_SIZE": "4"}, "RANK is missing"),
        ({"LOCAL_RANK": "1", "NODE_RANK": "0"}, "RANK is missing"),
        ({"RANK": "٣", "WORLD_SIZE": "4"}, "RANK='٣' is not a whole number"),
    ],
)
def test_contradictory_or_half_a_launcher_isrefused(
    variables: dict[str, str], problem: str
) -> None:
    refusal = refused(variables)
    assert refusal.code == "broken-environment"
    assert problem in refusal.message
    assert refusal.exit_code == 78


def test_what_is_no_unicode_is_no_traceback() -> None:
    assert detect({**one(TWO_NODES, 0), "PMIX_NAMESPACE": "job\udcff"}).master_port in DERIVED_PORTS


def test_message_is_bounded_and_escaped() -> None:
    refusal = refused({"RANK": "x" * 100_000, "WORLD_SIZE": "\x1b[31m"})
    assert len(refusal.message) < 1000
    assert "\x1b" not in refusal.message


@pytest.mark.parametrize(
    "value",
    [
        "user:hun/ter2@host",
        "user:hunter2 hunter2@host",
        "http://u:hun@ter2@host",
        "https://hunter2@host:80",
        "https://host/x?token=hunter2&y=1",
        "AccountName=a;AccountKey=hunter2=",
        "user:" + "hunter2" * 50 + "@host",
        "x" * 185 + "user:hunter2hunter2@host",
    ],
)
def test_no_part_of_a_password_is_shown(value: str) -> None:
    for name in ("MASTER_ADDR", "RANK"):
        assert "hunter" not in str(
            refused({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", name: value})
        )


def test_single_process_needs_no_address() -> None:
    # Kubernetes sets it in every pod for a Service called master.
    placement = detect({"MASTER_PORT": "tcp://10.0.0.1:80"})
    assert (placement.launcher, placement.master_addr) == ("single", "127.0.0.1")
    assert any("ignored, as this process is alone" in note for note in placement.notes)
    assert detect({"MASTER_ADDR": "[", "RANK": "1"}, launcher="none").world_size == 1
    assert detect({"AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}).master_addr == "127.0.0.1"


@pytest.mark.parametrize(
    "variable",
    [
        *(
            "PMIX_RANK",
            "LSF_PM_TASKID",
            "ALPS_APP_PE",
            "PBS_TASKNUM",
            "SLURM_LOCALID",
            "SLURM_NODEID",
            "ROLE_RANK",
        ),
        *("CROSS_RANK", "HOROVOD_CROSS_RANK", "OMPI_COMM_WORLD_NODE_RANK"),
    ],
)
def test_trace_of_unknown_launcher_is_not_single(variable: str) -> None:
    assert refused({variable: "3"}).code == "unsupported-launcher"
    for name in ("single", "none"):
        assert detect({variable: "3"}, launcher=name).world_size == 1


def test_pmix_alone_is_refused_with_its_remedy() -> None:
    refusal = refused({"PMIX_RANK": "3"})
    assert "docker run -e OMPI_COMM_WORLD_SIZE " in refusal.hint
    placement = detect({"PMIX_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"})
    assert (placement.launcher, placement.rank, placement.world_size) == ("openmpi", 3, 4)
