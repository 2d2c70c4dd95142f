"""What a person types or sets with no effect, or wrong: it is named, once, and the process ends or goes on."""

import py_compile
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from captured import one
from conftest import Run

MPI_RANK_0 = {**one("openmpi-4.1.4/1node_4procs", 0), "MASTER_ADDR": "127.0.0.1"}
_INIT = "import distboot, datetime; minute = datetime.timedelta(minutes=1); "


@pytest.mark.parametrize(
    ("module", "missing"),
    [
        ("no.such.module", "'no.such.module': 'no' is missing"),
        ("json.nope", "'json.nope'"),
        ("this.part", "'this.part'"),  # `this` is no package
    ],
)
def test_missing_module_is_named(distboot: Run, module: str, missing: str) -> None:
    result = distboot("-m", module)
    first, hint = result.stderr.splitlines()
    assert first == f"distboot: error[command-not-found]: there is no module {missing}"
    assert hint.startswith("distboot: hint: check the spelling and PYTHONPATH")
    assert result.returncode == 127


def test_missing_package_is_looked_for_here(distboot: Run, tmp_path: Path) -> None:
    hint = f"hint: check the spelling and PYTHONPATH (it is not in '{tmp_path}' either), or install"
    assert hint in distboot("-m", "no.such.module").stderr
    assert "either" not in distboot("-m", "json.nope").stderr


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["pack.inner.train"], "-m pack.inner.train"),
        (["pack.inner"], "-m pack.inner"),
        (["pack/inner/train"], "pack/inner/train.py"),
        (["-m", "pack/inner/train.py"], "pack/inner/train.py"),
        (["-m", "train.py"], "train.py"),
        (["train"], "train.py"),
        (["my job"], "'my job.py'"),
        (["my pack.inner"], "-m 'my pack.inner'"),
        (["-m", "my job.py"], "'my job.py'"),
    ],
    ids=" ".join,
)
def test_script_and_module_may_be_meant(
    distboot: Run, tmp_path: Path, typed: list[str], meant: str
) -> None:
    inner = tmp_path / "pack" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "my pack").mkdir()
    scripts = (
        inner / "train.py",
        inner / "__main__.py",
        tmp_path / "train.py",
        tmp_path / "my job.py",
        tmp_path / "my pack" / "inner.py",
    )
    for script in scripts:
        script.write_text("print('trained')")
    result = distboot(*typed)
    assert f"distboot: hint: did you mean {meant}?" in result.stderr
    assert (result.returncode, result.stdout) == (127, "")
    assert distboot(*shlex.split(meant)).stdout == "trained\n"


def test_compiled_folder_runs(distboot: Run, tmp_path: Path) -> None:
    source = tmp_path / "main.py"
    source.write_text("print('trained')")
    py_compile.compile(str(source), str(tmp_path / "pack" / "__main__.pyc"))
    assert distboot("pack").stdout == "trained\n"


def test_modules_that_exist_run(distboot: Run, tmp_path: Path) -> None:
    package = tmp_path / "pack"
    (package / "inner").mkdir(parents=True)
    (package / "inner" / "train.py").write_text("print('trained')")
    (package / "__init__.py").write_text("__path__.append('elsewhere')")
    assert distboot("-m", "pack.inner.train").stdout == "trained\n"
    assert distboot("-m", "json.tool", "--help").returncode == 0


# Of Python, that this package imports
_OF_PYTHON = ("json", "logging", "select", "signal", "socket", "subprocess", "threading")
_SHOW_PATH = "import sys; print(sys.path[0])"


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (["src/train.py"], "src"),
        (["--exec", "src/train.py"], "src"),
        (["--nproc-per-node", "1", "src/train.py"], "src"),
        (["-m", "src.train"], "."),
        (["--nproc-per-node", "1", "-m", "src.train"], "."),
    ],
    ids=" ".join,
)
def test_modules_of_the_working_directory_are_the_scripts(
    distboot: Run, tmp_path: Path, words: list[str], folder: str
) -> None:
    for name in _OF_PYTHON:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the user')")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text(_SHOW_PATH)
    ended = distboot(*words)
    assert (ended.returncode, ended.stdout) == (0, f"{tmp_path / folder}\n"), ended.stderr


@pytest.mark.parametrize(("options", "left"), [([], 1), (["-I"], 2)], ids=["", "-I"])
def test_only_what_python_has_added_leaves_its_path(
    run: Run, tmp_path: Path, options: list[str], left: int
) -> None:
    host = (
        "import runpy, sys\n"
        f"sys.path[:0] = {[str(tmp_path)] * 2}\n"
        "import distboot.cli.main\n"
        "distboot.cli.main.main = lambda words: print(sys.path.count(sys.path[0]), flush=True)\n"
        "runpy.run_module('distboot', run_name='__main__', alter_sys=True)\n"
    )
    assert run(sys.executable, *options, "-c", host).stdout == f"{left}\n"


@pytest.fixture
def without_directory(run: Run, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run a Python in a directory that is removed before; return its exit code and its output."""
    script = 'mkdir "$0" && cd "$0" && rmdir "$0" && exec "$@" 2>&1'

    def run_it(*words: str, **env: str) -> tuple[int, str]:
        gone = str(tmp_path / "gone")
        result = run("sh", "-c", script, gone, sys.executable, *words, env=env)
        return result.returncode, result.stdout

    return run_it


_OF_REMOVED_DIRECTORY = (
    "is relative to a working directory that does not exist any more\n"
    "distboot: hint: give an absolute path\n"
)


def test_module_runs_in_a_removed_directory(
    without_directory: Callable[..., tuple[int, str]],
) -> None:
    status, output = without_directory("-m", "distboot", "-m", "json.tool", "--help")
    assert (status, output[:6]) == (0, "usage:")
    status, output = without_directory("-m", "distboot", "-m", "no.module")
    assert (status, "Traceback" in output) == (127, False)


def test_relative_report_in_a_removed_directory(
    without_directory: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    script = tmp_path / "ok.py"
    script.write_text("print('trained')")
    report = ["-m", "distboot", "--nproc-per-node", "2", "--report"]
    assert without_directory(*report, "r.json", str(script)) == (
        2,
        f"distboot: error[usage]: --report='r.json' {_OF_REMOVED_DIRECTORY}",
    )
    status, output = without_directory(*report, str(tmp_path / "r.json"), str(script))
    assert (status, output.count("trained")) == (0, 2)


def test_relative_page_in_a_removed_directory(
    without_directory: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    journal = tmp_path / "job.jsonl"
    page = ["-m", "distboot", "report", "--html"]
    assert without_directory(*page, "page.html", str(journal)) == (
        2,
        f"distboot: error[usage]: --html='page.html' {_OF_REMOVED_DIRECTORY}",
    )
    status, output = without_directory(*page, str(tmp_path / "page.html"), "job.jsonl")
    assert (status, "Traceback" in output) == (2, False)
    assert "the journal 'job.jsonl' cannot be read: No such file or directory" in output


@pytest.mark.parametrize("name", ["REPORT", "METRICS", "BAD_HOSTS_FILE"])
def test_init_refuses_it_in_a_removed_directory(
    without_directory: Callable[..., tuple[int, str]], tmp_path: Path, name: str
) -> None:
    variable = f"DISTBOOT_{name}"
    init = ["-c", "import distboot; distboot.init('none')"]
    _, output = without_directory(*init, **{variable: "file"})
    problem = f"error[broken-environment]: {variable}='file' {_OF_REMOVED_DIRECTORY}"
    assert output.endswith(problem)
    assert "FileNotFoundError" not in output
    status, output = without_directory(*init, **{variable: str(tmp_path / "file")})
    assert (status, "error[" in output) == (0, False)


@pytest.mark.parametrize("command", [["nofile.py"], ["-m", "no.module"], ["--", "no-command"]])
def test_try_refuses_what_is_missing_once(distboot: Run, command: list[str]) -> None:
    result = distboot("try", *command)
    assert result.stderr.count("error[") == 1
    assert (result.returncode, result.stdout) == (127, "")


def test_options_after_the_script_are_named(distboot: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    late = ["--nproc_per_node=2", "--epochs", "3", "--max-restarts", "1", "--report", "x"]
    said = distboot("train.py", *late, "--", "--log-format=json").stderr
    assert said == (
        "distboot: warning: --nproc_per_node, --max-restarts and --report after the script: passed "
        "to the script, not used by distboot; options of distboot come before the script\n"
    )
    assert distboot("train.py", "--report", "x").stderr == ""  # many scripts have it
    script.write_text("nproc_per_node = max_restarts = 1  # of its own parser")
    assert distboot("train.py", *late).stderr == ""
    assert distboot("--", "true", *late).stderr == ""


def test_world_size_that_the_launcher_overrules_is_named(distboot: Run) -> None:
    off = {"DISTBOOT_RENDEZVOUS": "0", "MASTER_PORT": "29500"}
    given = {**MPI_RANK_0, **off, "WORLD_SIZE": "8"}
    said = distboot("run", "--", "true", env=given).stderr
    assert "WORLD_SIZE='8' is overruled by OMPI_COMM_WORLD_SIZE=4 of openmpi\n" in said
    equal = {**given, "WORLD_SIZE": "4"}
    assert "overruled" not in distboot("run", "--", "true", env=equal).stderr


def test_init_refuses_all_invalid_settings_at_once(run: Run) -> None:
    wrong = ("LATE_AFTER", "HANG", "GRACE", "JOIN_TIMEOUT", "LOG_FORMAT", "CHECK")
    environ = dict.fromkeys((f"DISTBOOT_{name}" for name in wrong), "wrong")
    script = (sys.executable, "-c", f"{_INIT}distboot.init('none')")
    done = run(*script, env=environ)
    assert done.returncode == 78
    assert "error[broken-environment]: 6 problems:\n" in done.stderr
    for name in environ:
        assert f"distboot:   {name}='wrong' is " in done.stderr
    said = run(*script, env={"DISTBOOT_JOIN_TIMEOUT": "0"}).stderr
    assert "DISTBOOT_JOIN_TIMEOUT='0' is not a valid number of seconds" in said


@pytest.mark.parametrize(
    "command", [["run", "--", "true"], ["run", "--", sys.executable, "-c", _INIT]]
)
def test_wrapper_refuses_all_invalid_settings_at_once(distboot: Run, command: list[str]) -> None:
    result = distboot(*command, env={"DISTBOOT_LATE_AFTER": "abc", "DISTBOOT_HANG": "x"})
    assert result.stderr == (
        "distboot: error[broken-environment]: 2 problems:\n"
        "distboot:   DISTBOOT_LATE_AFTER='abc' is not a valid number of seconds: use 0 to 86400 seconds\n"
        "distboot:   DISTBOOT_HANG='x' is neither warn nor stop: unset it, or set it to warn or stop\n"
        "distboot: hint: unset them, or correct them\n"
    )
    assert result.returncode == 78


def test_invalid_number_of_ranks_hides_no_setting(distboot: Run) -> None:
    wrong = {"DISTBOOT_NPROC_PER_NODE": "x", "DISTBOOT_GRACE": "soon"}
    result = distboot(
        "--join-timeout", "9", "--", "true", env={**wrong, "DISTBOOT_JOIN_TIMEOUT": "x"}
    )
    assert result.returncode == 78
    assert result.stderr.startswith("distboot: error[broken-environment]: 2 problems:\n")
    for name, value in wrong.items():
        assert f"distboot:   {name}={value!r} is " in result.stderr


@pytest.mark.parametrize("way", ["wrapper", "init"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("DISTBOOT_SECRET", "DISTBOOT_SECRET has 70000 characters, and may have 65536"),
        ("DISTBOOT_HOST", "DISTBOOT_HOST has 70000 characters, and a name of a host at most 253"),
    ],
)
def test_text_that_no_message_takes_is_refused(
    run: Run, port: int, way: str, name: str, said: str
) -> None:
    environ = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DISTBOOT_JOIN_TIMEOUT": "1",
        name: "x" * 70_000,
    }
    script = [sys.executable, "-c", "import distboot; distboot.init('none')"]
    if way == "wrapper":
        script = [sys.executable, "-m", "distboot", "--", *script]
    done = run(*script, env=environ)
    assert (done.returncode, said in done.stderr) == (78, True), done.stderr
    assert done.stderr.count("Traceback") == (way == "init")  # the script's own


def test_secret_that_is_a_switch_is_refused(distboot: Run) -> None:
    # It is in most numbers of a message, which are not hidden
    done = distboot("--nproc-per-node", "2", "--", "true", env={"DISTBOOT_SECRET": "1"})
    assert done.returncode == 78
    assert "DISTBOOT_SECRET is too short: it needs at least 6 characters" in done.stderr
    assert "***" not in done.stderr


def test_option_overrides_an_invalid_variable(distboot: Run) -> None:
    env = {"DISTBOOT_GRACE": "abc", "DISTBOOT_JOIN_TIMEOUT": "abc"}
    options = ["--grace", "2", "--join-timeout", "3"]
    assert distboot("run", *options, "--", "true", env=env).returncode == 0


def _python(run: Run, script: str) -> str:
    return run(sys.executable, "-c", _INIT + script).stderr


def test_init_takes_a_timedelta(run: Run) -> None:
    assert _python(run, "distboot.init('none', timeout=minute, join_timeout=minute)") == ""
    refused = _python(run, "distboot.init('none', timeout=minute * 0)")
    assert "error[usage]: timeout=datetime.timedelta(0) is not a valid number of seconds" in refused
    assert refused.endswith("\ndistboot: hint: use a number of seconds above 0, at most 86400\n")


@pytest.mark.parametrize("argument", ["timeout", "join_timeout"])
def test_init_refuses_the_class_timedelta(run: Run, argument: str) -> None:
    said = _python(run, f"distboot.init('none', {argument}=datetime.timedelta)")
    problem = f"{argument}=<class 'datetime.timedelta'> is not a valid number of seconds"
    assert f"error[usage]: {problem}\n" in said


@pytest.mark.parametrize(
    "call", ["init('none', ", "detect(", "init('none'); distboot.init('none', "]
)
@pytest.mark.parametrize("value", ["5", "['slurm']", "b'slurm'"])
def test_launcher_that_is_no_name_is_refused(run: Run, call: str, value: str) -> None:
    said = _python(run, f"distboot.{call}launcher={value})")
    problem = f"error[usage]: launcher={value} is not a valid name"
    assert f"{problem}\ndistboot: hint: help(distboot." in said


def test_second_init_names_a_different_launcher(run: Run) -> None:
    said = _python(
        run, "[distboot.init('none', launcher=name) for name in (None, 'slurm', 'single')]"
    )
    assert said == (
        "distboot: warning: init() was called again: launcher='slurm' after launcher='single' has "
        "no effect; the first context stays\n"
    )


@pytest.mark.all
def test_barrier_after_destroy_process_group_is_refused(run: Run) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    script = (
        "ctx = distboot.init(); import torch.distributed as dist; dist.destroy_process_group(); "
    )
    said = _python(run, script + "ctx.barrier()")
    assert "barrier() after the end of the process group (destroy_process_group())" in said


def test_number_of_many_digits_is_no_traceback(distboot: Run, run: Run) -> None:
    number = "1" * 5000
    environ = {"CUDA_VISIBLE_DEVICES": number}
    command = ["run", "--nproc-per-node", "gpu", "--", "true"]
    assert "Traceback" not in distboot(*command, env=environ).stderr
    script = "import distboot; distboot.init('none', pass_local_rank=None)"
    started = run(sys.executable, "train.py", f"--local_rank={number}", train=script)
    assert "Traceback" not in started.stderr


def test_shell_with_many_options_is_read_at_once(distboot: Run) -> None:
    words = ["-o"] * 60
    assert distboot("run", "--", "bash", *words, "--", timeout=20).returncode != 0


@pytest.mark.parametrize(
    "words",
    [
        ["--rdzv-backend", "{}", "x.py"],
        ["--framework", "{}", "x.py"],
        ["--pass-local-rank={}", "x.py"],
        ["--nnodes={}", "x.py"],
        ["{}"],
    ],
    ids=" ".join,
)
def test_password_in_a_word_is_not_repeated(distboot: Run, words: list[str]) -> None:
    url = "https://user:hunter2@host"
    done = distboot("run", *(word.format(url) for word in words))
    assert done.returncode != 0
    assert "hunter2" not in done.stdout + done.stderr


@pytest.mark.parametrize("command", [[], ["run"], ["show"]])
def test_value_of_an_unknown_option_is_not_repeated(distboot: Run, command: list[str]) -> None:
    done = distboot(*command, "--api-key=sk-123 hunter2", "x.py")
    assert done.returncode == 2
    assert "error[usage]: unrecognized arguments: --api-key" in done.stderr
    assert "sk-123" not in done.stderr
    assert "hunter2" not in done.stderr


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (["--pre-cmd", "python prep.py --token hunter2 out.py", "train.py"], "train.py"),
        (["--auth", "Bearer hunter2 x.py", "--nproc-per-node", "2", "train.py"], "train.py"),
        (["--foo", "--", "python", "-c", "hunter2.py"], "script.py"),
        (["--foo", "--", "bash", "-lc", "hunter2.py"], "script.py"),
        (["--token", "a hunter2.py"], "script.py"),
    ],
)
def test_hint_has_the_script_and_no_secret(distboot: Run, words: list[str], script: str) -> None:
    done = distboot(*words)
    assert f" … {script} {words[0]} …\n" in done.stderr
    assert "hunter2" not in done.stderr


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["-m", "distboot", "run", "--grace", "hunter2", "--", "true"], {}),
        (["-m", "distboot", "run", "--", "true"], {"DISTBOOT_GRACE": "hunter2"}),
        (["-c", f"{_INIT}distboot.init('none')"], {"DISTBOOT_GRACE": "hunter2"}),
    ],
    ids=["option", "variable", "init"],
)
def test_secret_given_as_a_value_is_not_repeated(
    run: Run, words: list[str], variables: dict[str, str]
) -> None:
    done = run(sys.executable, *words, env={"DISTBOOT_SECRET": "hunter2", **variables})
    assert done.returncode != 0
    assert "='***' is not a valid number of seconds" in done.stderr
    assert "hunter2" not in done.stderr


def test_python_without_a_module_says_so(distboot: Run) -> None:
    done = distboot("run", "--nproc-per-node", "2", "--", sys.executable, "-m")
    assert (done.returncode, "Argument expected for the -m option" in done.stderr) == (2, True)
    assert "Traceback" not in done.stderr


_OLD = "import sys; sys.version_info = (3, 9, 18); sys.version = '3.9.18 (main)'; "


@pytest.mark.parametrize(
    ("words", "code", "lines"),
    [(["-m", "distboot"], 78, 1), ([], 1, None), (["-m", "mine"], 1, None)],
    ids=["python -m distboot", "import distboot", "python -m mine"],
)
def test_older_python_is_refused(run: Run, words: list[str], code: int, lines: int | None) -> None:
    done = run(sys.executable, "-c", f"{_OLD}import distboot", *words)
    said = done.stderr.splitlines()
    needs = f"distboot needs Python 3.10 or newer, and {sys.executable} is Python 3.9.18"
    assert (done.returncode, lines in (None, len(said))) == (code, True), done.stderr
    assert said[-1].partition(": ")[2].endswith(needs)
