"""What docs/reference/api.md says of each public name, from its signature and its docstring (Google's style).

A signature is written as in the source; the parts of a docstring become paragraphs and tables of plain Markdown, which
a repository's own pages show as they are.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import distboot
from distboot import frameworks
from distboot.lightning import DistbootEnvironment

FUNCTIONS = (distboot.init, distboot.detect)
# A class -> its methods and properties that are for users
CLASSES: dict[type, tuple[str, ...]] = {
    distboot.Context: tuple(name for name in vars(distboot.Context) if not name.startswith("_")),
    distboot.Placement: ("as_dict",),
    distboot.DistbootError: (),
    DistbootEnvironment: (),
}
# The names of types that only a type checker can import, as the source spells them out
_ALIASES = ("Framework", "Strategy")

_SECTIONS = ("Args", "Attributes", "Returns", "Raises")
_NAMED = re.compile(r"(\w+): (.*)")
# A word of code without the marks of code: a variable, an option, a text in quotes, a code in a list of errors
_CODE = re.compile(r'(?<![`\w])("[\w.]+"|[A-Z]+_[A-Z_]+\b|None\b|True\b|False\b)(?![`\w])')
_LONGEST_LINE = 90  # of a signature
_WIDTH = 120  # of a paragraph


class Docstring(NamedTuple):
    """A docstring in its parts."""

    paragraphs: tuple[str, ...]  # before the sections; code is indented
    after: tuple[str, ...]  # paragraphs after them
    sections: dict[str, tuple[tuple[str, str], ...]]  # title -> names and texts


def parsed(documented: object) -> Docstring:
    """The parts of a docstring."""
    paragraphs: list[str] = []
    after: list[str] = []
    sections: dict[str, tuple[tuple[str, str], ...]] = {}
    text = inspect.getdoc(documented) or ""
    for block in text.split("\n\n"):
        title, _, body = block.partition(":\n")
        if title in _SECTIONS:
            sections[title] = tuple(_items(title, textwrap.dedent(body)))
        elif sections:
            after.append(_joined(block))
        elif block.startswith(" "):
            paragraphs.append(block)
        else:
            paragraphs.append(_joined(block))
    return Docstring(tuple(paragraphs), tuple(after), sections)


def _items(title: str, body: str) -> Iterator[tuple[str, str]]:
    """The entries of a section: each begins at the margin, and its other lines are indented."""
    if title == "Returns":
        yield "", _joined(body)
        return
    for entry in re.split(r"\n(?! )", body):
        name, text = _NAMED.fullmatch(_joined(entry)).groups()  # type: ignore[union-attr]
        yield name, text


def _joined(text: str) -> str:
    return " ".join(text.split())


def function(known: Callable[..., object], name: str, level: int = 2) -> Iterator[str]:
    """The lines on a function or method."""
    docstring = parsed(known)
    signature = inspect.signature(known)
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    yield from (f"{'#' * level} {name}", "", "```python", *_signature(known), "```", "")
    yield from _text(docstring.paragraphs)
    texts = dict(docstring.sections.get("Args", ()))
    rows = [
        (f"`{each.name}`", _type(each.annotation), _default(each), _marked(texts[each.name]))
        for each in parameters
    ]
    yield from _table(("argument", "type", "default", "meaning"), rows)
    for _, text in docstring.sections.get("Returns", ()):
        yield _filled(f"Returns {_type(signature.return_annotation)}: {_marked(text)}")
        yield ""
    yield from _raises(docstring)


def _signature(known: Callable[..., object]) -> list[str]:
    """The first lines of a function: on one line if they fit, else one argument a line."""
    signature = inspect.signature(known)
    start, end = f"def {known.__name__}(", f") -> {signature.return_annotation}: ..."
    arguments: list[str] = []
    is_keyword = False
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not is_keyword:
            arguments.append("*")
            is_keyword = True
        arguments.append(_argument(each))
    line = f"{start}{', '.join(arguments)}{end}"
    if len(line) <= _LONGEST_LINE:
        return [line]
    return [start, *(f"    {argument}," for argument in arguments), end]


def _argument(parameter: inspect.Parameter) -> str:
    text = parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {parameter.annotation}"
    if parameter.default is not parameter.empty:
        text += f" = {_literal(parameter.default)}"
    return text


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return "required"
    return f"`{_literal(parameter.default)}`"


def known_class(known: type, members: Iterable[str]) -> Iterator[str]:
    """The lines on a class: its attributes, its properties, and then its methods."""
    docstring = parsed(known)
    yield from (f"## {_dotted(known)}", "")
    yield from _text(docstring.paragraphs)
    types = _types(known)
    rows = [
        (f"`{name}`", _type(types[name]), _marked(text))
        for name, text in docstring.sections.get("Attributes", ())
    ]
    yield from _table(("attribute", "type", "meaning"), rows)
    yield from _text(docstring.after)
    yield from _raises(docstring)
    found = [(name, inspect.getattr_static(known, name)) for name in members]
    rows = [
        (f"`{name}`", _type(_returned(member)), _marked(" ".join(parsed(member).paragraphs)))
        for name, member in found
        if isinstance(member, property)
    ]
    yield from _table(("property, read-only", "type", "meaning"), rows)
    for name, member in found:
        if inspect.isfunction(member):
            yield from function(member, f"{known.__name__}.{name}", level=3)


def _returned(member: property) -> str:
    assert member.fget is not None
    return str(inspect.signature(member.fget).return_annotation)


def _dotted(known: type) -> str:
    """The name by which users import it."""
    is_public = known.__name__ in distboot.__all__
    return f"{'distboot' if is_public else known.__module__}.{known.__name__}"


def _types(known: type) -> dict[str, str]:
    """The types of a class's attributes: of its fields, or of what its `__init__` sets."""
    if dataclasses.is_dataclass(known):
        return {field.name: str(field.type) for field in dataclasses.fields(known)}
    if issubclass(known, tuple):
        forward: dict[str, Any] = known.__annotations__
        return {name: kind.__forward_arg__ for name, kind in forward.items()}
    tree = ast.parse(textwrap.dedent(inspect.getsource(vars(known)["__init__"])))
    return {
        node.target.attr: ast.unparse(node.annotation)
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute)
    }


def _type(annotation: str) -> str:
    """A type as a cell of a table has it, where `|` would end the cell."""
    if annotation == "Any":
        return "of the framework"
    # `X | Any` asks no user of a framework to exclude None, which others find there
    parts = annotation.replace(" | Any", " | None").split(" | ")
    return " or ".join(f"`{part}`" for part in parts)


def _marked(text: str) -> str:
    """A text with its words of code marked, outside of what is marked already."""
    pieces = text.split("`")
    pieces[::2] = [_CODE.sub(r"`\1`", piece) for piece in pieces[::2]]
    return "`".join(pieces).replace("|", "\\|")


def _text(paragraphs: Iterable[str]) -> Iterator[str]:
    for paragraph in paragraphs:
        is_code = paragraph.startswith(" ")
        yield paragraph if is_code else _filled(_marked(paragraph))
        yield ""


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _raises(docstring: Docstring) -> Iterator[str]:
    for name, text in docstring.sections.get("Raises", ()):
        yield _filled(f"Raises `{name}`: {_marked(text)}")
        yield ""


def _table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    if not rows:
        return
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _aliases() -> Iterator[str]:
    """What the names of types stand for, from the source: only type checkers import them."""
    tree = ast.parse(Path(frameworks.__file__).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in _ALIASES:
                values = [f"`{value}`" for value in literals(node)]
                yield f"- `{name}`: {', '.join(values[:-1])} or {values[-1]}"


def literals(node: ast.Assign) -> list[str]:
    """The values of `Name = Literal[…]`, as in its source."""
    return [_literal(each.value) for each in ast.walk(node.value) if isinstance(each, ast.Constant)]


def page() -> str:
    """All that is written."""
    lines: list[str] = []
    for known in FUNCTIONS:
        lines += function(known, f"distboot.{known.__name__}")
        if known is distboot.init:
            lines += ["Two names of types stand for these texts:", "", *_aliases(), ""]
    for kind, members in CLASSES.items():
        lines += known_class(kind, members)
    return "\n".join(lines).rstrip()
