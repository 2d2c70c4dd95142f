"""Imports run one way, no framework is imported at module level, and `import distboot` is nearly free."""

import ast
import sys
from pathlib import Path

import pytest
from conftest import PACKAGE, Run
from launched import needs_torch
from ranks import RunRanks

# The floors of the house, from the ground up, and on each the order of its parts: a module imports from parts below its
# own only. A part is a module, a folder, or, where that has an order of its own, what is in it.
FLOORS = (
    # 1: the exception, the settings, and texts
    ({"text"}, {"errors"}, {"limits"}, {"settings", "process"}),
    # 2: what runs in the process of the script
    ({"script"},),
    # 3: this host; the environment of this process
    (
        {"host"},
        {"detection.parse", "detection.placement"},
        {"detection.inherited"},
        {"detection.env_reader", "detection.signs"},
        {"detection.node_platform"},
        {"detection.launchers"},
        {"detection.detect", "detection.allocation"},
        {"detection.export", "detection.here", "surroundings"},
    ),
    # 4: the ranks meet, and what rank 0 learns of that
    (
        {"rendezvous.protocol"},
        {"rendezvous.foreign"},
        {"rendezvous.messages"},
        {"rendezvous.membership"},
        {"rendezvous.keys", "report"},
        {"rendezvous.connection_pool", "rendezvous.local"},
        {"rendezvous.worker"},
        {"rendezvous.coordinator"},
        {"rendezvous.join"},
        {"rendezvous.job_info"},
        {"rendezvous.plan"},
    ),
    # 5: a process is supervised
    ({"agent"},),
    # 6: frameworks
    ({"doctor"}, {"context"}, {"frameworks"}),
    # 7: the public API
    ({"initialize"}, {"lightning"}),
    # 8: the command line
    ({"trial"}, {"cli", "pytest"}, {"__init__", "__main__"}),
)
LAYERS = tuple(part for floor in FLOORS for part in floor)
ORDERED = {"detection", "rendezvous"}  # folders whose parts have an order of their own
FRAMEWORKS = {"torch", "deepspeed", "horovod", "tensorflow", "mpi4py", "jax", "lightning", "numpy"}


def _part(parts: tuple[str, ...]) -> str:
    """The part of the package that a module or a name in it belongs to."""
    return ".".join(parts[:2]) if parts[0] in ORDERED else parts[0]


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
    own = _part(path.relative_to(PACKAGE).with_suffix("").parts)
    if own in ("detection.__init__", "rendezvous.__init__"):
        assert not _imports(path, ast.parse(path.read_text()))
        return
    assert own in layer_of, "a new module needs its layer"
    for _, imported in _imports(path, ast.parse(path.read_text())):
        package, *parts = imported.split(".")
        part = _part(tuple(parts)) if package == "distboot" and parts else own
        if part in layer_of and part != own:
            assert layer_of[part] < layer_of[own], f"{own} must not import {part}"


@pytest.mark.parametrize("folder", ["detection.launchers", "frameworks"])
def test_siblings_never_import_each_other(folder: str) -> None:
    for path in sorted(PACKAGE.joinpath(*folder.split(".")).glob("[a-z]*.py")):
        siblings = {f"distboot.{folder}.{other.stem}" for other in path.parent.glob("[a-z]*.py")}
        for _, imported in _imports(path, ast.parse(path.read_text())):
            assert not siblings & {imported, imported.rpartition(".")[0]}, (
                f"{path.name} imports {imported}"
            )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_framework_is_imported_at_module_level(path: Path) -> None:
    tree = ast.parse(path.read_text())
    inside = {
        id(n)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for n in ast.walk(function)
    }
    for node, imported in _imports(path, tree):
        assert id(node) in inside or imported.split(".")[0] not in FRAMEWORKS


@pytest.mark.parametrize(
    "use",
    [
        *("", "distboot.detect({})", "import distboot.cli.main", "import distboot.cli.doctor"),
        "import distboot.rendezvous.plan, distboot.cli.show",
    ],
)
def test_importing_and_detecting_load_no_third_party_module(run: Run, use: str) -> None:
    script = """
import sys
before = set(sys.modules)
import distboot
{use}
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
print(sorted(new - set(sys.stdlib_module_names)), len(set(sys.modules) - before))
"""
    result = run(sys.executable, "-c", script.format(use=use))
    names, _, count = result.stdout.strip().rpartition(" ")
    assert (names, result.stderr) == ("['distboot']", "")
    if not use:
        assert int(count) <= 2, (
            "`import distboot` loads its own __init__ (and __future__), nothing else"
        )


def test_wrapper_of_a_process_that_is_alone_does_without_dataclasses(run: Run) -> None:
    # They import `inspect`, and compile the methods of each: together a quarter of the time until the command starts.
    result = run(sys.executable, "-X", "importtime", "-m", "distboot", "run", "--", "true")
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert loaded & {"distboot.agent.supervisor", "dataclasses", "inspect"} == {
        "distboot.agent.supervisor"
    }


def test_sidecar_loads_what_it_needs_and_no_launcher(run: Run) -> None:
    # Beside every rank of a node one is started, as the very first thing.
    loaded = "import sys, distboot.agent.sidecar; print(*(name for name in sys.modules if 'distboot' in name))"
    names = run(sys.executable, "-c", loaded).stdout.split()
    assert "distboot.agent.loop" in names
    assert not [name for name in names if name.startswith(("distboot.detection", "distboot.cli"))]
    assert len(names) <= 42


@needs_torch
@pytest.mark.parametrize("ranks", [1, 2], ids=["alone", "two"])
def test_init_loads_what_it_needs(run_ranks: RunRanks, ranks: int) -> None:
    script = "import sys, distboot\ndistboot.init('torch')\nprint(*(n for n in sys.modules if 'distboot' in n))"
    for rank in run_ranks(script, places=[{}] * ranks):
        names = rank.out.split()
        assert "distboot.frameworks._process_group" in names
        assert len(names) <= 59, sorted(names)


def test_public_names_are_there(run: Run) -> None:
    check = "import distboot; print(all(getattr(distboot, name) for name in distboot.__all__)); distboot.nothing"
    result = run(sys.executable, "-c", check)
    assert result.stdout == "True\n"
    assert "AttributeError: module 'distboot' has no attribute 'nothing'" in result.stderr


NAMES = {
    ".".join(("distboot", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in FILES
}
FILE_OF = {name.removesuffix(".__init__"): path for name, path in NAMES.items()}


def _imported(path: Path) -> set[Path]:
    """The files of ours that one imports when it is loaded, not for types, and not in a function."""
    tree = ast.parse(path.read_text())
    loaded = ast.Module(
        [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], []
    )
    # What is imported is a module, or a name in one.
    files = (
        FILE_OF.get(name) or FILE_OF.get(name.rpartition(".")[0])
        for _, name in _imports(path, loaded)
    )
    return {file for file in files if file is not None} - {path}


def test_longest_chain_of_imports_is_bounded() -> None:
    length: dict[Path, int] = {}

    def of(path: Path) -> int:
        if path not in length:
            length[path] = 1 + max(map(of, _imported(path)), default=0)
        return length[path]

    assert max(map(of, FILES)) <= 11
