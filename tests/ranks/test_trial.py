"""`python -m distboot try`: mistakes that only show elsewhere are found; a script without them is left alone."""

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Run
from inside import INTERNAL, RANK, trial
from launched import needs, needs_torch
from supervised import until

from distboot import DistbootError

_BEGIN = """
import os, sys, tempfile, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
"""
_BEGIN_WITHOUT_TORCH = """
import tempfile, time, distboot
ctx = distboot.init("none")
rank = ctx.rank
"""
_END = "dist.all_reduce(torch.ones(1))\ndist.destroy_process_group()\n"
# What is wrong, the launch in which it does not show, the one in which it does, its columns there, and what is said.
PLANTED = {
    "device": (
        "torch.cuda.set_device(rank)\n" + _END,
        "mpirun 1x1",
        "mpirun 2x1",
        ("", "wrong", "no", "together"),
        (
            r"rank 1 takes device 1 of a node that has 1 accelerators? \(train\.py:\d+\): "
            r"use the local rank"
        ),
    ),
    "data": (
        (
            "path = tempfile.gettempdir() + '/data'\nif rank == 0:\n    open(path, 'w').close()\n"
            "ctx.barrier()\nopen(path)\n"
        ),
        "srun 1x2",
        "srun 2x1",
        ("no", "-", "no", "together"),
        r"rank 1 failed first: .*FileNotFoundError: .*, in <module> \(train\.py:\d+\)",
    ),
    "hang": (
        (
            "def load_batch():\n    while rank == 1:\n        time.sleep(1)\nload_batch()\n"
            "ctx.barrier()\n"
        ),
        "torchrun 1x1",
        "torchrun 2x1",
        ("no", "-", "yes", "together"),
        r".*rank 1 .*load_batch \(train\.py:\d+\)",
    ),
    "end": (
        (
            "for step in range(3 if rank < 2 else 2):\n    dist.all_reduce(torch.ones(1))\n"
            # Else Gloo's threads may abort a process that ends just before another one
            "dist.destroy_process_group()\nsys.exit(0)\n"
        ),
        "azureml mpi 1x2",
        "azureml mpi 2x2",
        ("no", "-", "no", "apart"),
        r"ranks? [23].* exited with code 0 while ",
    ),
}


def _try(
    run: Run, *arguments: str, train: str | None = None
) -> tuple[int, dict[str, list[str]], str]:
    """Exit code, the columns of each launch, and everything."""
    done = run(sys.executable, "-m", "distboot", "try", *arguments, train=train, timeout=200)
    rows = [
        re.split(r"  +", line.strip())
        for line in done.stdout.splitlines()[1:]
        if not line.startswith(" ")
    ]
    return done.returncode, {row[0]: row[1:] for row in rows}, done.stdout + done.stderr


@needs_torch
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "data" else pytest.mark.all) for name in PLANTED],
)
def test_mistake_hidden_on_one_node_is_found(run: Run, name: str) -> None:
    script, hidden, shown, columns, said = PLANTED[name]
    begin = _BEGIN_WITHOUT_TORCH if "ctx." in script else _BEGIN
    code, rows, output = _try(run, "--as", hidden, "--as", shown, "train.py", train=begin + script)
    assert rows[hidden][0].endswith(" s"), output
    assert rows[hidden][2:] == ["no", "together"], output
    assert all(got == wanted for got, wanted in zip(rows[shown], columns, strict=True) if wanted), (
        output
    )
    assert re.search(said, output), output
    assert code == 1


@pytest.mark.all
@needs_torch
@pytest.mark.parametrize("method", ['init_method="env://"', '"env://"'], ids=["keyword", "place"])
def test_address_that_is_each_node_itself_is_found(run: Run, tmp_path: Path, method: str) -> None:
    begin = 'export MASTER_ADDR=$(scontrol show hostnames "$NONE" 2>/dev/null || echo localhost)\n'
    (tmp_path / "run.sh").write_text(f"{begin}exec {sys.executable} train.py\n")
    both = ("--as", "srun 1x2", "--as", "srun 2x1")
    script = _BEGIN.replace('"gloo"', f'"gloo", {method}') + _END
    code, rows, output = _try(run, *both, "--", "sh", "run.sh", train=script)
    assert rows["srun 1x2"][0].endswith(" s"), output
    assert rows["srun 2x1"][0] == "no"
    assert re.search(
        r"rank 0 looks for rank 0 at localhost, which works on one node only \(train\.py:\d+\)",
        output,
    )
    assert code == 1


_DIGITS = (str(ROOT / "examples" / "train_digits_distboot.py"), "--epochs", "1")


@pytest.mark.all
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(("train.py",), id="barrier"),
        # 18 times an import of torch
        pytest.param(_DIGITS, id="digits", marks=needs_torch),
    ],
)
def test_script_without_them_is_left_alone(run: Run, script: tuple[str, ...]) -> None:
    code, rows, output = _try(run, *script, train=_BEGIN_WITHOUT_TORCH + "ctx.barrier()\n")
    assert code == 0, output
    assert list(rows) == ["mpirun 1x2", "mpirun 2x2", "srun 2x2", "torchrun 2x2", "kubeflow 3+1"]
    running = [line for line in output.splitlines() if line.startswith("distboot: trying ")]
    assert running[1] == "distboot: trying mpirun 2x2 (2 of 5) …"
    assert len(output.splitlines()) == 1 + len(rows) + len(running), output


def test_quiet_prints_only_what_is_wrong(run: Run) -> None:
    fails = "import os, sys\nsys.exit(int(os.environ['WORLD_SIZE']) - 1)\n"
    shapes = ("--as", "mpirun 1x1", "--as", "mpirun 1x2")
    command = (sys.executable, "-m", "distboot", "try", "-q", *shapes, "train.py")
    done = run(*command, train=fails, timeout=200)
    assert done.returncode == 1
    head, row, *_ = done.stdout.splitlines()
    assert head.startswith("as          runs ")
    assert row.startswith("mpirun 1x2  no ")
    assert "1x1" not in done.stdout
    assert done.stderr == ""


# 1 on each rank, as no mpirun has started it
_OF_MPI = "from mpi4py import MPI\nprint(MPI.COMM_WORLD.Get_size())"


@needs("mpi4py")
@pytest.mark.parametrize("script", [_OF_MPI, "import distboot\ndistboot.init('mpi')"])
def test_script_that_calls_mpi_cannot_be_tried(run: Run, script: str) -> None:
    code, rows, output = _try(run, "--as", "mpirun 1x2", "train.py", train=script)
    assert (code, rows) == (1, {"mpirun 1x2": ["-"] * 4}), output
    assert "not tried: the script calls MPI_Init, for which the real mpirun" in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--as", "mpirnu 2x2", "x.py"], "did you mean 'mpirun'? one of mpirun, "),
        (["--as", "mpirun 0x2", "x.py"], "--as 'mpirun 0x2' is not a launcher and a shape"),
        (["--as", "mpirun", "x.py"], "--as 'mpirun' lacks the number of nodes and ranks"),
        (["--as", "kubeflow 2x2", "x.py"], "use 4 pods: --as 'kubeflow 4x1'"),
        (["--as", "srun 3+1", "x.py"], "only kubeflow has a master beside workers"),
        (["--as", "srun 5x13", "x.py"], "'srun 5x13' has 65 ranks; at most 64 run on one machine"),
        (["--as", "kubeflow 64+1", "x.py"], "has 65 ranks; at most 64 run on one machine"),
        (["--as", "kubeflow 2x2", "x.py"], "a pod of a PyTorchJob has one process"),
        (["--as", "srun 2x2"], "there is no script to try"),
        (["--timeout", "nan", "x.py"], "--timeout nan is not a valid number of seconds"),
        (["--tiemout", "3", "x.py"], "did you mean '--timeout'?"),
    ],
)
def test_bad_input(run: Run, arguments: list[str], said: str) -> None:
    code, _, output = _try(run, *arguments)
    assert (code, said in output) == (2, True), output


@pytest.mark.parametrize(
    ("train", "arguments", "warning"),
    [
        ("", ("--as", "mpirun 1x1"), "warning: --as after the script: passed to the script, "),
        ("", ("--as=x", "--timeout", "3"), "warning: --as and --timeout after the script: "),
        ("", ("--timeout", "3"), ""),
        ("# --as\n", ("--as", "x"), ""),
        ("import os as o\n", ("--as", "x"), "warning: --as after the script: "),
    ],
)
def test_option_after_the_script_is_warned_of(
    run: Run, train: str, arguments: tuple[str, ...], warning: str
) -> None:
    given = ("--as", "mpirun 1x1", "-q", "train.py", *arguments)
    code, _, text = _try(run, *given, train=train)
    assert code == 0, text
    assert ("after the script" in text) == bool(warning), text
    assert warning in text


def test_script_that_is_not_there_is_said_once(run: Run) -> None:
    code, rows, output = _try(run, "--as", "mpirun 1x1", "no-such.py")
    assert (code, rows) == (127, {})
    assert output.count("there is no script 'no-such.py'") == 1


@pytest.mark.all
@pytest.mark.parametrize("variable", ["DISTBOOT_LAUNCHER=none", "DISTBOOT_NPROC_PER_NODE=2"])
def test_launcher_of_the_user_is_not_tried(run: Run, variable: str) -> None:
    checks = """
import distboot
ctx = distboot.init("none")
assert (ctx.world_size, ctx.num_nodes, ctx.local_world_size) == (4, 2, 2)
ctx.barrier()
"""
    name, _, value = variable.partition("=")
    command = (sys.executable, "-m", "distboot", "try", "--as", "srun 2x2", "train.py")
    done = run(*command, train=checks, env={name: value})
    assert done.returncode == 0, done.stdout + done.stderr


def test_variables_of_an_outer_distboot_are_removed() -> None:
    outer = dict.fromkeys((*INTERNAL, *RANK, "NUM_NODES"), "outer")
    for environ in trial.parse("srun 1x2").environs(29500, {**outer, "DISTBOOT_GRACE": "3"}):
        assert "outer" not in environ.values()
        assert environ["DISTBOOT_GRACE"] == "3"


def test_files_that_jobs_leave_are_not_touched(run: Run, tmp_path: Path) -> None:
    left = {"DISTBOOT_BAD_HOSTS_FILE": "bad-hosts", "DISTBOOT_METRICS": "job.prom"}
    fails = """
import os, distboot
distboot.init("none")
assert os.environ["DISTBOOT_KUBEFLOW_STATUS"] == "0"
raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
"""
    env = {name: str(tmp_path / file) for name, file in left.items()}
    command = (sys.executable, "-m", "distboot", "try", "--as", "srun 2x1", "train.py")
    done = run(*command, train=fails, env=env)
    assert "uncorrectable ECC error" in done.stdout + done.stderr
    assert not {path.name for path in tmp_path.iterdir()} & set(left.values())


def test_several_nodes_need_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [("lo", "127.0.0.1"), ("lo", "::1"), ("eth0", "2001:db8::7")]
    monkeypatch.setattr("distboot.tools.trial._address_of_route", lambda: None)
    monkeypatch.setattr("distboot.host.network.addresses", lambda: own)
    several = trial.parse("mpirun 2x1")
    assert several.environs(29500, {})[1]["MASTER_ADDR"] == "2001:db8::7"
    del own[2]
    with pytest.raises(DistbootError, match="loopback is its only interface"):
        several.environs(29500, {})
    assert trial.parse("mpirun 1x2").environs(29500, {})[1]["MASTER_ADDR"] == "127.0.0.1"


_SLEEPS = """
import os, pathlib, time
pathlib.Path(f"pid-{os.environ['RANK']}.part").write_text(str(os.getpid()))
os.rename(f"pid-{os.environ['RANK']}.part", f"pid-{os.environ['RANK']}")
time.sleep(300)
"""


@pytest.mark.parametrize(
    ("numbers", "prefix", "code"),
    [
        pytest.param([signal.SIGINT], [], -signal.SIGINT, id="INT"),
        pytest.param([signal.SIGTERM], [], 128 + signal.SIGTERM, id="TERM"),
        pytest.param([signal.SIGHUP], [], 128 + signal.SIGHUP, id="HUP"),
        # Python handles the lower number, HUP, first.
        pytest.param([signal.SIGHUP, signal.SIGTERM], ["nohup"], 128 + signal.SIGTERM, id="nohup"),
    ],
)
def test_signal_ends_all_ranks(
    clean_env: dict[str, str], tmp_path: Path, numbers: list[int], prefix: list[str], code: int
) -> None:
    (tmp_path / "train.py").write_text(_SLEEPS)
    folders = tmp_path / "tmp"
    folders.mkdir()
    command = [sys.executable, "-m", "distboot", "try", "--as", "mpirun 1x2", "train.py"]
    tried = subprocess.Popen(
        [*prefix, *command],
        cwd=tmp_path,
        env={**clean_env, "TMPDIR": str(folders)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    files = [tmp_path / "pid-0", tmp_path / "pid-1"]
    pids: list[int] = []
    try:
        until(lambda: all(file.exists() for file in files))
        pids += [int(file.read_text()) for file in files]
        for number in numbers:
            tried.send_signal(number)
        assert tried.wait(60) == code
        assert not any(map(_is_running, pids))
        assert list(folders.iterdir()) == []
    finally:
        tried.kill()
        tried.wait()
        for pid in filter(_is_running, pids):
            os.kill(pid, signal.SIGKILL)


_LEAVES_A_PROCESS = """
import os, subprocess, sys, time
writes = "import time; [(open(str(n), 'w'), time.sleep(0.005)) for n in range(600)]"
subprocess.Popen([sys.executable, "-c", writes], start_new_session=True, cwd=os.environ["TMPDIR"])
"""


def test_process_that_is_left_costs_no_verdict(run: Run) -> None:
    code, rows, output = _try(run, "--as", "mpirun 1x2", "train.py", train=_LEAVES_A_PROCESS)
    assert (code, list(rows)) == (0, ["mpirun 1x2"]), output


def test_no_temporary_folder_is_one_error(run: Run) -> None:
    script = """if True:
        import sys, tempfile
        from distboot.cli.main import main
        tempfile.tempdir = "/nowhere"
        sys.exit(main(["try", "--as", "mpirun 1x2", "train.py"]))
    """
    ended = run(sys.executable, "-c", script, train="")
    assert ended.returncode == 74
    said = "error[output-failed]: no temporary folder can be made: No such file or directory"
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# A process cannot start with this: an error, if one is started
_INVALID = {"NAME": "with a null character: \0"}


def test_timeout_ends_the_start_of_ranks() -> None:
    codes = trial.run(["sleep", "30"], [dict(os.environ), _INVALID], 0.0)
    assert codes == [None, None]


def test_signal_ends_the_start_of_ranks() -> None:
    def send_term() -> None:
        os.kill(os.getppid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as stopped:
        trial.run(["sleep", "30"], [dict(os.environ), _INVALID], 60.0, preexec_fn=send_term)
    assert stopped.value.code == 128 + signal.SIGTERM


def test_start_that_fails_ends_all_ranks() -> None:
    reading, writing = os.pipe()
    handlers = [*map(signal.getsignal, (signal.SIGTERM, signal.SIGHUP))]
    try:
        with pytest.raises(ValueError, match="null byte"):
            trial.run(["sleep", "30"], [dict(os.environ), _INVALID], 60.0, stdout=writing)
    finally:
        os.close(writing)
    # The pipe ends with the last process that can write to it
    ended, _, _ = select.select([reading], [], [], 0)
    os.close(reading)
    assert ended == [reading]
    assert [*map(signal.getsignal, (signal.SIGTERM, signal.SIGHUP))] == handlers
