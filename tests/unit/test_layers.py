"""No framework is imported at module level, and `import distboot` is nearly free.

That imports run one way is checked by import-linter (`make lint`), with the contracts in pyproject.toml.
"""

import ast
import sys
from pathlib import Path

import pytest
from conftest import PACKAGE, Run
from launched import needs_torch
from ranks import RunRanks

FRAMEWORKS = {"torch", "deepspeed", "horovod", "tensorflow", "mpi4py", "jax", "lightning", "numpy"}


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


def _is_for_types(node: ast.AST) -> bool:
    """Whether Python skips it, and only type checkers read it."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_framework_is_imported_at_module_level(path: Path) -> None:
    tree = ast.parse(path.read_text())
    inside = {
        id(n)
        for part in ast.walk(tree)
        if isinstance(part, ast.FunctionDef) or _is_for_types(part)
        for n in ast.walk(part)
    }
    for node, imported in _imports(path, tree):
        assert id(node) in inside or imported.split(".")[0] not in FRAMEWORKS


@pytest.mark.parametrize(
    "use",
    [
        *(
            "",
            "distboot.detect({})",
            "import distboot.cli.main",
            "import distboot.tools.doctor.command",
        ),
        "import distboot.rendezvous.plan, distboot.tools.show",
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


def test_wrapper_of_a_single_process_loads_no_dataclasses(run: Run) -> None:
    # They import `inspect`, and compile the methods of each: together a quarter of the time until the command starts.
    result = run(sys.executable, "-X", "importtime", "-m", "distboot", "run", "--", "true")
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert loaded & {"distboot.agent.supervisor", "dataclasses", "inspect"} == {
        "distboot.agent.supervisor"
    }


def test_sidecar_loads_what_it_needs_and_no_launcher(run: Run) -> None:
    # Beside every rank of a node one is started, as the very first thing.
    loaded = (
        "import sys, distboot.agent.sidecar; print(*(name for name in "
        "sys.modules if 'distboot' in name))"
    )
    names = run(sys.executable, "-c", loaded).stdout.split()
    assert "distboot.agent.loop" in names
    assert not [name for name in names if name.startswith(("distboot.detection", "distboot.cli"))]
    assert len(names) <= 57


@needs_torch
@pytest.mark.parametrize("ranks", [1, 2], ids=["alone", "two"])
def test_init_loads_what_it_needs(run_ranks: RunRanks, ranks: int) -> None:
    script = (
        "import sys, distboot\ndistboot.init('torch')\nprint(*(n for n in "
        "sys.modules if 'distboot' in n))"
    )
    for rank in run_ranks(script, places=[{}] * ranks):
        names = rank.out.split()
        assert "distboot.frameworks._process_group" in names
        assert len(names) <= 74, sorted(names)


def test_public_names_are_there(run: Run) -> None:
    check = (
        "import distboot; print(all(getattr(distboot, name) for name in "
        "distboot.__all__)); distboot.nothing"
    )
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

    assert max(map(of, FILES)) <= 13
