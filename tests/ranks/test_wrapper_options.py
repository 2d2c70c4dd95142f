"""What the wrapper does besides starting a command: `--exec`, `--pass-local-rank`, and a warning of ranks apart."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from captured import one
from conftest import Run
from inside import Target, missing_framework_option, nested_launcher, parse, run_parser
from launched import MPI_ENV, MPIRUN, json_lines, needs_mpirun, needs_torch
from ranks import WRAPPER, RunRanks

from distboot import detect

SAY = """
import json, os, sys
state = {"arguments": sys.argv[1:], "rank": os.environ.get("RANK"), "pid": os.getpid()}
sys.stdout.write(json.dumps(state) + "\\n")
"""
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


# Invalid options and settings of one of two ranks, or nodes: the exit code of both, and the reason
INVALID: dict[str, tuple[list[str], dict[str, str], int, str]] = {
    "setting": ([], {"DISTBOOT_GRACE": "soon"}, 78, "DISTBOOT_GRACE='soon' is not a valid"),
    "value": (["--grace", "soon"], {}, 2, "--grace='soon' is not a valid"),
    "option": (["--grase", "5"], {}, 2, "unrecognized arguments: --grase"),
    "framework": (["--framework", "jax2"], {}, 2, "'jax2' is not a valid framework"),
    "node": (["--nproc-per-node", "1", "--grace", "soon"], {}, 2, "--grace='soon' is not a valid"),
}


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "say.py").write_text(SAY)
    return "say.py"


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (["--pass-local-rank", "say.py"], ["--local_rank=0", "--epochs", "3"]),
        (["--pass-local-rank=--gpu", "say.py"], ["--gpu=0", "--epochs", "3"]),
        (["--local-rank=0", "say.py"], ["--epochs", "3"]),  # which a launcher has put there
        (["--local_rank=0", "--pass-local-rank", "say.py"], ["--local_rank=0", "--epochs", "3"]),
        (
            ["run", "--pass-local-rank", "--", sys.executable, "say.py"],
            ["--epochs", "3", "--local_rank=0"],
        ),
    ],
)
def test_local_rank_as_an_argument(
    distboot: Run, script: str, options: list[str], arguments: list[str]
) -> None:
    (line,) = json_lines(distboot(*options, "--epochs", "3", env=ALONE))
    assert line["arguments"] == arguments, script


def test_local_rank_that_one_process_cannot_tell(distboot: Run, script: str) -> None:
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    done = distboot("run", "--pass-local-rank", script, env={**job, "DISTBOOT_RENDEZVOUS": "0"})
    assert (done.returncode, done.stdout) == (78, "")
    assert "error[rendezvous-needed]: rank 1 on " in done.stderr


def test_options_are_the_same_without_argparse() -> None:
    by_argparse = run_parser().parse_args([])
    options, _ = parse(["say.py"], {})
    assert vars(options) == vars(by_argparse)


@pytest.mark.all
@needs_torch
@pytest.mark.parametrize(
    "command",
    [
        pytest.param([], id="script"),
        pytest.param(["run"], id="run"),
        pytest.param(["run", "--", sys.executable], id="run --"),
    ],
)
def test_launcher_passes_local_rank_to_unprepared_script(
    run: Run, script: str, command: list[str]
) -> None:
    # It puts --local-rank=N before `run`.
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.launch",
        "--nproc-per-node",
        "1",
        "-m",
        "distboot",
        *command,
    ]
    assert [line["arguments"] for line in json_lines(run(*launch, script, "--epochs", "3"))] == [
        ["--epochs", "3"]
    ]


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (["say.py", "--local_rank"], True),
        (["say.py", "--local_rank", "", "--lr", "1"], True),
        (["run", "--", sys.executable, "-u", "say.py", "--local-rank="], True),
        (["run", "--pass-local-rank", "say.py", "--local_rank", ""], False),
        (["say.py", "--local_rank", "0"], False),
    ],
)
def test_local_rank_that_a_shell_took_too_early(
    distboot: Run, script: str, options: list[str], warned: bool
) -> None:
    done = distboot(*options, env=ALONE)
    (line,) = json_lines(done)
    said = (
        "has no value (a shell replaces $LOCAL_RANK before LOCAL_RANK is set): "
        "leave it out, and pass it with python"
    )
    assert (said in done.stderr) == warned, (script, done.stderr)
    assert warned or line["arguments"] in (["--local_rank=0"], ["--local_rank", "0"])


@needs_mpirun
def test_exec_becomes_the_command_in_every_rank(run: Run, script: str) -> None:
    launch = [str(MPIRUN), "--map-by", ":OVERSUBSCRIBE", "-n", "2", "sh", "-c"]
    wrapper = f'echo "{{\\"shell\\": $$}}"; exec {sys.executable} -m distboot run --exec {script}'
    done = run(*launch, wrapper, env=MPI_ENV)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    said = [line for line in lines if "pid" in line]
    assert sorted(line["rank"] for line in said) == ["0", "1"], done.stderr
    assert {line["pid"] for line in said} == {line["shell"] for line in lines if "shell" in line}


@pytest.mark.parametrize(
    ("text", "before", "starts"),
    [
        ("import horovod.torch as hvd", (), "starts horovod"),
        ("strategy = tf.distribute.MultiWorkerMirroredStrategy()", (), "starts tensorflow"),
        ("jax.distributed.initialize()", (), "starts jax"),
        ("import horovod.torch as hvd", ("--framework", "none"), ""),
        ("import distboot\nimport horovod.torch as hvd", (), ""),
        ("pass  # import horovod", (), ""),
        ("'values that come from horovod'", (), ""),
        ('"""Note: from horovod this differs\n"""', (), ""),
        ("import torch as t, horovod.torch as hvd", (), "starts horovod"),
        ("import os; from horovod import torch", (), "starts horovod"),
        ("x = 'a'; import horovod.torch as hvd", (), "starts horovod"),
        ('"""\nimport distboot\n"""; import horovod.torch as hvd', (), "starts horovod"),
        ('"""\nimport horovod\n"""', (), ""),
        ("from distboot import detect\nimport horovod.torch as hvd", (), "starts horovod"),
        ("from distboot import init\nimport horovod.torch as hvd", (), ""),
        ("from .distboot import init\nimport horovod.torch as hvd", (), "starts horovod"),
        ("import horovod.torch as hvd", ("--", sys.executable), "starts horovod"),
        (
            "import horovod.torch as hvd",
            ("--", "python3", "-u", "-W", "ignore"),
            "starts horovod",
        ),
        ("if __name__ == '__main__':\n    import horovod.torch", (), "starts horovod"),
        ("if args.horovod:\n    import horovod.torch as hvd", (), "may start horovod"),
        ("if TYPE_CHECKING:\n    import horovod.torch", (), ""),
        ("if typing.TYPE_CHECKING:\n    import horovod.torch", (), ""),
        (
            "if TYPE_CHECKING:\n    import distboot\nimport horovod.torch as hvd",
            (),
            "starts horovod",
        ),
        ("try: import horovod.x\nexcept ImportError: hvd = None", (), "may start horovod"),
        ("def main():\n    jax.distributed.initialize()", (), "may start jax"),
        ("main = lambda: jax.distributed.initialize()", (), "may start jax"),
        ("args.jax and jax.distributed.initialize()", (), "may start jax"),
        ("jax.distributed.initialize() if args.jax else None", (), "may start jax"),
    ],
)
def test_script_whose_ranks_train_apart_is_warned_of(
    run_ranks: RunRanks, tmp_path: Path, text: str, before: tuple[str, ...], starts: str
) -> None:
    for framework in ("horovod", "jax"):  # that are installed, as far as the wrapper sees
        (tmp_path / framework).mkdir()
        (tmp_path / framework / "__init__.py").touch()
    ended = run_ranks(f"raise SystemExit\n{text}\n", "--epochs", "3", before=(*WRAPPER, *before))
    script = tmp_path / "train.py"
    command = f"-- python {script}" if "--" in before else str(script)
    said = (
        f"warning: {script} {starts}, which reads variables of its own, and "
        "without them each rank trains separately: "
        f"python -m distboot run --framework {starts.rpartition(' ')[2]} {command}\n"
    )
    assert [(rank.code, rank.err.count("warning")) for rank in ended] == [
        (0, bool(starts)),
        (0, 0),
    ], ended
    assert (said in ended[0].err) == bool(starts)


@pytest.mark.parametrize(
    "text",
    [
        "try: import horovod.torch as hvd\nexcept ImportError: hvd = None",
        "if args.horovod:\n    import horovod.torch as hvd",
    ],
)
def test_missing_framework_may_not_be_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import horovod.torch as hvd")
    target = Target([sys.executable, str(script)], 2)
    placement = detect({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node-0"})
    warning = missing_framework_option(target, "torch", placement, {}, None)
    assert warning is not None
    assert "train.py starts horovod" in warning
    without = [folder for folder in sys.path if not (Path(folder) / "horovod").exists()]
    monkeypatch.setattr(sys, "path", without)  # as where it is not installed
    script.write_text(text)
    other = Target([sys.executable, str(script)], 2)
    assert missing_framework_option(other, "torch", placement, {}, None) is None


_IMPORT = "from mpi4py import MPI\n"


@pytest.mark.parametrize(
    ("count", "text", "is_said"),
    [
        ("2", _IMPORT, True),
        ("2", "import sys, mpi4py.MPI as MPI\n", True),
        ("2", f"import sys; {_IMPORT}", True),
        ("2", f'"""\nimport distboot\n"""\n{_IMPORT}', True),
        ("2", f"try:\n    import sys\n    {_IMPORT}except ImportError:\n    raise\n", True),
        ("2", f"if __name__ == '__main__':\n    {_IMPORT}", True),
        ("2", f"if 'mpi' in []:\n    {_IMPORT}", False),
        ("2", f"with suppress(ImportError):\n    from mpi4py_fft import x\n{_IMPORT}", True),
        ("2", f"for name in []:\n    {_IMPORT}", False),
        ("2", f"try:  # there may be none\n    {_IMPORT}except ImportError:\n    pass\n", True),
        ("2", "try:\n    from mpi4py_fft import x\nexcept ImportError:\n    pass\n", False),
        ("2", f"def save():\n    {_IMPORT}", False),
        ("2", f"import distboot\n{_IMPORT}", False),
        ("1", _IMPORT, False),
    ],
)
def test_script_without_its_mpi_is_warned_of(
    distboot: Run, tmp_path: Path, count: str, text: str, is_said: bool
) -> None:
    script = f"\ufeffraise SystemExit\n{text}"  # with the mark of an editor
    (tmp_path / "mpi4py.py").touch()
    done = distboot("run", "--nproc-per-node", count, "train.py", train=script)
    said = "warning: train.py imports mpi4py, and launcher 'distboot' has not started MPI"
    assert (done.returncode, said in done.stderr) == (0, is_said), done.stderr


def test_number_too_long_to_print_is_read(distboot: Run) -> None:
    script = f"raise SystemExit\nif 0x{'f' * 5000}:\n    {_IMPORT}"
    done = distboot("run", "--nproc-per-node", "2", "train.py", train=script)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize(
    "environ",
    [
        one("slurm-srun-22.05.8/2nodes_2procs", 1),
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "1"},
    ],
    ids=["srun", "by-hand"],
)
def test_framework_mpi_without_mpi_is_refused(distboot: Run, environ: dict[str, str]) -> None:
    environ = {"MASTER_ADDR": "10.0.0.4", **environ}
    done = distboot("run", "--framework", "mpi", "--", "true", env=environ)
    assert done.returncode == 78, done.stderr
    assert "error[mpi-mismatch]: rank 1 on " in done.stderr
    assert "has not started MPI: each rank would be a world of its own" in done.stderr


@pytest.mark.parametrize(
    ("count", "target", "is_said"),
    [("1", "train.py", False), ("2", "train.py", True), ("2", "-m train", True)],
)
def test_ranks_training_apart_on_one_node_are_warned(
    distboot: Run, count: str, target: str, is_said: bool
) -> None:
    script = "raise SystemExit\nimport horovod.torch as hvd\n"
    words = target.split()
    done = distboot("run", "--nproc-per-node", count, *words, train=script)
    remedy = (
        f"warning: {target} starts horovod, which reads variables of its own, and without them "
        "each rank trains separately: python -m distboot run --framework horovod "
        f"--nproc-per-node {count} {target}\n"
    )
    assert (done.returncode, remedy in done.stderr) == (0, is_said), done.stderr


@needs_mpirun
def test_launcher_in_each_ranks_shell_is_warned_of(distboot: Run) -> None:
    command = ["sh", "-c", "mpirun -n 1 true >/dev/null 2>&1; true"]
    done = distboot("run", "--nproc-per-node", "2", "--", *command)
    assert (
        "warning: each rank of --nproc-per-node 2 starts mpirun, which starts a job of its own"
        in done.stderr
    )
    assert "each rank ran mpirun for a job of its own" in done.stderr


@needs_mpirun
@pytest.mark.parametrize("guard", ['[ "$RANK" = 0 ] || exit 0;', '[ "$RANK" = 0 ] && cd . &&'])
def test_launcher_of_one_rank_is_not_warned_of(distboot: Run, guard: str) -> None:
    command = ["sh", "-c", f"{guard} mpirun -n 1 true >/dev/null 2>&1; true"]
    done = distboot("run", "--nproc-per-node", "2", "--", *command)
    assert (done.returncode, "mpirun" in done.stderr) == (0, False), done.stderr
    assert "all ended well" in done.stderr


def test_launcher_behind_a_prefix_is_refused(distboot: Run) -> None:
    command = ["timeout", "30", "mpirun", "-n", "1", "true"]
    done = distboot("run", "--nproc-per-node", "2", "--", *command)
    assert done.returncode == 2, done.stderr
    assert "leave mpirun out" in done.stderr


_ADDS_LOCAL_RANK = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument(
    "-r", "--local_rank", type=int, default=-1)
print(parser.parse_args().local_rank)
"""
_ADDS_NO_LOCAL_RANK = """
import sys
# parser.add_argument("--local_rank")
print(sys.argv[1:], any(word.startswith("--local_rank") for word in sys.argv))
"""
_WANTS_LOCAL_RANK = "import sys\noption = '--local_rank'\nprint(sys.argv[1:] == [f'{option}=0'])\n"


@pytest.mark.parametrize("node", [[], ["--nproc-per-node", "1"]], ids=["rank", "node"])
@pytest.mark.parametrize("command", [[], ["run"]])
@pytest.mark.parametrize(
    ("script", "printed"),
    [
        (_ADDS_LOCAL_RANK, "0\n"),
        (_ADDS_LOCAL_RANK.replace('    "-r"', '    # of torchrun\n    "-r"'), "0\n"),
        (_ADDS_LOCAL_RANK.replace('"-r"', '"-r",  # its name\n    *()'), "0\n"),
        (_ADDS_LOCAL_RANK.replace("parser = ", "text = '#1'; parser = "), "0\n"),
        (_ADDS_NO_LOCAL_RANK, "[] False\n"),
    ],
)
def test_script_that_asks_gets_the_local_rank(
    distboot: Run, node: list[str], command: list[str], script: str, printed: str
) -> None:
    words = ["--local-rank=0", *command, *node, "train.py"]
    done = distboot(*words, train=script, env={} if node else ALONE)
    assert (done.stdout, done.returncode) == (printed, 0), done.stderr


@pytest.mark.parametrize("node", [[], ["--nproc-per-node", "1"]], ids=["rank", "node"])
def test_script_for_deepspeed_gets_the_local_rank(distboot: Run, node: list[str]) -> None:
    done = distboot(
        "run",
        "--framework",
        "deepspeed",
        *node,
        "train.py",
        train=_WANTS_LOCAL_RANK,
        env={} if node else ALONE,
    )
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


@pytest.mark.parametrize("node", [[], ["--nproc-per-node", "1"]], ids=["rank", "node"])
def test_parameter_servers_without_use_are_refused(distboot: Run, node: list[str]) -> None:
    script = "if False:\n    MultiWorkerMirroredStrategy()\n"
    cluster = {"chief": ["localhost:2222"], "ps": ["localhost:2223"]}
    config = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
    command = ("run", "--framework", "tensorflow", *node, "train.py")
    done = distboot(*command, train=script, env={"TF_CONFIG": config})
    assert (done.returncode, "TF_CONFIG has parameter servers" in done.stderr) == (2, True), (
        done.stderr
    )


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("torchrun train.py", "torchrun"),
        ("torchrun --nnodes=1:1 train.py", "torchrun"),
        ("torchrun --nnodes 1:4 train.py", "torchrun, together"),
        ("python3 -u -m torch.distributed.launch --nnodes=2 train.py", "torchrun, together"),
        ("python -mtorch.distributed.run train.py", "torchrun"),
        ("deepspeed train.py", "deepspeed"),
        ("deepspeed --hostfile hosts --no_ssh --node_rank 1 train.py", "deepspeed, together"),
        ("accelerate launch --multi_gpu train.py", "accelerate"),
        ("accelerate launch --multi_gpu --num_machines 2 train.py", "accelerate, together"),
        ("accelerate launch train.py", None),  # with one device it is the rank itself
        ("/usr/bin/mpirun.openmpi -n 2 python train.py", "mpirun"),
        ("mpiexec.hydra -n 2 python train.py", "mpiexec"),
        ("horovodrun -np 2 python train.py", "horovodrun"),
        ("srun train.py", "srun"),
        ("./mpirun.sh", None),
        ("python train.py --nnodes 1", None),
        ("python -c pass torchrun", None),
        ("accelerate launch --num_processes 2 train.py", "accelerate"),
        ("accelerate env --multi_gpu", None),
        ("torchrun train.py --nnodes 4", "torchrun"),  # the script's own
        ("env -u A B=1 torchrun --standalone train.py", "torchrun"),
        ("env python -m torch.distributed.run train.py", "torchrun"),
        ("env A=1", None),
        ("nice", None),
        ("timeout 30 mpirun -n 2 python train.py", "mpirun"),
        ("/usr/bin/timeout -k 5 --signal=KILL 30 nice -n 5 mpirun -n 2 python a.py", "mpirun"),
        ("taskset -c 0-3 numactl -N 0 --membind=0 torchrun train.py", "torchrun"),
        ("stdbuf -oL -e 0 ionice -c2 -n 7 env A=1 torchrun train.py", "torchrun"),
        ("nohup setsid -w time -p python -m torch.distributed.run train.py", "torchrun"),
        ("timeout torchrun python train.py", None),  # a duration
        ("nice -n torchrun python train.py", None),
        ("mpirun_rsh -np 2 train.py", "mpirun_rsh"),
        ("python -m horovod.runner.launch -np 2 train.py", "horovodrun"),
    ],
)
def test_launcher_as_the_command_is_known(command: str, launcher: str | None) -> None:
    words = command.split()
    found = nested_launcher(Target(words, len(words)), {})
    if found and found.name == "torchrun":
        told = nested_launcher(Target(words, 0), {"PET_NNODES": "3"})
        assert told is not None
        assert told[:3] == ("torchrun", True, False)
    assert (found and f"{found.name}{', together' if found.spans_nodes else ''}") == launcher


@pytest.mark.parametrize(
    ("shell", "is_known"),
    [
        ("sh", True),
        ("bash -e", True),
        ("bash -euo pipefail", True),
        ("env A=1 bash -o pipefail --norc -l", True),
        ("timeout 30 nice bash -e", True),
        ("bash -e run.sh", False),
        ("python run.py", False),
    ],
)
def test_launcher_in_a_shell_is_known(shell: str, *, is_known: bool) -> None:
    words = [*shell.split(), "-c", "exec torchrun train.py"]
    found = nested_launcher(Target(words, len(words)), {})
    assert (found is not None and found.is_in_shell) == is_known


@pytest.mark.parametrize("option", ["--nnodes", "--report", "--log_dir", "--grace", "--framework"])
def test_dashes_are_no_value_of_an_option(distboot: Run, option: str) -> None:
    done = distboot("run", f"{option}=--", "--", "true")
    assert done.returncode == 2
    assert f"argument {option.replace('_', '-')}: expected one argument" in done.stderr


@pytest.mark.parametrize(
    ("text", "launcher"),
    [
        ("cd . && torchrun --standalone train.py", "torchrun"),
        ("pip install -r x.txt; exec env A=1 torchrun train.py 2>&1 | tee log", "torchrun"),
        ("set -e\nA='1 2' B=3 \\\n  nohup /opt/bin/torchrun \\\n  train.py &\nwait", "torchrun"),
        ("if test -f x; then pip install x; fi\npython -m torch.distributed.run a.py", "torchrun"),
        ("log() { echo; }\nexec > >(tee log) 2>&1\n{ echo; } ; exec mpirun train", "mpirun"),
        ("# options \\\ntorchrun --standalone \\\n--nproc-per-node 2 a.py", "torchrun"),
        ("x=$(mpirun -n 2 hostname)", None),
        ("if test $N = 1; then torchrun a.py; else python a.py; fi", None),
        ("case $1 in torchrun) exec torchrun a.py;; a|srun) ;; *) exec python a.py;; esac", None),
        ("[ $1 = a ] && torchrun a.py; true || torchrun b.py", None),
        ("torchrun() { python -m torch.distributed.run $@; }\nfunction f {\ntorchrun\n}", None),
        ("cat <<'EOF'\ntorchrun a.py # it's\nEOF\nCMDS=(torchrun deepspeed\nsrun)", None),
        ("cat <<EOF\nEOF\ntorchrun a.py", "torchrun"),
        ('exec "$@"\ntorchrun a.py', None),
        ("exit 0; torchrun a.py", None),
        ("mpirun --version; torchrun -h; which srun; command -v torchrun", None),
        ("mpirun --version 2>&1 | head -1\nsrun -V > /dev/null 2>&1; python a.py", None),
        ("torchrun --help &> /dev/null; deepspeed 2>'a b' -h </dev/null >>log; python a.py", None),
        ("2>log torchrun >&2 --nnodes=2 a.py", "torchrun, together"),
        ("exec 3>&1 > >(tee log) 2>&1; torchrun '>' --nnodes=2 a.py", "torchrun, together"),
        ("python train.py && 'accelerate' launch --multi_gpu train.py", "accelerate"),
        ("torchrun --standalone a.py\ntorchrun --nnodes=2 b.py", "torchrun, together"),
        ("echo 'a; torchrun train.py' \"&& torchrun\" \\; # ; torchrun", None),
        ("python train.py # it's one\necho torchrun; python torchrun.py", None),
        ("python -c 'import torch' && python train.py", None),
        ("nice mpirun -n 2 python train.py", "mpirun"),
        ("A=1 timeout -k 5 50 \\\n  time -p torchrun --standalone a.py", "torchrun"),
        ('if ! torchrun --standalone a.py; then exit 1; fi; echo "$A"', "torchrun"),
        ("until nice torchrun a.py\ndo\n  sleep 1\ndone", "torchrun"),
        ('eval "torchrun --standalone a.py"', "torchrun"),
        ('eval "$(conda shell.bash hook)"; torchrun a.py', "torchrun"),
        ("if true; then echo; elif torchrun a.py; then echo; fi", None),
        ("if [ $1 ] && torchrun a.py; then echo; fi", None),
        ("for ((i = 0; i < 3; i++)); do\ntorchrun a.py\ndone", None),
        ("if (( A == 0 )); then\ntorchrun a.py\nfi", None),
        ("f() { if test $1; then echo; fi; torchrun a.py; }", None),
        ("if [ a ]; then a; else if [ b ]; then c; fi; torchrun a.py; fi", None),
        ("", None),
        ("'", None),
    ],
)
@pytest.mark.parametrize("way", ["sh -c", "bash run.sh", "bash -eu run.sh 1", "./run.sh"])
def test_launcher_in_a_shell_script_is_known(
    text: str, launcher: str | None, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(f"#!/usr/bin/env bash\n{text}\n")
    words = way.split()
    if way == "sh -c":
        words.append(text)
    found = nested_launcher(Target(words, len(words)), {})
    assert (found and f"{found.name}{', together' if found.spans_nodes else ''}") == launcher
    assert found is None or found.is_in_shell
    assert found is None or found.command(words) == words


@pytest.mark.parametrize(
    "guard",
    [
        '[ "$RANK" = 0 ] || exit 0\n',
        "test $SLURM_PROCID -eq 0 || { echo none\n  exit\n}\n",
        "[ $(hostname) = $MASTER ] || exit 0;",
        "echo $RANK | grep -q ^0 || exit 0;",
        'if [ "$RANK" != 0 ]; then echo "$RANK"; exit 0; fi ; nice true\n',
        "if ! [ $NODE_RANK = 0 ]\nthen\n  sleep infinity\nfi\n",
        "if (( LOCAL_RANK != 0 )); then exec python worker.py; fi\n",
        "case $OMPI_COMM_WORLD_RANK in 0) ;; *) exit;; esac\n",
        '[ "$RANK" = 0 ] && cd /tmp && ',
        '[ "$RANK" = 0 ] &&\n  # the first\n  cat hosts | ',
        "(( RANK == 0 )) && ",
        "(( RANK == 0 || RANK == 1 )) && cd /tmp && ",
        "[[ $RANK = 0 && $A = 2 ]] && ",
        "[[ $RANK = 0 || $A = 2 ]] && ",
        "[ $RANK = 0 ] && (cd /tmp; ls) && ",
        "! [ $RANK = 1 ] && ",
        '[ "$SM_CURRENT_HOST" = algo-1 ] || exit 0\n',
        "[ $JAX_PROCESS_ID = 0 ] || exit 0\n",
        "[ ${PMI_ID:-0} = 0 ] || exit 0\n",
        "[ $MLP_ROLE_INDEX = 0 ] || exit 0\n",
        "[[ $ALPS_APP_PE -eq 0 ]] || exit 0\n",
        "[ $SLURMD_NODENAME = $MASTER ] || exit 0\n",
        '[ "$(uname -n)" = "$MASTER" ] || exit 0\n',
        '[ "${POD_NAME##*-}" = 0 ] || exit 0\n',
        "[ $FLUX_TASK_LOCAL_ID = 0 ] || exit 0\n",
        "[ $NGC_ARRAY_INDEX = 0 ] || exit 0\n",
        "[ $MPI_LOCALRANKID = 0 ] || exit 0\n",
        "[ $((RANK % 8)) = 0 ] || exit 0\n",
        "(( A == 2 || (RANK == 0) )) || exit 0\n",
        "[ `/bin/hostname -s` = a ] || exit 0\n",
        "if [ $(hostname) != $MASTER ]; then exit 0; fi\n",
        "printenv RANK | grep -q ^0 || exit 0\n",
        "[ $RANK = 0 ] || tail -f /dev/null\n",
        "[ $RANK = 0 ] || sleep 1000000\n",
        "[ $RANK = 0 ] || sleep 3600s\n",
        "[ $RANK = 0 ] || sleep 60m\n",
        "[ $RANK = 0 ] || sleep 1d\n",
        "if [ $RANK != 0 ]; then /usr/sbin/sshd -D; fi\n",
        "if [ $RANK != 0 ]; then sshd -p 2222 -De; fi\n",
        'me=$(hostname)\n[ "$me" = "$MASTER" ] || exit 0\n',
        "export me=`uname -n`; [ $me = a ] || exit 0\n",
        'host="$HOSTNAME"\nn=${host##*-}\nif (( n != 0 )); then exit; fi\n',
    ],
)
def test_launcher_behind_a_guard_is_unknown(guard: str) -> None:
    words = ["sh", "-c", f"{guard}torchrun --standalone train.py"]
    assert nested_launcher(Target(words, 3), {}) is None


@pytest.mark.parametrize(
    "before",
    [
        "cd /tmp || exit 1\n",
        "cd /tmp || exit\n",
        "[ -d out ] || mkdir out && ",
        "[ $RANK = 0 ] && mkdir out; ",
        "if [ $RANK = 0 ]; then mkdir out; fi\n",
        '[ -z "$RANK" ] && exit 1\n',
        "echo $RANK; [ -f done ] && exit 0; ",
        "if [ -f done ]; then echo $RANK is done; exit 0; fi\n",
        "log() { [ $RANK = 0 ] || return; echo $1; }\n",
        "([ $RANK = 0 ] || exit 0; mkdir out)\n",
        "export NEXT=$((RANK + 1)) && ",
        "NAME=$(hostname) && ",
        "cd /srv/reranker || exit\n",
        "test -d /data/ranking || exit 0\n",
        "if [ -d out_rank ]; then exit 0; fi\n",
        'if [ "$1" = --rank ]; then exit; fi\n',
        "echo rank 0 of the job || exit\n",
        "[ -f hostname ] || exit 0\n",
        '[ "$(uname)" = Linux ] || exit 0\n',
        '[ "$(uname -m)" = x86_64 ] || exit 0\n',
        "cd $RANKING_DATA || exit\n",
        "(( NUM_RANKS > 1 )) || exit 0\n",
        "[ $POD_NAMESPACE = train ] || exit 0\n",
        "(( A > 1 )) || echo one; test rank || exit 0\n",
        "OUT=$SCRATCH/$RANK; cd $OUT || exit\n",
        "run --me=$(hostname); [ $me ] || exit 0\n",
        "[ $RANK = 0 ] || exit-hook\n",
        "exit-hook\n",
        "[ $RANK = 0 ] || sleep 30\n",
        "[ $RANK = 0 ] || sleep 3599\n",
        "[ $RANK = 0 ] || sleep 10m\n",
        "[ $RANK = 0 ] || tail -f log\n",
        "[ $RANK = 0 ] || /usr/sbin/sshd -p 2222\n",
    ],
)
def test_launcher_of_every_rank_is_known(before: str) -> None:
    words = ["sh", "-c", f"{before}torchrun --standalone train.py"]
    found = nested_launcher(Target(words, 3), {})
    assert found is not None
    assert found.name == "torchrun"


@pytest.mark.parametrize(
    ("before", "options"),
    [
        ("env A=1 deepspeed", ""),
        ("env A=1 deepspeed", "--num_gpus 2 "),
        ("env A=1 deepspeed", "--master_port 29511 "),
        ("deepspeed", "--hostfile hosts --no_ssh "),
        ("env A=/opt/deepspeed deepspeed", ""),
        ("timeout 30 deepspeed", ""),
        ("python -mdeepspeed.launcher.runner", ""),
        ("python /bin/deepspeed", ""),
    ],
)
def test_deepspeed_gets_its_own_port_option(before: str, options: str) -> None:
    words = f"{before} {options}train.py".split()
    launcher = nested_launcher(Target(words, len(words)), {})
    assert launcher is not None
    given = launcher.command(words)
    ports = [word for word in given if word.startswith("--master_port=")]
    assert len(ports) == ("--master_port" not in options and "--no_ssh" not in options)
    assert given == [*before.split(), *ports, *options.split(), "train.py"]


@pytest.mark.parametrize("name", INVALID)
@pytest.mark.parametrize("rank", [0, 1])
def test_invalid_option_of_one_rank_ends_all(run: Run, port: int, name: str, rank: int) -> None:
    options, variables, code, reason = INVALID[name]
    per_node = options[:2] if name == "node" else []

    def ended(number: int) -> subprocess.CompletedProcess[str]:
        environ = {
            "RANK": str(number),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "DISTBOOT_JOIN_TIMEOUT": "20",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        words = [*WRAPPER, *per_node]
        if number == rank:
            environ |= variables
            words = [*WRAPPER, *options]
        return run(*words, "--", "true", env=environ)

    with ThreadPoolExecutor() as pool:
        both = list(pool.map(ended, range(2)))
    assert [each.returncode for each in both] == [code, code]
    for each in both:
        assert reason in each.stderr


@pytest.mark.parametrize("name", ["value", "option"])
def test_invalid_option_is_printed_before_others_learn(
    run: Run, clean_env: dict[str, str], port: int, name: str
) -> None:
    options, _, code, reason = INVALID[name]
    job = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "DISTBOOT_JOIN_TIMEOUT": "20",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with subprocess.Popen(
        [*WRAPPER, *options, "--", "true"],
        env={**clean_env, **job, "RANK": "1"},
        stderr=subprocess.PIPE,
        text=True,
    ) as rank_1:
        assert rank_1.stderr is not None
        first = rank_1.stderr.readline()
        rank_0 = run(*WRAPPER, "--", "true", env={**job, "RANK": "0"})
        rest = rank_1.stderr.read()
    assert (rank_0.returncode, rank_1.returncode) == (code, code)
    assert reason in first
    assert "error[" not in rest
    assert reason in rank_0.stderr


@pytest.mark.parametrize(
    ("text", "is_alone"),
    [
        ("cd . && export A=1; torchrun --standalone train.py 2>&1 | tee log", True),
        ("mpirun -n 1 hostname; python train.py", False),
        ("torchrun --standalone train.py || exit 1", True),
        ("python -m torch.distributed.run --standalone a.py; python train.py", False),
        ("env A=1 torchrun --standalone a.py; env B=1 python train.py", False),
        ("mpirun -n 1 hostname\nif test $A; then exec ./train; fi", False),
    ],
)
def test_other_commands_may_join_the_ranks(text: str, *, is_alone: bool) -> None:
    found = nested_launcher(Target(["sh", "-c", text], 3), {})
    assert found is not None
    end = f"each rank ran {found.name} for a job of its own"
    if is_alone:
        end = f"{end}, and none joined the others"
    assert found.describe_end() == end
