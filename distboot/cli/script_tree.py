"""What the syntax of a Python script shows: what it imports and calls, and which options it adds.

A script that this Python cannot parse shows nothing: it is of another Python, or ends with a
syntax error.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

# What adds an option to a parser, in lower case: of argparse, optparse, click and typer, absl
_ADDS_OPTION = ("add_argument", "add_option", "option", "define_integer")
# Of `from distboot import …`: what forms the job
_FORMS_JOB = {"init", "*"}


class Script(ast.NodeVisitor):
    """What one script shows. A package is the first part of a module's name."""

    def __init__(self) -> None:
        self.imported: set[str] = set()  # packages, anywhere
        self.needed: set[str] = set()  # those that it imports as it starts
        self.tried: set[str] = set()  # the same below a `try`: it may do without them
        # The last parts of the names that it calls, with `()` where it gives no argument
        self.called: set[str] = set()
        self.options: list[str] = []  # texts that it gives to what adds an option to a parser
        self.calls_init = False  # whether it imports what forms the job
        self._later: set[str] = set()  # packages that it may never import
        self._now = self.needed
        self._adds_option = False

    # Imports

    def visit_Import(self, node: ast.Import) -> None:
        """`import horovod.torch as hvd`."""
        self._import(node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """`from horovod import torch`, but not from a module beside the script."""
        name = str(node.module)
        if name == "distboot":
            names = {alias.name for alias in node.names}
            self.calls_init |= not names.isdisjoint(_FORMS_JOB)
        elif not node.level:
            self._import([ast.alias(name)])

    def _import(self, modules: Sequence[ast.alias]) -> None:
        packages = {alias.name.partition(".")[0] for alias in modules}
        self.imported |= packages
        self._now |= packages
        self.calls_init |= "distboot" in packages

    # What is not imported in any case

    def visit_Try(self, node: ast.Try) -> None:
        """What is below a `try` may be missing."""
        packages = self._later
        if self._now is self.needed:
            packages = self.tried
        self._visit_below(node, packages)

    def visit_If(self, node: ast.If) -> None:
        """A condition may not hold; that on `__name__` does."""
        packages = self._later
        if "__name__" in ast.unparse(node.test):
            packages = self._now
        self._visit_below(node, packages)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """A function may not be called: libraries import there what they can do without."""
        self._visit_below(node, self._later)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - as `ast` calls it

    def _visit_below(self, node: ast.AST, packages: set[str]) -> None:
        """Visit a block, and note in this set what it imports."""
        before = self._now
        self._now = packages
        self.generic_visit(node)
        self._now = before

    # Calls

    def visit_Call(self, node: ast.Call) -> None:
        """`parser.add_argument("--local-rank")`."""
        dotted = ast.unparse(node.func)
        _, _, name = dotted.rpartition(".")
        given = [*node.args, *node.keywords]
        self.called.add(name)
        if not given:
            self.called.add(f"{dotted}()")
        before = self._adds_option
        self._adds_option = name.lower() in _ADDS_OPTION
        for argument in node.args:
            self.visit(argument)
        self._adds_option = False
        for other in (node.func, *node.keywords):
            self.visit(other)
        self._adds_option = before

    def visit_Constant(self, node: ast.Constant) -> None:
        """A text, also within `f"…"`, or after a `*`."""
        if self._adds_option:
            self.options.append(str(node.value))


@lru_cache(maxsize=1)
def script_of(text: str) -> Script:
    """What a script of this text shows."""
    found = Script()
    cannot = suppress(SyntaxError, ValueError, RecursionError, MemoryError)
    with cannot, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the script shows them
        tree = ast.parse(text)
        found.visit(tree)
    return found
