"""`show`, `env`, every misuse of the command line, and `--local_rank` in it: put in, taken out, or warned of."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from captured import one
from conftest import Run
from inside import (
    CODES,
    FIELDS,
    command_error,
    docker_options,
    with_local_rank,
    without_local_rank,
    wrong_local_rank,
)
from ranks import RunRanks

from distboot import detect

MPI_RANK_3 = one("openmpi-4.1.4/2nodes_2procs", 3)
AZURE = {"AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}


def test_show_json_has_the_whole_placement(distboot: Run) -> None:
    result = distboot("show", "--json", env={**MPI_RANK_3, **AZURE})
    shown = json.loads(result.stdout)
    assert list(shown) == [*FIELDS, "sources", "notes", "node_level"]
    assert (shown["launcher"], shown["platform"], shown["rank"], shown["node_rank"]) == (
        "openmpi",
        "azureml",
        3,
        None,
    )
    assert shown["sources"]["master_addr"] == "AZ_BATCH_MASTER_NODE"
    assert (result.returncode, result.stderr) == (0, "")


def test_show_prints_what_is_known_and_unknown(distboot: Run) -> None:
    shown = distboot("show", env=MPI_RANK_3).stdout
    headline, _, *lines = shown.splitlines()
    assert headline.startswith("Rank 3 of 4, local rank 1 of 2: started by Open MPI")
    values = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines}
    assert values["rank"] == ["3", "OMPI_COMM_WORLD_RANK"]
    assert values["node_rank"][0] == "-"
    assert "MASTER_ADDR" in values["master_addr"][1]
    explained = distboot("show", env=one("slurm-salloc-22.05.8/salloc_shell_python", 0))
    assert "note: SLURM_* ignored" in explained.stdout
    forged = distboot("show", env={"AZUREML_RUN_ID": "a\x1b[31m\nrank 99"})
    assert ("\x1b" in forged.stdout, "\nrank 99" in forged.stdout) == (False, False)


def test_shell_exports_can_be_evaluated(distboot: Run) -> None:
    exports = distboot("env", env={**MPI_RANK_3, **AZURE, "NODE_RANK": "9"}).stdout
    script = f"{exports}\necho $RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR ${{NODE_RANK-unset}}"
    result = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, env={"NODE_RANK": "9"}, check=True
    )
    assert result.stdout == "3 4 1 10.0.0.4 unset\n"


def _evaluated(options: str) -> list[str]:
    """The words that a shell makes of what `eval "docker run $OPTIONS"` gives it."""
    script = r'eval "set -- $OPTIONS"; for word; do printf "%s\000" "$word"; done'
    result = subprocess.run(
        ["sh", "-c", script], env={"OPTIONS": options}, capture_output=True, text=True, check=True
    )
    return result.stdout.split("\0")[:-1]


def test_exports_for_a_container(distboot: Run) -> None:
    env = {**MPI_RANK_3, **AZURE}
    lines = distboot("env", "--format", "dotenv", env=env).stdout.splitlines()
    dotenv = dict(line.split("=", 1) for line in lines)
    as_json = json.loads(distboot("env", "--json", env=env).stdout)
    assert dotenv["RANK"] == as_json["RANK"] == "3"
    assert "NODE_RANK" not in dotenv
    assert as_json["NODE_RANK"] is None
    assert as_json.keys() - dotenv.keys() >= {"DISTBOOT_PLACEMENT"}, (
        "which speaks of variables that are not there"
    )
    # In the container that gets them there is no Open MPI: they say it all.
    assert (detect(dotenv).launcher, detect(dotenv).rank, detect(dotenv).world_size) == (
        "torch",
        3,
        4,
    )
    printed = distboot("env", "--format", "docker", env=env).stdout
    assert _evaluated(printed) == [word for line in lines for word in ("-e", line)]
    assert printed.count("\n") == 1


def test_docker_options_are_quoted_for_a_shell() -> None:
    texts = ["A=1", "B=two  words", 'C=it\'s "$HOME" `id` $(id) \\', "D=one\nline;more", "E=*"]
    assert _evaluated(docker_options(texts)) == [word for text in texts for word in ("-e", text)]


_SECONDS = "is not a valid number of seconds\ndistboot: hint: use a number of seconds"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("show --jsno", "usage", ""),
        ("show --hel", "usage", "\ndistboot: hint: python -m distboot show --help\n"),
        ("show extra", "usage", ""),
        ("doctor extra", "usage", ""),
        ("env --format csv", "usage", ""),
        ("--bogus train.py", "usage", ""),
        (
            "--nproc_per_nodes 2 train.py",
            "usage",
            "\ndistboot: hint: did you mean '--nproc-per-node'? ",
        ),
        *(
            (
                f"{option} 2 train.py",
                "usage",
                "\ndistboot: hint: use --nproc-per-node N, the number on ",
            )
            for option in ("-n", "-np", "--np")
        ),
        (
            "--nproc-per-node=2 --epochs 3 train.py",
            "usage",
            "hint: if it is an option of the script, it comes after it: python -m distboot run … t",
        ),
        (
            "--report-to wandb -m train",
            "usage",
            "it comes after it: python -m distboot run … -m train --report-to …\n",
        ),
        (
            "--epochs=3 --lr 1 train.py",
            "usage",
            "after it: python -m distboot run … train.py --epochs",
        ),
        ("--log-level debug train.py", "usage", "run … train.py --log-level …\n"),
        ("-lr 3 ./run", "usage", "run … script.py -lr …\n"),
        ("--epochs u:p@h.py -m a train.py", "usage", "run … -m a --epochs …\n"),
        ("--epochs", "usage", "\ndistboot: hint: python -m distboot run --help\n"),
        ("--nproc 2 train.py", "usage", "\ndistboot: hint: did you mean '--nproc-per-node'? "),
        (
            "--per-node 2 train.py",
            "usage",
            "\ndistboot: hint: did you mean '--nproc-per-node'? if ",
        ),
        ("--log_dri x train.py", "usage", "\ndistboot: hint: did you mean '--log-dir'? if it is "),
        (
            "--node 2 train.py",
            "usage",
            "hint: did you mean '--nnodes', '--node-rank' or '--nproc-per-node'? if it is ",
        ),
        (
            "--logs x train.py",
            "usage",
            "hint: did you mean '--log-dir', '--log-format' or '--log-prefix'? if it is ",
        ),
        (
            "--restarts 3 train.py",
            "usage",
            "hint: did you mean '--max-restarts', '--restart-delay' or '--restart-window'? if ",
        ),
        ("--per_node", "usage", "did you mean '--nproc-per-node'? python -m distboot run --help"),
        ("run --laun openmpi train.py", "usage", ""),
        ("run", "usage", ""),
        ("run --", "usage", ""),
        ("--check train.py", "usage", "to run: --check took 'train.py' as its value\n"),
        ("--report train.py", "usage", "to run: --report took 'train.py' as its value\n"),
        ("--report a:b@train.py", "usage", "no script, module or command to run\n"),
        ("run -m", "usage", ""),
        ("run --launcher", "usage", ""),
        ("run --launcher opnempi -- true", "unknown-launcher", ": --launcher='opnempi' is not a "),
        ("show --launcher opnempi", "unknown-launcher", ": --launcher='opnempi' is not a valid "),
        ("run --launcher openmpi -- true", "launcher-mismatch", ": --launcher='openmpi': "),
        ("shwo", "command-not-found", "\ndistboot: hint: did you mean 'show'? "),
        ("/usr", "command-not-found", ": '/usr' is a folder without a __main__.py\n"),
        (
            "./no-interpreter",
            "usage",
            "begins with #!/nowhere/sh\ndistboot: hint: any other command goes after '--': -- ./no-",
        ),
        ("--grace 5 show", "command-not-found", "\ndistboot: hint: a command comes before its "),
        ("no_such_script.py", "command-not-found", ""),
        ("run -- no-such-command-at-all", "command-not-found", ""),
        (
            "run -- train.py",
            "command-not-found",
            "\ndistboot: hint: name the interpreter of a script: run -- python train.py; ",
        ),
        ("run -- /nowhere/missing", "command-not-found", ""),
        (
            "run -- --nproc-per-node 2 train.py",
            "command-not-found",
            "\ndistboot: hint: options of distboot come before --",
        ),
        ("run -- ./train.py/missing", "command-not-found", ""),
        ("run -- /", "command-not-executable", "\ndistboot: hint: name a program in it\n"),
        ("run -- ./no-interpreter", "command-not-executable", ""),
        ("run -- ./no-program", "command-not-executable", ""),
        ("run --exec", "usage", ""),
        ("run --exec -- no-such-command", "command-not-found", ""),
        (
            "run --exec -- ./train.py",
            "command-not-executable",
            "\ndistboot: hint: make it executable (chmod +x), or name ",
        ),
        ("run --exec -- ./no-interpreter", "command-not-executable", ""),
        ("run --exec -- ./no-program", "command-not-executable", ""),
        ("run --join-timeout soon train.py", "usage", f"--join-timeout='soon' {_SECONDS}"),
        ("run --join-timeout -1 -- true", "usage", f"--join-timeout='-1' {_SECONDS}"),
        ("run --grace 0 -- true", "usage", f"--grace='0' {_SECONDS}"),
        ("run --log-dir= -- true", "usage", "argument --log-dir: the name of a folder is needed"),
        ("run --log-dir", "usage", ""),
        ("run --log-prefix=1 -- true", "usage", ""),
        ("run --report job.json --exec -- true", "usage", "--report cannot be used with --exec"),
        (
            "run --exec --report r -- true",
            "usage",
            "by the command\ndistboot: hint: leave one of them out\n",
        ),
        ("run --report r/ -- true", "usage", "--report='r/' is a folder, not a file\n"),
        ("run --report= -- true", "usage", "argument --report: the name of a file is needed"),
        ("run --exec --grace 3 -- true", "usage", "--grace cannot be used with --exec"),
        ("run --exec --log-prefix -- true", "usage", "--log-prefix cannot be used with --exec"),
        (
            "run --nproc-per-node 2 --exec -- true",
            "usage",
            "--nproc-per-node (or DISTBOOT_NPROC_PER_NODE) cannot be used with --exec",
        ),
        (
            "run --exec --framework horovod -- true",
            "usage",
            "for which the wrapper holds a port, cannot be used with",
        ),
        (
            "run --framework tensorflaw -- true",
            "usage",
            "not a valid framework: did you mean 'tensorflow'?",
        ),
        (
            "run --framework pandas -- true",
            "usage",
            "'pandas' is not a valid framework: they are torch, deepspeed, ",
        ),
        ("run --pass-local-rank=3 -- true", "usage", "'3' is not a valid name of an option"),
        (
            "run --pass-local-rank=gpu -- true",
            "usage",
            "='gpu' does not begin with '--'\ndistboot: hint: --pass-local-rank=--gpu\n",
        ),
        ("--num_gpus 2 train.py", "usage", "an option of deepspeed; here it is --nproc-per-node N"),
        ("--hostfile h train.py", "usage", "hint: start this command on each host, with --nnodes"),
        ("-x FOO train.py", "usage", "hint: export the variable before this command: ranks of"),
        (
            "--num_processes 2 train.py",
            "usage",
            "hint: an option of accelerate; here it is --nproc-per-node N, the ranks of each node",
        ),
        (
            "run --pass-local-rank -- torchrun",
            "usage",
            "passes the local rank of this process, and torchrun starts",
        ),
        (
            "run --nproc-per-node 2 -- torchrun train.py",
            "usage",
            "in each of them torchrun would start others",
        ),
    ],
)
def test_misuse_is_one_error_with_a_hint(
    distboot: Run, tmp_path: Path, arguments: str, code: str, said: str
) -> None:
    (tmp_path / "train.py").touch()
    for name, text in (("no-interpreter", "#!/nowhere/sh\n"), ("no-program", "text")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    result = distboot(*arguments.split())
    assert result.stderr.startswith(f"distboot: error[{code}]: ")
    assert "\ndistboot: hint: " in result.stderr
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert (result.returncode, result.stdout) == (CODES[code][0], "")


@pytest.mark.parametrize("code", ["KEY=token;./a.py", "curl token; ./a.py"])
def test_hint_shows_no_code(distboot: Run, code: str) -> None:
    refused = distboot("--epochs", "--", "sh", "-c", code)
    assert refused.stderr.endswith("run … script.py --epochs …\n")
    assert "token" not in refused.stderr


@pytest.mark.parametrize(
    "beginning",
    [
        "#!/srv/dash/.venv/bin/python3",
        "#!/home/sh/env/python -u",
        "#!/usr/bin/env python3 sh",
        "#!/usr/bin/env -S SHELL=/bin/bash python3",
        # As pip, conda and uv write them
        "#!/bin/sh\n'''exec' \"/srv/long path/python\" \"$0\" \"$@\"\n' '''",
        "#!/bin/sh\n'''exec' /srv/long/python \"$0\" \"$@\" #'''",
    ],
)
def test_script_of_python_is_not_refused(distboot: Run, tmp_path: Path, beginning: str) -> None:
    (tmp_path / "train.py").write_text(f"{beginning}\nprint('trained')\n")
    result = distboot("train.py")
    assert (result.stdout, result.stderr) == ("trained\n", "")


@pytest.mark.parametrize(
    "first",
    [
        "#!/bin/sh",
        "#! /usr/local/bin/bash -e",
        "#!/usr/bin/env zsh",
        "#!/usr/bin/env -S dash -e",
        "#!/usr/bin/env -S -i LANG=C /bin/bash",
        "#!/bin/busybox sh",
    ],
)
def test_script_of_a_shell_is_refused(distboot: Run, tmp_path: Path, first: str) -> None:
    (tmp_path / "train").write_text(f"{first}\nexec python train.py\n")
    result = distboot("train")
    assert result.stderr.startswith(
        f"distboot: error[usage]: the script 'train' is not in Python: it begins with {first}\n"
    )
    assert (result.returncode, result.stdout) == (CODES["usage"][0], "")


def test_folder_of_the_same_name_is_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").mkdir()
    error = command_error("train", OSError(errno.EAGAIN, "Resource temporarily unavailable"))
    assert error.hint == "this user may not start more processes (ulimit -u)"


@pytest.mark.parametrize("command", ["show", "env", "doctor", "try"])
@pytest.mark.parametrize(
    "setting",
    [
        *(
            "LOG_FORMAT=xml",
            "JOIN_TIMEOUT=abc",
            "RENDEZVOUS=yes",
            "FAILURE_DETECTION=yes",
            "HEARTBEAT_TIMEOUT=1",
        ),
        *("GRACE=soon", "STOP_SIGNALS=KILL", "HANG=kill", "SIGQUIT=dump", "NPROC_PER_NODE=-1"),
        "SHIELD_WORKERS=yes",
    ],
)
def test_every_command_refuses_what_a_job_would(distboot: Run, command: str, setting: str) -> None:
    name, _, value = setting.partition("=")
    result = distboot(command, env={f"DISTBOOT_{name}": value})
    assert result.returncode == 78
    assert result.stderr.startswith(f"distboot: error[broken-environment]: DISTBOOT_{name}")


def test_misspelled_setting_is_reported_once_without_value(distboot: Run) -> None:
    said = (
        "distboot: warning: unknown variable DISTBOOT_SECRTE is ignored; did you "
        "mean DISTBOOT_SECRET?\n"
    )
    env = {"DISTBOOT_SECRTE": "much to hide", "DISTBOOT_OURS": "1"}
    script = "import distboot; distboot.init('none')"
    assert distboot("run", "--", sys.executable, "-c", script, env=env).stderr == said
    assert distboot("show", env=env).stderr == said
    # With the error
    assert distboot("env", env={**env, "DISTBOOT_GRACE": "1m"}).stderr.startswith(said)
    rank_1 = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert (
        distboot("run", "--", "true", env={**env, **rank_1, "DISTBOOT_RENDEZVOUS": "0"}).stderr
        == ""
    )


@pytest.mark.parametrize("switch", ["DISTBOOT_RENDEZVOUS", "DISTBOOT_FAILURE_DETECTION"])
@pytest.mark.parametrize("command", [["run", "--", "true"], ["show"]], ids=["run", "show"])
def test_hang_cannot_stop_an_unwatched_job(distboot: Run, switch: str, command: list[str]) -> None:
    refused = distboot(*command, env={"DISTBOOT_HANG": "stop", switch: "0"})
    assert refused.returncode == 78
    assert (
        f"DISTBOOT_HANG=stop needs failure detection, which {switch}=0 turns off" in refused.stderr
    )


def test_options_without_a_variable_are_known(distboot: Run) -> None:
    names = ["framework", "log-dir", "log-prefix", "pass-local-rank", "exec"]
    env = {f"DISTBOOT_{name}".upper().replace("-", "_"): "x" for name in names}
    said = distboot("show", env=env).stderr
    for name in names:
        assert f"is ignored; did you mean --{name}?" in said


def test_doctor_and_show_say_which_variables_are_misspelled(distboot: Run) -> None:
    env = {
        "DISTBOOT_JOINTIMEOUT": "5",
        "MASTER_ADRR": "node-0",
        "MASTER_URL": "http://ours",
        "WORLD_STATE": "x",
        "MASTER": "local[2]",
        "DISTBOOT_NPROC": "2",
        "DISTBOOT_NPROCS": "2",
        "DISTBOOT_LOG_DIR": "logs",
        "DISTBOOT_OWN": "1",
    }
    found = distboot("doctor", env=env).stdout
    assert "warning  settings: unknown variable DISTBOOT_JOINTIMEOUT is ignored" in found
    assert "warning  settings: unknown variable MASTER_ADRR is ignored" in found
    said = distboot("show", env=env).stderr.splitlines()
    assert said == [
        (
            "distboot: warning: unknown variable DISTBOOT_JOINTIMEOUT is ignored; did "
            "you mean DISTBOOT_JOIN_TIMEOUT?"
        ),
        "distboot: warning: unknown variable MASTER_ADRR is ignored; did you mean MASTER_ADDR?",
        (
            "distboot: warning: unknown variable DISTBOOT_NPROC is ignored; did "
            "you mean DISTBOOT_NPROC_PER_NODE?"
        ),
        (
            "distboot: warning: unknown variable DISTBOOT_NPROCS is ignored; did "
            "you mean DISTBOOT_NPROC_PER_NODE?"
        ),
        "distboot: warning: unknown variable DISTBOOT_LOG_DIR is ignored; did you mean --log-dir?",
    ]
    assert (
        distboot("doctor", env={"DISTBOOT_JOIN_TIMEOUT": "5", "MASTER_URL": "x"}).stdout.count(
            "settings"
        )
        == 1
    )


@pytest.mark.parametrize("command", [["show"], ["env"], ["run", "--", "touch", "started"]])
def test_broken_environment_is_refused_and_nothing_is_started(
    distboot: Run, run: Run, command: list[str]
) -> None:
    result = distboot(*command, env={"OMPI_COMM_WORLD_RANK": "0"})
    assert result.returncode == 78
    assert result.stderr.startswith("distboot: error[broken-environment]: ")
    assert run("ls").stdout == ""


def test_unresolvable_address_is_waited_for_and_named(distboot: Run) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "29500"}
    result = distboot("run", "--join-timeout", "3", "--", "true", env=env)
    assert result.returncode == 75
    who = f"rank 1 on {os.uname().nodename}"
    assert (
        f"distboot: {who}: rank 0 does not answer at nowhere.invalid:29500 yet (Name or service"
        in result.stderr
    )
    where = "nowhere.invalid:29500 (from MASTER_ADDR)"
    assert (
        f"error[unresolvable-address]: {who}: rank 0 did not answer at {where} within 3 s"
        in result.stderr
    )


def test_help_of_every_command_needs_no_valid_setting(distboot: Run) -> None:
    for arguments in (
        ["--help"],
        ["run", "--help"],
        ["show", "--help"],
        ["env", "--help"],
        ["doctor", "--help"],
    ):
        result = distboot(*arguments, env={"DISTBOOT_JOIN_TIMEOUT": "abc"})
        assert (result.returncode, result.stderr) == (0, "")
        assert "python -m distboot" in result.stdout
    for arguments in (["--version"], ["-V"], ["version"]):
        assert distboot(*arguments).stdout.startswith("distboot 0.")


def test_help_fits_on_a_screen(distboot: Run) -> None:
    result = distboot("--help")
    lines = result.stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "--nproc-per-node 2 train.py" in result.stdout
    assert distboot("help").stdout == result.stdout
    assert distboot("help", "show").stdout == distboot("show", "--help").stdout
    assert distboot("help", "--help").stdout == result.stdout
    unknown = distboot("help", "shwo")
    assert unknown.returncode == 2
    assert "'shwo' is not a command" in unknown.stderr
    assert "did you mean 'show'?" in unknown.stderr


def test_command_without_arguments_says_where_it_is(distboot: Run) -> None:
    result = distboot()
    assert result.returncode == 2
    assert result.stdout.startswith("Not started by a launcher: rank 0 of 1.\n\nusage: ")
    result = distboot(env={"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"})
    assert result.stdout.startswith("Rank 3 of 8, local rank 3: started by ")
    result = distboot(env={"RANK": "three"})
    assert result.stdout.startswith("distboot: error[broken-environment]: ")
    assert "\nusage: " in result.stdout


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("distboot --nno", "--nnodes"),
        ("distboot do", "doctor"),
        ("distboot run --mas", "--master-addr --master-port"),
        ("distboot run --te", "--tee"),
        ("distboot check --a", "--allreduce"),
        ("distboot try --q", "--quiet"),
        ("distboot completion f", "fish"),
    ],
)
def test_bash_completes_commands_and_options(run: Run, line: str, completed: str) -> None:
    words = line.split()
    script = (
        f'eval "$({sys.executable} -m distboot completion bash)"\n'
        f"COMP_WORDS=({line}) COMP_CWORD={len(words) - 1}\n"
        '_distboot; echo "${COMPREPLY[@]}"'
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    assert run("bash", "-c", script, env={"PATH": path}).stdout.strip() == completed


def test_bash_completes_a_file_with_a_space(run: Run, tmp_path: Path) -> None:
    (tmp_path / "my file.py").touch()
    script = (
        f'eval "$({sys.executable} -m distboot completion bash)"\n'
        'COMP_WORDS=(distboot run my) COMP_CWORD=2\n_distboot; printf "<%s>" "${COMPREPLY[@]}"'
    )
    assert run("bash", "-c", script).stdout == "<my file.py>"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_of_other_shells_has_all_names(distboot: Run, shell: str) -> None:
    text = distboot("completion", shell).stdout
    assert {"run", "doctor", "--help"} <= set(re.split(r"[\s\"]+", text))
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=text, text=True, check=True)


def test_reader_that_goes_away_is_no_traceback(run: Run) -> None:
    script = f"{sys.executable} -m distboot show | true; exit ${{PIPESTATUS[0]}}"
    result = run("bash", "-c", script)
    assert result.stderr == ""
    # 0 when all was written before the reader went
    assert result.returncode in (0, 128 + signal.SIGPIPE)


def test_output_that_cannot_be_written_is_an_error(run: Run) -> None:
    script = f"{sys.executable} -m distboot show >/dev/full"
    result = run("bash", "-c", script)
    assert result.stderr == (
        "distboot: error[output-failed]: cannot write to standard output: No space left on device\n"
    )
    assert result.returncode == CODES["output-failed"][0]


@pytest.mark.parametrize(
    ("arguments", "without"),
    [
        (["--lr", "1"], ["--lr", "1"]),
        (["--local_rank=3", "--lr", "1"], ["--lr", "1"]),
        (["--local-rank=3", "data"], ["data"]),
        (["--local_rank", "3", "data"], ["data"]),
        (["data", "--local-rank", "-1"], ["data"]),
        (["--local_rank", "--lr", "1"], ["--lr", "1"]),
        (["data", "--local_rank"], ["data"]),
        (["--local_rank", "", "data"], ["data"]),
        (["--local_rank=0", "--local-rank", "1", "data"], ["data"]),
        (["data", "--", "--local_rank=3"], ["data", "--", "--local_rank=3"]),
        (
            ["--local_rank_file=x", "--my-local-rank=2"],
            ["--local_rank_file=x", "--my-local-rank=2"],
        ),
        ([], []),
    ],
)
def test_local_rank_is_inserted_once_or_removed(arguments: list[str], without: list[str]) -> None:
    assert without_local_rank(arguments) == without
    assert with_local_rank(arguments, 2) == ["--local_rank=2", *without]
    assert with_local_rank(with_local_rank(arguments, 1), 2, "--local-rank") == [
        "--local-rank=2",
        *without,
    ]
    assert with_local_rank(["--gpu", "1", *arguments], 0, "--gpu") == ["--gpu=0", *without]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--local_rank=1"], None),
        (["--local-rank", "-1"], None),
        (["--", "--local_rank=0"], None),
        (["0"], None),
        (["--local-rank", "0"], "say --local_rank=0, and the local rank is 1"),
    ],
)
def test_wrong_one_is_named(arguments: list[str], said: str | None) -> None:
    warned = wrong_local_rank(arguments, 1)
    assert warned is None if said is None else said in str(warned)


_INIT = """
import json, sys
import distboot
framework, first, again = (sys.argv.pop(1) for _ in range(3))
try:
    distboot.init(framework, join_timeout=60, pass_local_rank=json.loads(first))
    distboot.init(framework, pass_local_rank=json.loads(again))
except distboot.DistbootError:
    pass
print(json.dumps(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("framework", "first", "again", "expected"),
    [
        ("none", "null", "null", ["--local_rank=7", "data"]),
        ("none", "false", "null", ["data"]),
        ("none", "true", "true", ["--local_rank=0", "data"]),
        ("none", "null", "true", ["--local_rank=0", "data"]),
        ("bogus", "true", "true", ["--local_rank=7", "data"]),
    ],
)
def test_init_adjusts_the_arguments(
    run: Run, framework: str, first: str, again: str, expected: list[str]
) -> None:
    result = run(sys.executable, "-c", _INIT, framework, first, again, "--local_rank=7", "data")
    assert json.loads(result.stdout) == expected
    said = "distboot: warning: the arguments say --local_rank=7, and the local rank is 0"
    assert result.stderr.count(said) == (1 if first == "null" else 0)


def test_each_rank_has_its_own(run_ranks: RunRanks) -> None:
    ended = run_ranks(_INIT, "none", "true", "null", "--local_rank", "0", "data")
    assert [json.loads(rank.out) for rank in ended] == [
        [f"--local_rank={rank}", "data"] for rank in range(2)
    ]
