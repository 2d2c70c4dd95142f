"""`init("torch")` in real processes: what it gives, and that after a failure everything is as it was."""

import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
from captured import one
from conftest import ROOT, Run
from inside import Options, Ready, Session, imported, preload
from launched import needs_torch
from ranks import HIDE, RunRanks
from supervised import Start, until

from distboot import DistbootError, detect

pytestmark = needs_torch

# A failed init must leave the environment exactly as it was; prints the error's code.
_FAILING = """
import os, sys
import distboot
before = dict(os.environ)
try:
    distboot.init({arguments})
except distboot.DistbootError as error:
    print(error.code, dict(os.environ) == before, error, sep="|")
else:
    print("no error")
"""


def _failed(run: Run, arguments: str = "", env: dict[str, str] | None = None) -> tuple[str, str]:
    """Code and text of the error of an `init` that must fail and must leave `os.environ` alone."""
    result = run(sys.executable, "-c", _FAILING.format(arguments=arguments), env=env)
    assert result.stdout.count("|") >= 2, result.stdout + result.stderr
    code, unchanged, text = result.stdout.split("|", 2)
    assert unchanged == "True"
    return code, text


def test_alone(run: Run) -> None:
    script = """
import json, os
import distboot
with distboot.init() as ctx:
    assert distboot.init("torch") is ctx
    import torch
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    group = (torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.distributed.get_backend())
    with ctx.main_first():
        pass
    ctx.barrier()
    print(json.dumps([ctx.launcher, ctx.is_main, ctx.is_local_main, str(ctx.device), group, ctx.hosts,
                      {name: os.environ[name] for name in names}, ctx.master_port]))
assert not torch.distributed.is_initialized()
ctx.close()
with distboot.init() as again:
    assert again is not ctx
"""
    result = run(sys.executable, "-c", script)
    assert result.stderr == ""
    launcher, is_main, is_local_main, device, group, hosts, environ, port = json.loads(
        result.stdout
    )
    assert (launcher, is_main, is_local_main, device) == ("single", True, True, "cpu")
    assert (group, hosts) == ([0, 1, "gloo"], [socket.gethostname()])
    assert environ == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "NODE_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@pytest.mark.all
def test_second_init_process_group_of_script_is_named(run: Run) -> None:
    script = (
        "import distboot; distboot.init(); import torch.distributed as dist; "
        "dist.init_process_group('gloo')"
    )
    result = run(sys.executable, "-c", script)
    *_, of_torch, said = result.stderr.splitlines()
    assert "trying to initialize the default process group twice!" in of_torch
    has_started = (
        "distboot.init() has started the process group: remove init_process_group() from the script"
    )
    assert said == f"distboot: hint: {has_started}"
    assert result.returncode == 1


@pytest.mark.all
def test_nccl_without_a_gpu_is_named(distboot: Run) -> None:
    script = "import torch.distributed as dist; dist.init_process_group('nccl')"
    result = distboot("--", sys.executable, "-c", script)
    *_, of_torch, said = result.stderr.splitlines()
    if "NCCL built in" not in result.stderr:
        pytest.skip("this PyTorch is built with NCCL")
    assert "Distributed package doesn't have NCCL built in" in of_torch
    assert said.startswith("distboot: hint: this PyTorch is built without NCCL, which needs GPUs: ")
    assert result.returncode == 1


@pytest.mark.parametrize(
    ("script", "hint"),
    [
        (
            "pkg/train.py",
            "start it as a module of its package: -m pkg.train in place of pkg/train.py",
        ),
        ("train.py", ""),
        ("pkg/train", ""),
        ("src/pkg/train.py", ""),  # `src` is not a package
    ],
)
def test_module_started_as_a_script_is_named(
    distboot: Run, tmp_path: Path, script: str, hint: str
) -> None:
    for folder in ("pkg", "src/pkg"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src/pkg/__init__.py").touch()
    (tmp_path / script).write_text("from . import model\n")
    result = distboot(script)
    assert "ImportError: attempted relative import with no known parent" in result.stderr
    if hint:
        assert result.stderr.endswith(f"\ndistboot: hint: {hint}\n")
    else:
        assert "hint:" not in result.stderr


@pytest.mark.parametrize(
    "script",
    [
        "import runpy; runpy.run_path('plugin.py', run_name='plugin')",
        "import runpy; runpy.run_path('plugin.py', run_name='__main__')",
        "raise RuntimeError('attempted relative import with no known parent package')",
    ],
)
def test_relative_import_elsewhere_has_no_hint(distboot: Run, tmp_path: Path, script: str) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/train.py").write_text(script)
    (tmp_path / "plugin.py").write_text("from . import model\n")
    result = distboot("pkg/train.py")
    assert "attempted relative import with no known parent" in result.stderr
    assert "hint:" not in result.stderr


def test_bare_multi_node_mpirun_without_mpi4py(run: Run) -> None:
    script = HIDE.format(module="mpi4py") + _FAILING.format(arguments="")
    result = run(sys.executable, "-c", script, env=one("openmpi-5.0.11/2nodes_2procs", 1))
    assert result.stdout.startswith("no-master-addr|True|"), result.stdout + result.stderr
    assert "-x MASTER_ADDR=" in result.stdout
    assert "or install mpi4py, which init() asks" in result.stdout


def test_bare_mpirun_with_mpi4py_of_another_mpi(run: Run) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    # Not in a job of any MPI: a world of one
    code, text = _failed(run, env=one("mpich-5.0.2/2nodes_2procs", 1))
    assert code == "mpi-mismatch", text
    assert "rank 1 of 4, and mpi4py that it is rank 0 of 1" in text


def test_mpi_that_hangs_is_the_end_in_time(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mpi4py").mkdir()  # stands in for an MPI whose daemons do not answer
    (tmp_path / "mpi4py/__init__.py").write_text(
        "class rc: initialize, finalize, threads = True, None, False"
    )
    (tmp_path / "mpi4py/MPI.py").write_text(
        "import ctypes\nIs_finalized = Is_initialized = lambda: False\nGet_library_version = lambda: 'Some MPI v1, …'\n"
        "Init = lambda: ctypes.PyDLL(None).sleep(60)"
    )
    env = {**one("openmpi-5.0.11/2nodes_2procs", 1), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    result = run(sys.executable, "-c", "import distboot; distboot.init(join_timeout=1)", env=env)
    assert result.returncode == -signal.SIGKILL
    said = f"distboot: error[join-timeout]: rank 1 on {os.uname().nodename}: MPI did not say where rank 0 is within 1 s"
    assert result.stderr.splitlines()[0] == f"{said} (Some MPI v1)"


@pytest.mark.all
def test_port_that_somebody_else_has_is_not_needed(run: Run) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        result = run(
            sys.executable, "-c", "import distboot; print(distboot.init().master_port)", env=env
        )
    assert int(result.stdout) != port


def test_second_call_needs_no_file(run: Run) -> None:
    script = """
import os, distboot
ctx = distboot.init("none")
files = []
try:
    while True:
        files.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
same = distboot.init("none") is ctx
for file in files:
    os.close(file)
print(same)
"""
    assert run(sys.executable, "-c", script).stdout == "True\n"


def test_second_call_returns_the_same_and_warns(run: Run) -> None:
    script = """
import distboot
ctx = distboot.init("none")
print(distboot.init("none") is ctx, distboot.init("none", timeout=5) is ctx)
ctx.close()
distboot.init("none", timeout=5).close()
"""
    done = run(sys.executable, "-c", script)
    said = "warning: init() was called again: timeout=5.0 after timeout=None has no effect; the first context stays"
    assert (done.stdout, done.stderr) == ("True True\n", f"distboot: {said}\n")


def test_refusal_shows_the_scripts_line_alone(run: Run) -> None:
    done = run(sys.executable, "-c", "import distboot\ndistboot.init('pytroch')\n")
    files = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert len(files) == 2, done.stderr  # the script's, and init itself
    assert "did you mean 'torch'?" in done.stderr


_OFF = {"DISTBOOT_RENDEZVOUS": "0"}
_PLACE = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}
_HERE = f"rank 1 on {os.uname().nodename}: rank 0 did not answer at 127.0.0.1:"


@pytest.mark.parametrize(
    ("env", "code", "said"),
    [
        ({"MASTER_PORT": "abc"}, "broken-environment", "MASTER_PORT='abc'"),
        ({"MASTER_PORT": None}, "no-master-port", "MASTER_PORT=29500"),
        ({}, "missing-rank", _HERE),
        (
            {"RANK": "0", "DISTBOOT_JOIN_TIMEOUT": "1.5"},
            "missing-rank",
            "1 of 2 ranks joined within 1.5 s; missing: rank 1",
        ),
        (
            {"GLOO_SOCKET_IFNAME": "ib7"},
            "unknown-interface",
            "='ib7', but this host has no interface 'ib7': it has lo",
        ),
        (
            {"DISTBOOT_RENDEZVOUS": "no"},
            "broken-environment",
            "DISTBOOT_RENDEZVOUS='no' is neither 0 nor 1",
        ),
        (_OFF, "rendezvous-needed", "launcher 'torch' does not say the local_rank"),
        ({**_OFF, **_PLACE}, "join-timeout", "could not connect to torch's TCPStore"),
    ],
)
def test_job_that_cannot_start(
    run: Run, port: int, env: dict[str, str | None], code: str, said: str
) -> None:
    job = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **env,
    }
    limit = "" if "DISTBOOT_JOIN_TIMEOUT" in env else "join_timeout=1"
    found, text = _failed(
        run, limit, {name: value for name, value in job.items() if value is not None}
    )
    assert (found, said in text) == (code, True), text
    assert said != _HERE or "127.0.0.1 is this host: " in text


_WRONG = {
    "unknown-framework": ["'pytroch'"],
    "backend-not-available": ["backend='nccl'", "backend='bogus'"],
    "unknown-launcher": ["launcher='mpirun'"],
    "launcher-mismatch": ["launcher='openmpi'"],
    "usage": [
        *(
            "None",
            "3",
            "['torch']",
            "join_timeout=0",
            "timeout=-1",
            "timeout=True",
            "timeout=10**400",
            "timeout='30'",
            "join_timeout='30'",
        ),
        *(
            "backend=1",
            "backend=''",
            "backend=b'gloo'",
            "pass_local_rank='no'",
            "'torch', strategy='mirrored'",
        ),
        *("'mpi', timeout=5", "'mpi', backend='gloo'", "'none', backend='gloo'"),
    ],
}


def test_wrong_arguments(run: Run) -> None:
    calls = [(code, arguments) for code, each in _WRONG.items() for arguments in each]
    result = run(
        sys.executable,
        "-c",
        "".join(_FAILING.format(arguments=arguments) for _, arguments in calls),
    )
    found = [line.split("|")[:2] for line in result.stdout.splitlines() if line.count("|") >= 2]
    assert found == [[code, "True"] for code, _ in calls], result.stdout + result.stderr
    assert "did you mean 'openmpi'?" in result.stdout


@pytest.mark.all
def test_torch_that_cannot_be_used(run: Run) -> None:
    failing = _FAILING.format(arguments="")
    found = "u.find_spec = find\ndel sys.modules['torch']\n"
    # Stands in for one
    too_old = "import torch; real, torch.__version__ = torch.__version__, '1.13.1+cpu'\n"
    there = "torch.__version__ = real; import torch.distributed as d\n"
    there += "d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)\n"
    script = [HIDE.format(module="torch"), failing, found, too_old, failing, there, failing]
    result = run(sys.executable, "-c", "".join(script))
    missing, too_old, there = re.split(
        r"\n(?=framework-not-installed\||already-initialized\|)", result.stdout
    )
    assert missing.startswith("framework-not-installed|True|")
    assert "hint: pip install torch" in missing
    assert too_old.startswith("framework-not-installed|True|")
    assert "torch 1.13.1+cpu is older than 2.2" in too_old
    assert there.startswith("already-initialized|True|")


_CODE = """
import distboot
try:
    distboot.init("torch", join_timeout=60)
except distboot.DistbootError as error:
    print(error.code)
"""


def test_ranks_that_contradict_each_other_all_say_so(run_ranks: RunRanks) -> None:
    ended = run_ranks(_CODE, places=[{"LOCAL_RANK": "0"}] * 2)
    assert [rank.out for rank in ended] == ["membership-mismatch\n"] * 2


def _broken_torch(folder: Path, fails: str) -> dict[str, str]:
    (folder / "broken").mkdir()
    (folder / "broken" / "torch.py").write_text(fails)
    return {"PYTHONPATH": f"{folder / 'broken'}:{ROOT}"}


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_lacks_reaches_all(run_ranks: RunRanks, tmp_path: Path, rank: int) -> None:
    lacking = _broken_torch(tmp_path, "raise ModuleNotFoundError(name='torch')")
    ended = run_ranks(_CODE, places=[lacking if each == rank else {} for each in range(2)])
    assert [rank.out for rank in ended] == ["framework-not-installed\n"] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_invalid_setting_of_one_rank_reaches_all(run_ranks: RunRanks, rank: int) -> None:
    invalid = {"DISTBOOT_GRACE": "soon", "DISTBOOT_JOIN_TIMEOUT": "later"}
    script = "import distboot; distboot.init('none')"
    ended = run_ranks(script, places=[invalid if each == rank else {} for each in range(2)])
    assert [each.code for each in ended] == [78, 78]
    for each in ended:
        assert "DISTBOOT_GRACE='soon' is not a valid number of seconds" in each.err


def test_file_that_hides_the_framework_is_named(run: Run, tmp_path: Path) -> None:
    hidden = _broken_torch(tmp_path, "")
    ended = run(sys.executable, "-c", "import distboot; distboot.init('torch')", env=hidden)
    assert f"the file '{tmp_path}/broken/torch.py' hides the package torch" in ended.stderr


def test_rank_that_dies_before_the_framework_is_named(run_ranks: RunRanks, tmp_path: Path) -> None:
    places: list[dict[str, str]] = [{}, _broken_torch(tmp_path, "import os; os._exit(9)")]
    survivor, culprit = run_ranks("import distboot; distboot.init()", places=places)
    assert culprit.code == 9
    assert "error[rank-failed]" in survivor.err
    assert (
        f"rank 1 (process {culprit.pid} on '{socket.gethostname()}') joined, and ended before"
        in survivor.err
    )


def test_failing_import_is_reported_before_later_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    (tmp_path / "torch.py").write_text(
        "import sys\nsys.attempts = getattr(sys, 'attempts', 0) + 1\nraise ImportError(f'attempt {sys.attempts}')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    job = Session(detect({}), 1.0)
    preload(Options("torch"), job)
    with pytest.raises(DistbootError, match="attempt 1"):
        job.ready(lambda: (imported("torch"), Ready()))


def test_ctrl_c_while_meeting_interrupts_the_script(start_init: Start) -> None:
    job = start_init("", 1, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    until(lambda: "ranks joined; missing: " in job.output(0))
    job.processes[0].send_signal(signal.SIGINT)
    assert job.codes() == [128 + signal.SIGINT]
    output = job.output(0)
    assert output.count("Traceback") == 1
    assert "stopped by an external SIGINT before all ranks had joined" in output
    assert output.count("distboot/") == 1  # the line of `init` in the traceback


def test_ctrl_c_ends_a_single_process_as_usual(run: Run) -> None:
    script = (
        "import os, signal, distboot\ndistboot.init('none')\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    assert run(sys.executable, "-c", script).returncode == -signal.SIGINT


_CAUGHT = """
try:
    distboot.init("none")
except distboot.DistbootError:
    pass
class OfAnotherLibrary(Exception):
    exit_code = 5
raise OfAnotherLibrary
"""


@pytest.mark.parametrize(
    ("script", "code"), [("distboot.init('none')", 78), (_CAUGHT, 1)], ids=["ours", "of others"]
)
def test_only_errors_of_init_set_the_exit_code(run: Run, script: str, code: int) -> None:
    done = run(sys.executable, "-c", f"import distboot\n{script}", env={"WORLD_SIZE": "4"})
    assert done.returncode == code, done.stderr
