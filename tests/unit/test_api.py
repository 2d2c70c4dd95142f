"""What users can rely on, name by name, and what a type checker says of it: the package has types, and the right ones.

A change of a name shows as a difference to api.txt, to be confirmed, and told. After a change that is meant:
DISTBOOT_WRITE_API=1 make test ARGS=tests/unit/test_api.py; and a line in CHANGELOG.md.
"""

import argparse
import ast
import dataclasses
import inspect
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest
from conftest import PACKAGE
from launched import all_with

import distboot
from distboot import (
    Context,
    DistbootError,
    Placement,
    detect,
    frameworks,
    init,
)
from distboot.base.errors import CODES
from distboot.base.settings import KNOWN
from distboot.cli.commands import COMMANDS
from distboot.detection.order import LAUNCHERS
from distboot.detection.placement import PLATFORMS, VARIABLES
from distboot.frameworks import FILES
from distboot.frameworks._tf_options import STRATEGIES
from distboot.lightning import DistbootEnvironment

TEXT = Path(__file__).parents[1] / "api.txt"


class _Plain(str):
    """An annotation that is shown without the quotes of a string."""

    __slots__ = ()
    __repr__ = str.__str__


def _signature(function: Callable[..., object]) -> str:
    said = inspect.signature(function)
    parameters = [
        each if each.annotation is each.empty else each.replace(annotation=_Plain(each.annotation))
        for each in said.parameters.values()
    ]
    return str(
        said.replace(parameters=parameters, return_annotation=_Plain(said.return_annotation))
    )


def _fields(kind: type) -> dict[str, str]:
    """Of a record: the names, and what is said of each."""
    if dataclasses.is_dataclass(kind):
        missing = dataclasses.MISSING
        fields = dataclasses.fields(kind)
        kinds = {each.name: each.type for each in fields}
        optional = {
            each.name for each in fields if not (each.default is each.default_factory is missing)
        }
    else:
        kinds = {
            name: vars(kind)["__annotations__"][name].__forward_arg__
            for name in getattr(kind, "_fields", ())
        }
        optional = set(getattr(kind, "_field_defaults", ()))
    return {
        name: f"{said}{', optional' if name in optional else ''}" for name, said in kinds.items()
    }


def _members(kind: type) -> Iterator[str]:
    fields = _fields(kind)
    yield from (f"  {name}: {said}" for name, said in fields.items() if not name.startswith("_"))
    for name, member in sorted(vars(kind).items()):
        if name.startswith("_") or name in fields:
            continue
        if isinstance(member, property):
            yield f"  {name}: {inspect.signature(member.fget).return_annotation}, read-only"  # type: ignore[arg-type]
        else:
            yield f"  {name}{_signature(getattr(kind, name))}"


class _Caught(Exception):  # noqa: N818 - not an error
    """A command's parser, which it was about to use."""


def _options(command: str) -> Iterator[str]:
    def caught(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _Caught(parser)

    known = COMMANDS[command]
    with (
        patch.object(argparse.ArgumentParser, "parse_args", caught),
        pytest.raises(_Caught) as found,
    ):
        getattr(import_module(known.module, "distboot.cli"), known.function)(["--help"])
    for action in found.value.args[0]._actions:
        more = {"choices": action.choices, "default": action.default, "nargs": action.nargs}
        said = "".join(
            f", {key} {value!r}"
            for key, value in more.items()
            if value not in (None, argparse.SUPPRESS)
        )
        yield f"  {' '.join(action.option_strings)} {action.metavar or ''}".rstrip() + said


def _surface() -> Iterator[str]:
    yield f"distboot: {', '.join(distboot.__all__)}"
    for function in (init, detect):
        yield f"\n{function.__name__}{_signature(function)}"
    for kind in (Placement, Context, DistbootError, DistbootEnvironment):
        yield f"\n{kind.__module__}.{kind.__name__}" + ("" if _fields(kind) else _signature(kind))
        yield from _members(kind)
    yield f"  {', '.join(vars(DistbootError('usage', 'message')))}: attributes of a DistbootError"
    for command in COMMANDS:
        yield f"\npython -m distboot {command}"
        yield from _options(command)
    source = "\n".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))
    yield "\nerror codes and their exit codes"
    yield from (f"  {code}: {number}" for code, (number, _) in sorted(CODES.items()))
    lists = {
        "frameworks": FILES,
        "launchers, the innermost first": list(LAUNCHERS),
        "platforms": [platform.name for platform in PLATFORMS],
        "variables that are always exported": VARIABLES.values(),
        "settings": sorted(set(re.findall(r'"(DISTBOOT_[A-Z_]+)[="]', source))),
    }
    for title, names in lists.items():
        yield f"\n{title}"
        yield f"  {', '.join(names)}"


def test_public_names_signatures_and_defaults() -> None:
    found = "\n".join(_surface()) + "\n"
    if os.environ.get("DISTBOOT_WRITE_API"):
        TEXT.write_text(found)
    assert found == TEXT.read_text()


def test_settings_are_those_known_for_misspellings() -> None:
    _, _, settings = TEXT.read_text().rpartition("\nsettings\n")
    assert settings.strip().split(", ") == sorted(KNOWN)


def test_placement_fields_match_show_json_and_context() -> None:
    told = set(detect({}).as_dict())
    assert told == set(Placement._fields)
    context = {each.name for each in dataclasses.fields(Context)}
    assert told - context == {"sources", "notes", "node_level"}


RIGHT = """\
import distboot
from distboot import Context, DistbootError, Placement, detect, init
from distboot.lightning import DistbootEnvironment

ctx = distboot.init()
reveal_type(ctx)  # distboot.context.Context
reveal_type(ctx.rank)  # int
reveal_type(ctx.job_id)  # str | None
reveal_type(ctx.hosts)  # tuple[str, ...]
reveal_type(ctx.device)  # torch.device | Any
reveal_type(ctx.device.type)  # str | Any
reveal_type(ctx.comm)  # Any
reveal_type(ctx.task_id)  # int | None
reveal_type(ctx.is_main)  # bool
reveal_type(ctx.preempted)  # bool

with init("tensorflow", strategy="multi_worker_mirrored", timeout=60) as inner:
    reveal_type(inner)  # distboot.context.Context
    with inner.main_first(timeout=10), inner.local_main_first():
        inner.barrier()

placement = detect({"RANK": "0", "WORLD_SIZE": "1"}, launcher="torch")
reveal_type(placement)  # distboot.detection.placement.Placement
reveal_type(placement.node_rank)  # int | None
reveal_type(placement.sources)  # Mapping[str, str]
reveal_type(placement.notes)  # tuple[str, ...]
reveal_type(detect().platform)  # str | None

def place(given: Placement, context: Context) -> int:
    try:
        return given.rank + context.world_size
    except DistbootError as error:
        reveal_type(error.code)  # str
        reveal_type(error.hint)  # str
        return error.exit_code

reveal_type(DistbootEnvironment().global_rank())  # int
reveal_type(distboot.__version__)  # str
"""
WRONG = """\
import distboot
from distboot import detect, init
from distboot import nothing  # attr-defined

init(3)  # arg-type
init("pytorch")  # arg-type
init("tensorflow", strategy="mirorred")  # arg-type
init("torch", "nccl")  # call-arg
init(rank=1)  # call-arg
init(timeout="long")  # arg-type
detect({"RANK": 0})  # dict-item
detect().rank = 1  # misc
detect().node_rank + 1  # operator
detect().rank_of  # attr-defined
ctx = distboot.init()
ctx.is_main = True  # misc
ctx.barrier(10)  # call-arg
ctx.device.kind  # union-attr
with ctx.main_first("long"):  # arg-type
    pass
ctx.master_addr.port  # attr-defined
distboot.start()  # attr-defined
"""


# Of torch, what the programs use
TORCH = """\
class device:
    type: str
    index: int
"""


def _installed(folder: Path, *, torch: bool) -> Path:
    """The Python of a user, with distboot as installed."""
    environment = folder / "environment"
    venv.create(environment, symlinks=True, with_pip=False)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "distboot").symlink_to(PACKAGE)
    if torch:
        (packages / "torch").mkdir()
        (packages / "torch" / "__init__.py").write_text(TORCH)
        (packages / "torch" / "py.typed").touch()
    return environment / "bin" / "python"


def _checked(folder: Path, python: Path) -> dict[str, dict[int, list[str]]]:
    """For each of the programs, by line: what mypy reveals, and the codes of its errors."""
    (folder / "right.py").write_text(RIGHT)
    (folder / "wrong.py").write_text(WRONG)
    mypy = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        str(python),
        "--no-error-summary",
        "--cache-dir",
        str(folder / "cache"),
    ]
    done = subprocess.run(
        [*mypy, "right.py", "wrong.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stderr == ""
    lines: dict[str, dict[int, list[str]]] = {"right.py": {}, "wrong.py": {}}
    for file, line, text in re.findall(r"^(\w+\.py):(\d+): (.*)$", done.stdout, re.MULTILINE):
        revealed = re.fullmatch(r'note: Revealed type is "(.*)"', text)
        error = re.fullmatch(r"error: .*\[([\w-]+)\]", text)
        if revealed or error:
            lines[file].setdefault(int(line), []).append((revealed or error)[1])  # type: ignore[index]
    return lines


def _expected(program: str) -> dict[int, list[str]]:
    comments = (line.partition("  # ")[2] for line in program.splitlines())
    return {number: [text] for number, text in enumerate(comments, 1) if text}


def _plain(found: dict[int, list[str]]) -> dict[int, list[str]]:
    """What mypy reveals in the words of a person: a named tuple's fields are spelled out there."""
    spelled = re.compile(r"\b(?:builtins|typing)\.|tuple\[.*, fallback=(.*)\]|Any \| (?=Any)")
    return {line: [spelled.sub(r"\1", text) for text in texts] for line, texts in found.items()}


@all_with("mypy")
def test_right_uses_type_check_and_wrong_ones_fail(tmp_path: Path) -> None:
    found = _checked(tmp_path, _installed(tmp_path, torch=True))
    assert _plain(found["right.py"]) == _expected(RIGHT)
    assert found["wrong.py"] == _expected(WRONG)


@all_with("mypy")
def test_types_hold_where_torch_is_not_installed(tmp_path: Path) -> None:
    """What is torch's is unknown then, and no error in the program of a user."""
    found = _checked(tmp_path, _installed(tmp_path, torch=False))
    expected = _expected(RIGHT)
    for line, text in enumerate(RIGHT.splitlines(), 1):
        if "ctx.device" in text:
            expected[line] = ["Any"]
    assert _plain(found["right.py"]) == expected
    without_torch = _expected(WRONG.replace("  # union-attr", ""))
    assert found["wrong.py"] == without_torch


def test_type_checkers_know_every_framework_and_strategy() -> None:
    aliases = {}
    for node in ast.walk(ast.parse(Path(frameworks.__file__).read_text())):
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Literal["):
            aliases[ast.unparse(node.targets[0])] = ast.literal_eval(node.value.slice)  # type: ignore[attr-defined]
    assert aliases == {"Framework": tuple(FILES), "Strategy": STRATEGIES}


def test_editors_find_each_name_where_python_does() -> None:
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    imported = {
        alias.name: node.module
        for node in ast.walk(stub)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == vars(distboot)["_HOMES"]


@all_with("jedi")
def test_editor_shows_arguments_and_completes_names(tmp_path: Path) -> None:
    jedi = import_module("jedi")
    project = jedi.Project(tmp_path, sys_path=[str(PACKAGE.parent), *sys.path])
    calling, of_module, of_context = (
        jedi.Script(f"import distboot\n{text}", path=tmp_path / f"{name}.py", project=project)
        for name, text in (
            ("calling", "distboot.init("),
            ("of_module", "distboot."),
            ("of_context", "ctx = distboot.init()\nctx."),
        )
    )
    (shown,) = calling.get_signatures()
    assert [each.name for each in shown.params] == list(inspect.signature(init).parameters)
    assert "backend: backend of the process group" in shown.docstring()
    names = {each.name for each in of_module.complete()}
    assert names >= set(distboot.__all__) - {"__version__"}
    members = {each.name for each in of_context.complete()}
    assert members >= {"rank", "device", "main_first", "preempted"}
