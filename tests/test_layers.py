"""Imports run one way, no framework is imported at module level, and `import distboot` is nearly free."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from conftest import PACKAGE, Run

# From the bottom to the top: a module imports only from layers below its own.
LAYERS = (
    {"errors"},
    {"placement", "address", "hostlist", "accelerators", "cpus", "threads", "ending"},
    {"platforms", "handoff", "facts", "interfaces", "resolve", "logs", "arguments"},
    {"reading", "child", "detached"},
    {"launchers"},
    {"rivals"},
    {"detection"},
    {"exports", "misspelled", "rendezvous", "record", "supervise", "deadline"},
    {"roster", "mpi", "nodes"},
    {"report"},
    {"rollcall"},
    {"lifeline", "doctor"},
    {"context"},
    {"frameworks"},
    {"bootstrap"},
    {"lightning"},
    {"cli"},
    {"__init__", "__main__"},
)
FRAMEWORKS = {"torch", "deepspeed", "horovod", "tensorflow", "mpi4py", "jax", "lightning", "numpy"}


def _name(path: Path) -> str:
    """The part of the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path, tree: ast.AST) -> list[tuple[ast.stmt, str]]:
    """Every import in a file as an absolute dotted name."""
    package = ["distboot", *path.relative_to(PACKAGE).parts[:-1]]
    found: list[tuple[ast.stmt, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node, f"{module}.{alias.name}") for alias in node.names]
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    layer_of = {name: index for index, names in enumerate(LAYERS) for name in names}
    own = _name(path)
    assert own in layer_of, "a new module needs its layer"
    for _, imported in _imports(path, ast.parse(path.read_text())):
        parts = imported.split(".")
        if parts[0] != "distboot" or len(parts) < 2 or parts[1] not in layer_of or parts[1] == own:
            continue
        assert layer_of[parts[1]] < layer_of[own], f"{own} must not import {parts[1]}"


@pytest.mark.parametrize("folder", ["launchers", "frameworks"])
def test_siblings_never_import_each_other(folder: str) -> None:
    for path in sorted((PACKAGE / folder).glob("[a-z]*.py")):
        for _, imported in _imports(path, ast.parse(path.read_text())):
            sibling = imported.removeprefix(f"distboot.{folder}.")
            assert sibling == imported or sibling.startswith("_"), f"{path.name} imports {sibling}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_framework_is_imported_at_module_level(path: Path) -> None:
    tree = ast.parse(path.read_text())
    inside = {id(n) for function in ast.walk(tree) if isinstance(function, ast.FunctionDef) for n in ast.walk(function)}
    for node, imported in _imports(path, tree):
        assert id(node) in inside or imported.split(".")[0] not in FRAMEWORKS


_ONLY_STDLIB = """
import sys
before = set(sys.modules)
import distboot
{use}
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
print(sorted(new - set(sys.stdlib_module_names)), len(set(sys.modules) - before))
"""


@pytest.mark.parametrize(
    "use",
    [
        "",
        "distboot.detect({})",
        "import distboot.cli.main",
        "import distboot.rollcall.attend, distboot.cli.job",
        "import distboot.cli.doctor",
    ],
)
def test_importing_and_detecting_load_no_third_party_module(run: Run, use: str) -> None:
    result = run(sys.executable, "-c", _ONLY_STDLIB.format(use=use))
    names, _, count = result.stdout.strip().rpartition(" ")
    assert (names, result.stderr) == ("['distboot']", "")
    if not use:
        assert int(count) <= 2, "`import distboot` loads its own __init__ (and __future__), nothing else"


def test_wrapper_of_a_process_that_is_alone_does_without_dataclasses(run: Run) -> None:
    # They import `inspect`, and compile the methods of each: together a quarter of the time until the command starts.
    result = run(sys.executable, "-X", "importtime", "-m", "distboot", "run", "--", "true")
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert loaded & {"distboot.supervise", "dataclasses", "inspect"} == {"distboot.supervise"}


def test_public_names_are_there(run: Run) -> None:
    check = "import distboot; print(all(getattr(distboot, name) for name in distboot.__all__)); distboot.nothing"
    result = run(sys.executable, "-c", check)
    assert result.stdout == "True\n"
    assert "AttributeError: module 'distboot' has no attribute 'nothing'" in result.stderr
