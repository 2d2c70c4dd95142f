"""Launchers that cannot be started here: environments as their documentation gives them (documented.py)."""

import pytest
from captured import one, refused
from documented import (
    AWSBATCH,
    FLUX,
    JSRUN,
    LIGHTNING,
    PALS,
    PYTORCHJOB,
    SAGEMAKER,
    TRAINJOB,
    VOLCANO,
    tf_config,
)
from inside import DERIVED_PORTS, INNERMOST_FIRST, LAUNCHERS, sample_of

from distboot import detect

# What is captured is in test_subsets.py.
_ENOUGH = {name: LAUNCHERS[name].numbers[:2] for name in ("pmi", "flux", "pals", "lsf")}
_ENOUGH |= {"torch": ("RANK", "WORLD_SIZE"), "slurm": ("SLURM_PROCID", "SLURM_NTASKS")}


@pytest.mark.parametrize("launcher", _ENOUGH)
def test_rank_and_size_are_enough(launcher: str) -> None:
    placement = detect(dict(zip(map(str, _ENOUGH[launcher]), "34", strict=True)))
    assert placement[:10] == (launcher, None, 3, 4, None, None, None, None, None, None)


# What differs between two jobs that may run at once in one allocation
_JOBS_AT_ONCE = {
    "jsrun": (JSRUN, {"PMIX_NAMESPACE": "1"}, {"PMIX_NAMESPACE": "2"}),
    "elements of an array": (
        {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "PMI_RANK": "0", "PMI_SIZE": "2"},
        {"LSB_JOBID": "42", "LSB_BATCH_JID": "42[1]"},
        {"LSB_JOBID": "42", "LSB_BATCH_JID": "42[2]"},
    ),
    "servers of horovodrun": (
        {
            **sample_of(LAUNCHERS["horovodrun"].sample, rank=0, nodes=1, per_node=2),
            "PBS_JOBID": "77.pbs",
        },
        {"HOROVOD_GLOO_RENDEZVOUS_PORT": "40001"},
        {"HOROVOD_GLOO_RENDEZVOUS_PORT": "40002"},
    ),
    "servers of TF_CONFIG": (
        {"SLURM_JOB_ID": "77"},
        tf_config("worker", 0, worker=["a:2222", "a:2223"]),
        tf_config("worker", 0, worker=["a:3222", "a:3223"]),
    ),
}


@pytest.mark.parametrize("what", _JOBS_AT_ONCE)
def test_jobs_of_one_allocation_have_their_own_ports(what: str) -> None:
    environ, first, second = _JOBS_AT_ONCE[what]
    ports = [detect({**environ, **own}).master_port for own in (first, second)]
    assert None not in ports
    assert ports[0] != ports[1]


@pytest.mark.parametrize(
    ("environ", "launcher", "platform", "numbers"),
    [
        (JSRUN, "lsf", "lsf", (3, 4, 1, None, None, None)),
        ({**JSRUN, "JSM_NAMESPACE_LOCAL_SIZE": "2"}, "lsf", "lsf", (3, 4, 1, 2, None, None)),
        (PALS, "pals", "pbs", (3, 4, 1, 2, 1, None)),
        (FLUX, "flux", "flux", (3, 4, 1, None, None, 2)),
        ({**PALS, **FLUX}, "flux", "flux", (3, 4, 1, None, None, 2)),
        (
            {**FLUX, "FLUX_JOB_NNODES": "1", "FLUX_TASK_LOCAL_ID": "3"},
            "flux",
            "flux",
            (3, 4, 3, 4, 0, 1),
        ),
        (SAGEMAKER, "sagemaker", "sagemaker", (1, 2, 0, 1, 1, 2)),
        (LIGHTNING, "lightning", None, (1, 2, 1, 2, 0, 1)),
        (
            {**LIGHTNING, "MASTER_ADDR": "10.0.0.4", "WORLD_SIZE": "4"},
            "lightning",
            None,
            (1, 4, 1, None, 0, None),
        ),
    ],
)
def test_launcher_is_read(
    environ: dict[str, str], launcher: str, platform: str | None, numbers: tuple[int | None, ...]
) -> None:
    placement = detect(environ)
    assert (placement.launcher, placement.platform, placement.node_level) == (
        launcher,
        platform,
        None,
    )
    assert placement[2:8] == numbers


@pytest.mark.parametrize(
    ("environ", "launcher", "rank", "reason", "address"),
    [
        (
            {**PYTORCHJOB, "WORLD_SIZE": "12", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "2"},
            "kubeflow",
            2,
            "PET_NPROC_PER_NODE=4 asks for 4 processes",
            ("digits-master-0", 23456),
        ),
        # The operator's early versions: WORLD_SIZE counts pods whatever nprocPerNode is.
        (
            {**PYTORCHJOB, "PET_NPROC_PER_NODE": "4"},
            "kubeflow",
            2,
            "asks for 4",
            ("digits-master-0", 23456),
        ),
        (
            TRAINJOB,
            "kubeflow",
            1,
            "PET_NPROC_PER_NODE=auto asks for several",
            ("digits-node-0-0.digits", 29500),
        ),
        (VOLCANO, "volcano", 2, "Volcano's RANK counts pods", ("digits-master-0.digits", 23456)),
        (AWSBATCH, "awsbatch", 2, "AWS Batch counts nodes", ("10.0.0.4", None)),
        ({**SAGEMAKER, "SM_NUM_GPUS": "8"}, "sagemaker", 1, "SM_NUM_GPUS='8'", ("algo-1", None)),
    ],
)
def test_process_that_stands_for_a_node_is_recognized(
    environ: dict[str, str], launcher: str, rank: int, reason: str, address: tuple[str, int | None]
) -> None:
    placement = detect(environ)
    nodes = 2 if rank == 1 else 3
    assert (placement.launcher, placement[2:8]) == (launcher, (rank, nodes, 0, 1, rank, nodes))
    assert placement.node_level is not None
    assert reason in placement.node_level
    assert placement.master_addr == address[0]
    assert placement.master_port == address[1] or (
        address[1] is None and placement.master_port in DERIVED_PORTS
    )


def test_port_of_kubeflow_is_enough() -> None:
    refusal = refused({**TRAINJOB, "MASTER_PORT": "x"})
    assert "set MASTER_PORT to a free port on the host of rank 0, or unset it" in str(refusal)


def test_one_process_a_pod_is_a_rank() -> None:
    assert detect({**TRAINJOB, "PET_NPROC_PER_NODE": "1"}).node_level is None
    assert detect(PYTORCHJOB).launcher == "torch"
    # The ranks that somebody has started in the pod have a LOCAL_RANK.
    started = {"PET_NPROC_PER_NODE": "4", "RANK": "5", "WORLD_SIZE": "12", "LOCAL_RANK": "1"}
    assert detect({**PYTORCHJOB, **started}).rank == 5
    assert detect(VOLCANO, launcher="torch").rank == 2
    single = {
        "VC_TASK_INDEX": "0",
        "VK_TASK_INDEX": "0",
        "VC_WORKER_NUM": "1",
        "VC_WORKER_HOSTS": "a",
    }
    assert detect(single).launcher == "single", "which needs no plugin of Volcano's"


def test_main_node_of_aws_batch_is_rank_0() -> None:
    second_is_main = {**AWSBATCH, "AWS_BATCH_JOB_MAIN_NODE_INDEX": "1"}
    environs = [{**second_is_main, "AWS_BATCH_JOB_NODE_INDEX": str(node)} for node in range(3)]
    assert [detect(environ).rank for environ in environs] == [1, 0, 2]
    ports = {
        detect({**e, "AWS_BATCH_JOB_ID": f"a7182d0e#{n}"}).master_port
        for n, e in enumerate(environs)
    }
    assert len(ports) == 1, "the part after # differs from node to node"
    main = {name: value for name, value in environs[1].items() if "PRIVATE_IPV4" not in name}
    assert (
        detect({**main, "HOSTNAME": "ip-10-0-0-4.ec2.internal"}).master_addr
        == "ip-10-0-0-4.ec2.internal"
    )
    nameless = [main, *({**main, "HOSTNAME": host} for host in ("localhost", "a b", ""))]
    assert [detect(environ).master_addr for environ in nameless] == [None] * 4


def test_mpirun_in_sagemaker_owns_the_rank() -> None:
    # mpirun passes all SM_* of its own host to every rank.
    numbers = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    mpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in numbers.items()}
    placement = detect({**SAGEMAKER, **mpi, "OMPI_UNIVERSE_SIZE": "4", "SM_CURRENT_HOST": "algo-1"})
    assert (placement.launcher, placement.platform, placement.rank) == ("openmpi", "sagemaker", 3)
    assert (placement.master_addr, placement.job_id) == ("algo-1", "digits-2026-11-21-09-12-41-001")
    assert detect({**SAGEMAKER, **mpi, "SM_IS_HETERO": "true"}).master_addr is None


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        (
            {**JSRUN, "OMPI_COMM_WORLD_RANK": "2"},
            "OMPI_COMM_WORLD_RANK='2' contradicts JSM_NAMESPACE_RANK='3'",
        ),
        ({**PALS, "PMI_RANK": "0"}, "PMI_RANK='0' contradicts PALS_RANKID='3'"),
        ({**FLUX, "PMI_SIZE": "8"}, "PMI_SIZE='8' contradicts FLUX_JOB_SIZE='4'"),
        (
            {**SAGEMAKER, "SM_CURRENT_HOST": "algo-3"},
            "SM_CURRENT_HOST='algo-3' is not in SM_HOSTS=",
        ),
        (
            {**SAGEMAKER, "SM_HOSTS": "algo-1,algo-2"},
            "SM_HOSTS='algo-1,algo-2' is not a JSON list of host names",
        ),
        ({**SAGEMAKER, "SM_HOSTS": '["algo-1","algo-1"]'}, "names a host twice"),
        # One host is a count of one here, and yet no process that is known to be alone
        ({"SM_HOSTS": "1"}, "SM_HOSTS='1' is not a JSON list of host names"),
        (
            {**AWSBATCH, "AWS_BATCH_JOB_NODE_INDEX": "3"},
            "AWS_BATCH_JOB_NODE_INDEX='3' is not below",
        ),
        (
            {**AWSBATCH, "AWS_BATCH_JOB_MAIN_NODE_INDEX": "7"},
            "AWS_BATCH_JOB_MAIN_NODE_INDEX='7' is not below",
        ),
        ({**TRAINJOB, "PET_NODE_RANK": "2"}, "PET_NODE_RANK='2' is not below PET_NNODES='2'"),
        (
            {**PYTORCHJOB, "PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "8"},
            "WORLD_SIZE='8' is neither PET_NNODES=3 nor",
        ),
        ({"VC_TASK_INDEX": "1", "VC_WORKER_NUM": "2"}, "RANK and WORLD_SIZE are missing"),
        (
            {**LIGHTNING, "NODE_RANK": "1", "WORLD_SIZE": "4"},
            "NODE_RANK='1': Lightning does not say how many",
        ),
    ],
)
def test_contradictory_variables_are_named(environ: dict[str, str], problem: str) -> None:
    refusal = refused(environ)
    assert (refusal.code, problem in refusal.message) == ("broken-environment", True), refusal


_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


@pytest.mark.parametrize(
    ("environ", "note", "platform"),
    [
        (one("slurm-sbatch-22.05.8/batch_step_python_no_ntasks", 0), "not a step", "slurm"),
        ({"FLUX_URI": "local:///run/flux/local-0"}, "start the script with flux run", "flux"),
        ({"PBS_JOBID": "4242.pbs-01", "PBS_TASKNUM": "1"}, "PBS_* ignored", "pbs"),
        ({"LSB_JOBID": "1234", "LSB_HOSTS": "batch h1 h1"}, "LSB_* ignored", "lsf"),
        ({**_POD, "JOB_COMPLETION_INDEX": "2"}, "JOB_COMPLETION_INDEX ignored", "kubernetes"),
    ],
)
def test_job_script_is_one_process_and_says_so(
    environ: dict[str, str], note: str, platform: str
) -> None:
    placement = detect(environ)
    assert (placement.launcher, placement.world_size, placement.platform) == ("single", 1, platform)
    assert any(note in said for said in placement.notes)


def test_pals_takes_the_size_that_a_script_passes() -> None:
    environ = {name: value for name, value in PALS.items() if name != "PMI_SIZE"}
    placement = detect({**environ, "WORLD_SIZE": "4"})
    assert (placement.launcher, placement.rank, placement.world_size) == ("pals", 3, 4)
    assert placement.sources["world_size"] == "WORLD_SIZE"
    assert not any("WORLD_SIZE ignored" in note for note in placement.notes)


def test_one_problem_of_processes_numbered_by_hand() -> None:
    refusal = refused({**LIGHTNING, "NODE_RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4"})
    assert refusal.message.count("NODE_RANK") == 1, refusal
    assert refusal.hint.startswith("set RANK"), refusal


_WITHOUT_SAMPLE = {"lightning", "single"}  # the rank of one needs more, the other has no variables
_SAMPLES = [
    name
    for name, launcher in LAUNCHERS.items()
    if launcher.nodes is None and name not in _WITHOUT_SAMPLE
]


@pytest.mark.parametrize("name", _SAMPLES)
def test_sample_of_a_launcher_is_a_rank(name: str) -> None:
    for rank in range(4):
        placement = detect(sample_of(LAUNCHERS[name].sample, rank, nodes=2, per_node=2))
        assert (placement.launcher, placement.rank, placement.world_size) == (name, rank, 4)
        place = (placement.local_rank, placement.local_world_size, placement.node_rank)
        for known, right in zip(place, (rank % 2, 2, rank // 2), strict=True):
            assert known in (None, right)


def test_every_variable_asked_for_loads_its_launcher() -> None:
    for entry in INNERMOST_FIRST:
        launcher = LAUNCHERS[entry.name]
        names = [*launcher.markers, *launcher.triggers, launcher.own_mark]
        names += [left_over.name for left_over in launcher.left_over]
        for name in filter(None, names):
            family = name.partition("_")[0]
            assert {family, name} & {*entry.variables}, f"{name} does not load {entry.name}"
