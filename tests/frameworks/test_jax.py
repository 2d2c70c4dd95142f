"""`init("jax")` and the wrapper for JAX, on real JAX: two ranks on the CPU, their collectives on its Gloo."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from captured import one
from inside import Session, alone, frameworks, replace
from inside import jax as framework
from launched import all_with
from ranks import BEGIN, WRAPPER, RunRanks

from distboot import DistbootError, detect

# A proxy that nobody is at: what asks it for a rank fails.
_ENV = {
    "JAX_PLATFORMS": "cpu",
    "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
}

_BEGIN = (
    BEGIN
    + """
def code_of(call):
    try:
        call()
    except distboot.DistbootError as error:
        return error.code
def gathered(value):
    import jax.numpy as jnp
    from jax.experimental import multihost_utils
    return multihost_utils.process_allgather(jnp.array(value)).tolist()
"""
)

_INIT = """
ctx = distboot.init("jax", join_timeout=60)
import jax
"""


@all_with("jax")
def test_ranks_are_one_job_and_end_separately(run_ranks: RunRanks) -> None:
    script = """
found = dict(rank=jax.process_index(), size=jax.process_count(), devices=jax.device_count(), total=gathered(ctx.rank))
ctx.barrier()
with ctx.main_first():
    found["same"] = distboot.init("jax") is ctx
found["another"] = code_of(lambda: distboot.init("torch"))
found["proxy"] = os.environ["no_grpc_proxy"]
say(**found)
if ctx.is_main:
    Path("rank 0 is through").touch()
else:
    while not Path("rank 0 is through").exists():
        time.sleep(0.01)
    time.sleep(1)  # in which JAX would have ended us, had rank 0 not stayed
    jax.device_put(1) + 1
    ctx.close()
    assert ctx.closed
"""
    lines = [rank.line() for rank in run_ranks(_BEGIN + _INIT + script, **_ENV)]
    same = {
        "size": 2,
        "devices": 2,
        "total": [0, 1],
        "same": True,
        "another": "already-initialized",
        "proxy": "127.0.0.1",
    }
    assert lines == [{"rank": 0, **same}, {"rank": 1, **same}]


@all_with("jax")
@pytest.mark.parametrize("rendezvous", ["1", "0"])
def test_address_of_the_only_node_may_vary(run_ranks: RunRanks, rendezvous: str) -> None:
    here = {
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.2",
        "DISTBOOT_RENDEZVOUS": rendezvous,
    }
    places = [{"LOCAL_RANK": str(rank)} for rank in range(2)]
    ranks = run_ranks(
        _BEGIN + _INIT + "say(total=gathered(ctx.rank))", places=places, **_ENV, **here
    )
    assert [rank.line() for rank in ranks] == [{"total": [0, 1]}] * 2


# What a rank does that ends it, while the other one waits for it: which rank, how, its exit code, what is said of it;
# and whether the other one waits in a collective operation, which sees on its own that a peer has gone.
_ENDS = {
    "exception": (
        0,
        "raise ValueError('boom')",
        1,
        (": failed first: uncaught exception: ValueError: boom"),
        True,
    ),
    "exception in with": (
        0,
        "with ctx: raise ValueError('boom')",
        1,
        ": failed first: uncaught exc",
        True,
    ),
    "exception with shutdown": (
        0,
        "try: raise ValueError('boom')\n    finally: jax.distributed.shutdown()",
        1,
        ": failed first: uncaught exception: ValueError: boom",
        True,
    ),
    "sys.exit": (1, "sys.exit(3)", 3, "rank 1 failed first: exit code 3", False),
    "sys.exit of rank 0": (0, "sys.exit(3)", 3, ": failed first: exit code 3", True),
    "SIGTERM": (
        1,
        "os.kill(os.getpid(), 15)",
        -15,
        ("stopped by an external SIGTERM: rank 1 got it first"),
        False,
    ),
}


@all_with("jax")
@pytest.mark.parametrize("name", _ENDS)
def test_end_of_one_rank_ends_the_other(run_ranks: RunRanks, name: str) -> None:
    culprit, how, code, said, in_collective = _ENDS[name]
    script = f"""
gathered(ctx.rank)
if ctx.rank == {culprit}:
    {how}
if {in_collective}:
    gathered(ctx.rank)
time.sleep(100)
"""
    ended = run_ranks(_BEGIN + _INIT + script, **_ENV)
    assert ended[culprit].code == code, ended
    assert ended[1 - culprit].code in ((1, code, -6, -15) if in_collective else (-15,))
    assert said in ended[0].err


@all_with("jax")
def test_script_may_shut_jax_down_itself(run_ranks: RunRanks) -> None:
    script = """
gathered(ctx.rank)
if ctx.rank == 1:
    while not os.path.exists("rank 0 is about to"):
        time.sleep(0.05)
else:
    open("rank 0 is about to", "w").close()
jax.distributed.shutdown()
say(rank=ctx.rank)
"""
    ended = run_ranks(_BEGIN + _INIT + script, **_ENV)
    assert [rank.line()["rank"] for rank in ended] == [0, 1]


@all_with("jax")
def test_unmodified_script_under_the_wrapper(run_ranks: RunRanks, port: int) -> None:
    script = """
import jax
jax.distributed.initialize()
found = dict(rank=jax.process_index(), size=jax.process_count(), total=gathered(jax.process_index()))
found["env"] = {name: value for name, value in os.environ.items() if name.startswith("JAX_") or "proxy" in name}
show = [sys.executable, "-m", "distboot", "show", "--json"]
found["launcher"] = json.loads(subprocess.run(show, capture_output=True, check=True).stdout)["launcher"]
say(**found)
"""
    before = [*WRAPPER, "--framework", "jax"]
    ended = run_ranks(_BEGIN + script, before=before, no_proxy="a.b", **_ENV)
    lines = [rank.line() for rank in ended]
    for rank, line in enumerate(lines):
        assert line.pop("env") == {
            **_ENV,
            "no_proxy": "a.b",
            "no_grpc_proxy": "a.b,127.0.0.1",
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(rank),
        }
        assert line == {"rank": rank, "size": 2, "total": [0, 1], "launcher": "torch"}


def _meeting(capture: str, rank: int, **more: str) -> tuple[Session, dict[str, str]]:
    environ = {**one(capture, rank), **more}
    return alone(detect(environ), 1.0), environ


def test_exports_are_what_jax_finds_first() -> None:
    # clusters/ompi_cluster.py reads these; Slurm's, which it reads as well, stay as they are.
    job, environ = _meeting("torchrun-2.13.0/uneven_3_1_c10d", 3)
    # torchrun's own port is not to be had
    job.result = replace(job.result, store_host="10.0.0.1", port=61000)
    found = frameworks.exports("jax", job, environ)
    assert found.pop("JAX_COORDINATOR_ADDRESS").endswith(":61000")
    assert found.pop("OMPI_MCA_orte_hnp_uri")
    assert found == {
        "JAX_NUM_PROCESSES": "4",
        "JAX_PROCESS_ID": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }
    job, environ = _meeting("slurm-srun-22.05.8/2nodes_2procs", 3, MASTER_PORT="29500")
    assert set(frameworks.exports("jax", job, environ)) == {
        "JAX_COORDINATOR_ADDRESS",
        "JAX_NUM_PROCESSES",
        "JAX_PROCESS_ID",
    }


def test_nothing_is_exported_for_one_process() -> None:
    job, environ = _meeting("plain-python-3.11/nothing", 0)
    assert frameworks.exports("jax", job, environ) == {}


def test_given_coordinator_stays() -> None:
    given = {"JAX_COORDINATOR_ADDRESS": "10.0.0.9:6666", "JAX_NUM_PROCESSES": "4"}
    job, environ = _meeting("slurm-srun-22.05.8/2nodes_2procs", 3, MASTER_PORT="29500", **given)
    found = frameworks.exports("jax", job, environ)
    assert found == {**given, "JAX_PROCESS_ID": "3"}


def test_different_numbers_are_not_overwritten() -> None:
    given = {"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "4"}
    job, environ = _meeting("slurm-srun-22.05.8/2nodes_2procs", 3, MASTER_PORT="29500", **given)
    with pytest.raises(DistbootError) as raised:
        frameworks.exports("jax", job, environ)
    assert raised.value.code == "conflicting-launchers"
    assert raised.value.message == "JAX_PROCESS_ID='1', but for this job JAX needs JAX_PROCESS_ID=3"


def test_rendezvous_off_under_torchrun() -> None:
    job, environ = _meeting("torchrun-2.13.0/uneven_3_1_c10d", 3)
    with pytest.raises(
        DistbootError, match="no rank can learn where rank 0 runs JAX's coordinator"
    ) as raised:
        frameworks.exports("jax", job, environ)
    assert raised.value.code == "rendezvous-needed"


@pytest.mark.parametrize(
    ("visible", "environ", "expected"),
    [
        (["a", "b", "c", "d"], {}, "1"),
        (["b"], {"CUDA_VISIBLE_DEVICES": "1"}, "0"),
        (["a"], {}, "local rank 1 of 2 has no accelerator of its own: 1 visible"),
        (["a", "b"], {"JAX_LOCAL_DEVICE_IDS": "0,1"}, None),
        (["a", "b"], {"JAX_PLATFORMS": "cpu"}, None),
        ([], {}, None),
    ],
)
def test_each_rank_of_a_node_has_a_device(
    monkeypatch: pytest.MonkeyPatch,
    visible: list[str],
    environ: dict[str, str],
    expected: str | None,
) -> None:
    monkeypatch.setattr("distboot.host.accelerators.visible", lambda _: visible)
    job, _ = _meeting("torchrun-2.13.0/2nodes_2procs_static", 3)
    job.result = replace(job.result, store_host="10.0.0.1", port=61000)
    try:
        found = frameworks.exports("jax", job, environ).get("JAX_LOCAL_DEVICE_IDS")
    except DistbootError as error:
        found = error.message
    assert found == expected


def _jax(monkeypatch: pytest.MonkeyPatch, *, old: bool = False, begun: bool = False) -> None:
    def initialize(shutdown_timeout_seconds: int = 300) -> None: ...

    distributed = SimpleNamespace(
        initialize=print if old else initialize, is_initialized=lambda: False
    )
    jax = ModuleType("jax")
    vars(jax).update(__version__="0.8.1", distributed=distributed)
    bridge = SimpleNamespace(backends_are_initialized=lambda: begun)
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setitem(sys.modules, "jax._src", SimpleNamespace(xla_bridge=bridge))


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    def code(options: frameworks.Options, said: str) -> str:
        with pytest.raises(DistbootError, match=said) as raised:
            framework._import(options)
        return raised.value.code

    plain = frameworks.Options("jax")
    _jax(monkeypatch)
    assert code(frameworks.Options("jax", backend="nccl"), "backend='nccl'") == "usage"
    _jax(monkeypatch, old=True)
    assert code(plain, r"JAX 0\.8\.1 is older than 0\.9") == "framework-not-installed"
    _jax(monkeypatch, begun=True)
    assert code(plain, "JAX has taken its devices already") == "already-initialized"
    monkeypatch.setitem(sys.modules, "jax", None)
    assert code(plain, "jax") == "framework-not-installed"
