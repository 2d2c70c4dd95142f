"""What distboot changes in the process of a script is in `distboot/script/patch_table.py`, and nothing else is changed.

Some patches are looked for in real processes, and the others in the source, as calls.
"""

import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import PACKAGE
from launched import needs_torch
from tensorflows import ByHand

from distboot.script.patch_table import GROUPS, Patch

PATCHES = [patch for group in GROUPS for patch in group.patches]
DETECTION = "DISTBOOT_FAILURE_DETECTION"
SHIELD = "DISTBOOT_SHIELD_WORKERS"

# Calls that change a process, and cannot be seen in it
CALLS = {
    "atexit.register",
    "faulthandler.enable",
    "faulthandler.register",
    "libc.signal",
    "on_exit",
    "os.fork",
    "os.register_at_fork",
    "signal.signal",
    "start_without_signals",
    "threading.Thread",
    "threading.Timer",
}
# Where such calls are made in a process that is not the script's
ELSEWHERE = {
    **dict.fromkeys(("cli", "job", "report", "tools"), "the wrapper, the agent and the commands"),
    **dict.fromkeys(
        (
            "agent/event_files.py",
            "agent/wrapper_agent.py",
            "agent/journal.py",
            "agent/launcher_process.py",
            "agent/logs.py",
            "agent/restarts.py",
            "agent/returning.py",
            "agent/sidecar.py",
            "agent/state_writer.py",
            "agent/wrapper_signals.py",
        ),
        "the agent",
    ),
    "rendezvous/join.py": "the agent",
    "__main__.py": "the wrapper",
}
NOT_IN_A_SCRIPT = {
    ("base/commands.py", "signal.signal"): "the wrapper, before it becomes the command",
    ("base/threads.py", "threading.Thread"): "start_without_signals itself",
    ("agent/node_check.py", "start_without_signals"): "threads of the agent",
    ("agent/link_probe.py", "start_without_signals"): "threads of the agent",
    ("agent/stack_reader.py", "start_without_signals"): "threads of the agent",
}

_PROBE = f"""
import functools, inspect, json, os, signal, sys, threading, types
from pathlib import Path

OURS = {str(PACKAGE)!r}

def plain_function(value):
    while type(value) is functools.partial:
        value = value.func
    return value.__func__ if type(value) is types.MethodType else value

def is_ours(value):
    value = plain_function(value)
    return type(value) is types.FunctionType and value.__code__.co_filename.startswith(OURS)

def excepthooks():
    hook = sys.excepthook
    while is_ours(hook):
        file = plain_function(hook).__code__.co_filename
        yield f"sys.excepthook of {{os.path.relpath(file, OURS)}}"
        hook = hook.args[0] if type(hook) is functools.partial else inspect.getclosurevars(hook).nonlocals["before"]

def patched_names():
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("__main__", "__mp_main__", "distboot", "_distboot", "sitecustomize"):
            continue
        for key, value in list(vars(module).items()):
            if value is sys.excepthook:
                yield from excepthooks()
            elif is_ours(value):
                yield f"{{name}}.{{key}}"
            elif isinstance(value, type) and value.__module__ == name:
                yield from (f"{{name}}.{{key}}.{{inner}}" for inner, own in vars(value).items() if is_ours(own))

def handled_signals():
    lines = Path("/proc/self/status").read_text().splitlines()
    caught = int(next(line.split()[1] for line in lines if line.startswith("SigCgt")), 16)
    for number in signal.valid_signals() - {{signal.SIGINT}}:
        if caught >> number - 1 & 1:
            yield getattr(number, "name", f"signal {{number}}")

def found():
    names = {{*patched_names(), *handled_signals()}}
    if "write" in vars(sys.stderr):
        names.add("sys.stderr.write")
    names.update(
        f"sys.meta_path for {{finder.name}}" for finder in sys.meta_path if is_ours(getattr(finder, "find_spec", None))
    )
    names.update(thread.name for thread in threading.enumerate() if thread.name.startswith("distboot"))
    if "_distboot" in sys.modules:
        names.add("_distboot")
    loaded = str(getattr(sys.modules.get("sitecustomize"), "__file__", ""))
    # Ours runs the one of a distribution, as Debian's Python has it, which then has the name
    if OURS in loaded or loaded and "_distboot" in sys.modules:
        names.add("sitecustomize")
    return sorted(names)

def write(name):
    Path(f"{{name}}-{{os.environ['RANK']}}.json").write_text(json.dumps(found()))
"""
_INIT = """
import distboot
ctx = distboot.init("none", join_timeout=60)
write("init")
"""
_FAILED_INIT = """
import distboot
try:
    distboot.init("none", launcher="slurm", join_timeout=60)
except distboot.DistbootError:
    write("failed")
"""
_READ = """
getattr(ctx, "preempted")
write("read")
"""
_WORKERS = """
import multiprocessing as mp
def work(method):
    write(f"worker-{method}")
def start_workers():
    for method in ("fork", "spawn"):
        worker = mp.get_context(method).Process(target=work, args=(method,))
        worker.start()
        worker.join()
        assert worker.exitcode == 0
    write("after-workers")
"""
SCRIPTS = {
    "alone": _INIT,
    "failed init": _FAILED_INIT,
    "init": _INIT,
    "read": _INIT + _READ,
    "read in a thread": "import threading\ndef run():\n    "
    + (_INIT + _READ).strip().replace("\n", "\n    ")
    + "\nthread = threading.Thread(target=run)\nthread.start(); thread.join()",
    "workers": f"{_WORKERS}\nif __name__ == '__main__':\n    "
    + (_INIT + _READ + "start_workers()").strip().replace("\n", "\n    "),
    "workers below the wrapper": f"{_WORKERS}\nif __name__ == '__main__':\n"
    "    write('wrapper')\n    start_workers()",
    "torch": _INIT + "import torch.distributed\nwrite('torch')",
}


def _find(by_hand: ByHand, script: str, **env: str) -> set[str]:
    """What is found in the processes of a script, of two ranks or of one."""
    ranks = 1 if script == "alone" else 2
    wrapper = ["-m", "distboot", "run", "--", sys.executable] if "wrapper" in script else []
    job = by_hand(_PROBE + SCRIPTS[script], ranks, wrapper=wrapper, env=env)
    assert set(job.codes()) == {0}, job.output(0)
    names: set[str] = set()
    for file in job.folder.glob("*-*.json"):
        names.update(json.loads(file.read_text()))
        file.unlink()
    return names


def _names(patches: list[Patch]) -> set[str]:
    """What can be seen of them in a process."""
    return {name for patch in patches for name in patch.names} - CALLS | {"signal.signal"}


Find = Callable[[str], set[str]]


@pytest.fixture(scope="module")
def found_before() -> dict[str, set[str]]:
    """What was found in the processes of a script, by its name."""
    return {}


@pytest.fixture
def find(by_hand: ByHand, found_before: dict[str, set[str]]) -> Find:
    """Finds what is in the processes of a script, with all that a user can turn on."""

    def found(script: str) -> set[str]:
        if script not in found_before:
            every = {"DISTBOOT_STOP_SIGNALS": "USR1", SHIELD: "1"}
            found_before[script] = _find(by_hand, script, **every)
        return found_before[script]

    return found


@pytest.mark.parametrize(
    "script",
    [
        name if name != "torch" else pytest.param(name, marks=[needs_torch, pytest.mark.all])
        for name in SCRIPTS
    ],
)
def test_every_patch_of_a_process_has_its_row(find: Find, script: str) -> None:
    found = find(script)
    assert found <= _names(PATCHES)
    assert [name for name in found if name.startswith("sys.excepthook of ")]


@needs_torch
def test_every_row_is_found_in_a_process(find: Find) -> None:
    found: set[str] = set()
    for script in (
        "alone",
        "failed init",
        "read in a thread",
        "workers",
        "workers below the wrapper",
        "torch",
    ):
        found |= find(script)
    assert _names(PATCHES) - found == set()


@pytest.mark.parametrize(
    ("script", "setting"),
    [
        ("init", DETECTION),
        ("workers", SHIELD),
        ("workers below the wrapper", DETECTION),
        ("workers below the wrapper", SHIELD),
    ],
)
def test_setting_turns_off_what_its_rows_name(by_hand: ByHand, script: str, setting: str) -> None:
    of_setting = [patch for patch in PATCHES if f"{setting}=0" in patch.off]
    others = [patch for patch in PATCHES if patch not in of_setting]
    turned_off = _names(of_setting) - _names(others)
    if setting == DETECTION:
        turned_off.add("signal.signal")
    assert turned_off
    assert _find(by_hand, script, **{setting: "0"}) & turned_off == set()


def _calls(path: Path) -> set[str]:
    calls = {
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    }
    return calls & CALLS


def test_every_call_that_changes_processes_is_listed() -> None:
    in_source: set[tuple[str, str]] = set()
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).as_posix()
        if file not in ELSEWHERE and file.partition("/")[0] not in ELSEWHERE:
            in_source.update((file, call) for call in _calls(path))
    in_table = {(patch.file, name) for patch in PATCHES for name in patch.names if name in CALLS}
    assert in_source - NOT_IN_A_SCRIPT.keys() == in_table
    assert in_source >= NOT_IN_A_SCRIPT.keys(), "an excuse for what is no longer there"


def test_every_file_of_the_table_is_there() -> None:
    assert [patch.file for patch in PATCHES if not (PACKAGE / patch.file).is_file()] == []
