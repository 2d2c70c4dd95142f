"""How densely the package is packed: what a reader has to unfold in each function and each module.

    python tests/density.py    lower tests/density.txt to the figures of today, and list what is over a limit

A *decision* is an `if`, a conditional expression, a `for`, a `while`, an `except`, a `case`, a comprehension and each
of its ifs, and each operand of `and` or `or` beyond the first. Each function counts one more, and includes the
functions in it. *Code lines* are neither blank nor a comment nor part of a docstring.

`tests/density.txt` lists the exceptions, one function or module a line. It only shrinks. Git merges it line by line
(`.gitattributes`); where a merge leaves two lines for one name, the command keeps the larger figures, then lowers them.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXCEPTIONS = ROOT / "tests/density.txt"
MOST_COLUMNS = 100

# The figures, and the most of each that a function or module may have without being listed.
LIMITS = {
    "decisions": 10,  # of a function
    "per-100": 35,  # decisions per 100 code lines of the functions of a module, rounded up
    "tuples": 0,  # assignments of a literal tuple to several names
    "long-lines": 0,  # code lines over `MOST_COLUMNS`
}
LEAST_LINES = 20  # of functions in a module: with fewer, its density says nothing

Figures = dict[str, int]
Table = dict[str, Figures]  # by "file", or "file function"

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_ONE_DECISION = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.match_case,
)
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def decisions(tree: ast.AST) -> int:
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, _ONE_DECISION):
            found += 1
        elif isinstance(node, ast.BoolOp):
            found += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            found += 1 + len(node.ifs)
    return found


def measure(source: str, file: str) -> Table:
    """Every figure above 0 of a module, its functions, and its code outside functions (`<module>`)."""
    tree = ast.parse(source)
    code = _code_lines(source, tree)
    lines = source.splitlines()
    long_lines = {number for number in code if len(lines[number - 1]) > MOST_COLUMNS}
    tuples = set(_tuple_assignments(tree))

    table: Table = {}
    total_decisions = 0
    total_lines = 0
    in_functions: set[int] = set()
    for name, function in _functions(tree):
        assert function.end_lineno is not None
        span = set(range(function.lineno, function.end_lineno + 1))
        in_functions |= span
        total_decisions += decisions(function)
        total_lines += len(span & code)
        table[f"{file} {name}"] = {
            "decisions": decisions(function),
            "tuples": len(span & tuples),
            "long-lines": len(span & long_lines),
        }

    table[f"{file} <module>"] = {
        "tuples": len(tuples - in_functions),
        "long-lines": len(long_lines - in_functions),
    }
    if total_lines >= LEAST_LINES:
        table[file] = {"per-100": -(-100 * total_decisions // total_lines)}
    return table


def _code_lines(source: str, tree: ast.AST) -> set[int]:
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return found.difference(*_docstrings(tree))


def _docstrings(tree: ast.AST) -> Iterator[range]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | _Function):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            yield range(docstring.lineno, docstring.end_lineno + 1)


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, _Function]]:
    """Functions and methods by qualified name, without those inside other functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _Function):
            yield f"{prefix}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        else:
            yield from _functions(node, prefix)


def _tuple_assignments(tree: ast.AST) -> Iterator[int]:
    """The lines of `a, b = x, y`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        if any(isinstance(target, ast.Tuple) for target in node.targets):
            yield node.lineno


def measured() -> Table:
    """The figures of the package as it is now."""
    table: Table = {}
    for path in sorted((ROOT / "distboot").rglob("*.py")):
        table.update(measure(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))))
    return table


def over_limits(table: Mapping[str, Figures]) -> Table:
    """The figures that need an exception."""
    found: Table = {}
    for name, figures in table.items():
        over = {figure: value for figure, value in figures.items() if value > LIMITS[figure]}
        if over:
            found[name] = over
    return found


def read_exceptions(text: str) -> Table:
    """`"distboot/x.py Class.f decisions=14 tuples=1"`, a line each.

    Of a name that a merge left twice, the larger figures count. Comments and conflict marks are skipped.
    """
    found: Table = {}
    for line in text.splitlines():
        words = line.split()
        if not words or not words[0].endswith(".py"):
            continue
        name = " ".join(word for word in words if "=" not in word)
        figures = found.setdefault(name, {})
        for word in words:
            figure, is_figure, value = word.partition("=")
            if is_figure:
                figures[figure] = max(figures.get(figure, 0), int(value))
    return found


def write_exceptions(exceptions: Mapping[str, Figures]) -> str:
    lines = ["# What is over the limits of tests/density.py. Rewritten, only downwards, by that."]
    for name, figures in sorted(exceptions.items()):
        values = [f"{figure}={value}" for figure, value in figures.items()]
        lines.append(" ".join([name, *values]))
    return "\n".join(lines) + "\n"


def too_dense(now: Mapping[str, Figures], exceptions: Mapping[str, Figures]) -> list[str]:
    """What is over its limit, or over its exception, in words."""
    found = []
    for name, figures in over_limits(now).items():
        for figure, value in figures.items():
            allowed = exceptions.get(name, {}).get(figure, LIMITS[figure])
            if value > allowed:
                found.append(f"{name}: {figure} is {value}, allowed is {allowed}")
    return found


def lowered(now: Mapping[str, Figures], exceptions: Mapping[str, Figures]) -> Table:
    """The exceptions that are still needed, each as low as it can be."""
    needed = over_limits(now)
    found: Table = {}
    for name, figures in exceptions.items():
        kept = {}
        for figure, allowed in figures.items():
            if figure in needed.get(name, {}):
                kept[figure] = min(allowed, needed[name][figure])
        if kept:
            found[name] = kept
    return found


def too_generous(now: Mapping[str, Figures], exceptions: Mapping[str, Figures]) -> list[str]:
    """What has to be changed in the exceptions, in words."""
    needed = lowered(now, exceptions)
    found = []
    for name, figures in exceptions.items():
        for figure, allowed in figures.items():
            least = needed.get(name, {}).get(figure)
            if least is None:
                found.append(f"{name}: remove {figure}={allowed}")
            elif least < allowed:
                found.append(f"{name}: {figure}={allowed} becomes {figure}={least}")
    return found


def main() -> None:
    now = measured()
    exceptions = read_exceptions(EXCEPTIONS.read_text(encoding="utf-8"))
    for line in too_generous(now, exceptions):
        print(line)
    exceptions = lowered(now, exceptions)
    EXCEPTIONS.write_text(write_exceptions(exceptions), encoding="utf-8")
    for line in too_dense(now, exceptions):
        print(f"over the limit: {line}")


if __name__ == "__main__":
    main()
