"""The tests themselves: their names, and how many of them reach past the public surface of distboot."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("test_*.py"))
PUBLIC = ("distboot", "distboot.lightning")
MOST_WORDS = 8
# Files whose subject is a part of distboot. Other tests take such parts from `lib/inside.py`.
MOST_FILES = 35


def _names(tree: ast.Module) -> list[str]:
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in functions if name.startswith("test_")]


def _internals(tree: ast.Module) -> set[str]:
    """What a test imports of distboot without its being public."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            imported = {f"{node.module}.{alias.name}" for alias in node.names}
            if node.module not in PUBLIC:
                found |= imported
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} - set(PUBLIC)
    return {name for name in found if name.startswith("distboot.")}


def test_names_have_eight_words_at_most() -> None:
    found = []
    for path in FILES:
        for name in _names(ast.parse(path.read_text())):
            words = name.removeprefix("test_").split("_")
            if len(words) > MOST_WORDS:
                found.append(f"{path.name}: {name}")
    assert found == []


def test_few_files_import_internals() -> None:
    found = [path.name for path in FILES if _internals(ast.parse(path.read_text()))]
    assert 0 < len(found) <= MOST_FILES
