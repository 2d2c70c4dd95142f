"""What the syntax of a Python script shows: what it imports and calls, and which options it adds.

Of a script that this Python cannot parse (it is of another one, or longer than what is read of it) the
lines show what they can.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from operator import attrgetter

from ..base.patterns import pattern

# What adds an option to a parser, in lower case: of argparse, optparse, click and typer, and absl;
# with the dashes that the script leaves out
_DASHES = {"add_argument": "", "add_option": "", "option": "", "define_integer": "--"}
# Of `from distboot import …`: what forms the job
_FORMS_JOB = {"init", "*"}
_NAME = attrgetter("name")  # of what one `import` statement lists
# How a script imports a package or calls a function: as it starts; then, too, but it may do without;
# perhaps never; or only for type checkers
_NEEDED = 0
_TRIED = 1
_LATER = 2
_NEVER = 3
# How it does what is below a node: libraries import in a function what they can do without
_BELOW = {
    "Try": _TRIED,
    "TryStar": _TRIED,
    "With": _TRIED,  # `with suppress(ImportError):`
    "If": _LATER,
    "For": _LATER,
    "While": _LATER,
    "Match": _LATER,
    "FunctionDef": _LATER,
    "AsyncFunctionDef": _LATER,
    "Lambda": _LATER,
    "IfExp": _LATER,
    "BoolOp": _LATER,  # `args.jax and jax.distributed.initialize()`
    "ListComp": _LATER,
    "SetComp": _LATER,
    "DictComp": _LATER,
    "GeneratorExp": _LATER,
}
_IMPORT = pattern(r"^(?:from|import)[ \t]+(\w+)", re.MULTILINE)
_INDENTED_IMPORT = pattern(r"^[ \t]+(?:from|import)[ \t]+(\w+)", re.MULTILINE)
_OPTION = pattern(r"""["'](--[\w-]+)["']""")


class Script:
    """What one script shows.

    A set has the packages that it imports, which are the first parts of modules' names, and the
    names that it calls: without what is before the last dot, and where it gives no argument also
    whole ones with `()`.
    """

    def __init__(self) -> None:
        self.needed: set[str] = set()  # what it imports and calls as it starts
        self.tried: set[str] = set()  # then, too, but it may do without
        self.later: set[str] = set()  # perhaps never
        self._by_way = {
            _NEEDED: self.needed,
            _TRIED: self.tried,
            _LATER: self.later,
        }
        self.options: list[str] = []  # that it adds to a parser
        self.calls_init = False  # whether it imports what forms the job

    def add(self, packages: Iterable[str], how: int) -> None:
        """It imports these."""
        names = {name.partition(".")[0] for name in packages}
        self.calls_init |= "distboot" in names
        self._by_way[how].update(names)

    def add_node(self, node: ast.AST, how: int) -> None:
        """Note what one node shows, without those below it."""
        if isinstance(node, ast.Import):
            names = map(_NAME, node.names)
            self.add(names, how)
        elif isinstance(node, ast.ImportFrom):
            self._take_from(node, how)
        elif isinstance(node, ast.Call):
            self._take_call(node, how)

    def _take_from(self, node: ast.ImportFrom, how: int) -> None:
        if node.level:  # a module beside the script
            return
        module = str(node.module)
        if module != "distboot":
            self.add([module], how)
            return
        names = set(map(_NAME, node.names))
        self.calls_init |= not names.isdisjoint(_FORMS_JOB)

    def _take_call(self, node: ast.Call, how: int) -> None:
        dotted = _dotted(node.func)
        _, _, name = dotted.rpartition(".")
        given = [*node.args, *node.keywords]
        called = self._by_way[how]
        called.add(name)
        if not given:
            called.add(f"{dotted}()")
        dashes = _DASHES.get(name.lower())
        if dashes is not None:
            texts = _texts(node.args)
            self.options += map(dashes.__add__, texts)


def _dotted(node: ast.AST) -> str:
    """`"jax.distributed.initialize"`; of what is no name only what follows it."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return ".".join(reversed(parts))


def _texts(arguments: Iterable[ast.AST]) -> list[str]:
    """The texts among these, also within `f"…"`, or after a `*`."""
    nodes = chain.from_iterable(map(ast.walk, arguments))
    return [str(node.value) for node in nodes if isinstance(node, ast.Constant)]


@lru_cache(maxsize=1)
def script_of(text: str) -> Script:
    """What a script of this text shows."""
    found = Script()
    tree = _parsed(text)
    if tree is None:
        _read_lines(text, found)
        return found
    # No recursion: a script may be nested deeply
    left: list[tuple[ast.AST, int]] = [(tree, _NEEDED)]
    while left:
        node, how = left.pop()
        if how == _NEVER:
            continue
        found.add_node(node, how)
        for child in ast.iter_child_nodes(node):
            left.append((child, max(how, _how_below(node, child))))
    return found


def _parsed(text: str) -> ast.Module | None:
    cannot = suppress(SyntaxError, ValueError, RecursionError, MemoryError)
    with cannot, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the script shows them
        return ast.parse(text)
    return None


def _how_below(node: ast.AST, child: ast.AST) -> int:
    """How a script imports and calls what is below a node."""
    if isinstance(node, ast.If) and child in node.body:
        return _how_if(node.test)
    kind = type(node).__name__
    return _BELOW.get(kind, _NEEDED)


def _how_if(test: ast.expr) -> int:
    """How a script imports and calls what is below `if` and this condition."""
    match test:
        case ast.Compare(
            left=ast.Name(id="__name__"),
            ops=[ast.Eq()],
            comparators=[ast.Constant(value="__main__")],
        ):
            return _NEEDED
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return _NEVER
    return _LATER


def _read_lines(text: str, script: Script) -> None:
    """Note what single lines show."""
    script.add(_IMPORT.findall(text), _NEEDED)
    script.add(_INDENTED_IMPORT.findall(text), _LATER)
    script.options += _OPTION.findall(text)
