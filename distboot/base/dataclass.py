"""Dataclasses that take little time to define: a part of `dataclasses` of the standard library.

That one compiles six methods for each class. This takes half a millisecond a class, and an agent has
67: it was half of the time until the agent beside a rank was there (33 of 72 ms). It also imports
`inspect`. Here the methods are written once, and go through the fields of the class. A class is
defined in a hundredth of the time, and an object is made in the same time.

What is here behaves as there, with three exceptions. All classes have slots. A class has its own
fields alone, not those of its bases. Of arguments that do not fit, only those that are missing or
unknown are refused here: type checkers find the others, to which these are the classes of the
standard library.
"""

from __future__ import annotations

from operator import attrgetter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from dataclasses import dataclass, field, replace
    from typing import Any, TypeVar

    Kind = TypeVar("Kind")

__all__ = ["as_dict", "dataclass", "field", "fields", "replace"]

_MISSING: Any = object()
_FIELDS = "_fields_of_dataclass"  # the attribute of a class
_set = object.__setattr__


class Field:
    """How a field of a class was declared."""

    __slots__ = ("compare", "default", "default_factory", "metadata", "repr")

    def __init__(
        self,
        *,
        default: Any = _MISSING,
        default_factory: Callable[[], Any] | None = None,
        repr: bool = True,  # noqa: A002 - as in the standard library
        compare: bool = True,
        metadata: Mapping[str, Any] = {},
    ) -> None:
        self.default = default
        self.default_factory = default_factory
        self.repr = repr
        self.compare = compare
        self.metadata = metadata

    def default_value(self) -> Any:
        """Its value where none is given; `_MISSING`: it has to be given."""
        if self.default_factory is None:
            return self.default
        return self.default_factory()


def fields(kind: type) -> dict[str, Field]:
    """The fields of a dataclass, by name."""
    found: dict[str, Field] = getattr(kind, _FIELDS)
    return found


def as_dict(content: object) -> dict[str, Any]:
    """The values of a dataclass by name; nested ones stay what they are."""
    found = {}
    for name in fields(type(content)):
        found[name] = getattr(content, name)
    return found


def _replace(content: Kind, /, **changes: Any) -> Kind:
    values = {**as_dict(content), **changes}
    return type(content)(**values)


def _dataclass(
    *,
    slots: bool,  # noqa: ARG001 - for type checkers: all have slots
    frozen: bool = False,
    eq: bool = True,
) -> Callable[[type], type]:
    """Return a decorator that makes a dataclass of a class."""
    methods = _METHODS[frozen, eq]

    def define(kind: type) -> type:
        declared = _declared(kind)
        compared = [name for name in declared if declared[name].compare]
        content = {**kind.__dict__, **methods}
        # A slot has the name of its field, as the default value had
        for name in (*declared, "__dict__", "__weakref__"):
            content.pop(name, None)
        content["__slots__"] = tuple(declared)
        content[_FIELDS] = declared
        content["_compared"] = _getter(compared)
        return type(kind)(kind.__name__, kind.__bases__, content)

    return define


def _declared(kind: type) -> dict[str, Field]:
    """The fields of a class, from its annotations and the values beside these."""
    found = {}
    # Not by `inspect`, which takes longer to import than all of this
    annotations = kind.__dict__.get("__annotations__", {})  # noqa: RUF063
    for name, annotation in annotations.items():
        if annotation.startswith("ClassVar"):
            continue
        declaration = kind.__dict__.get(name, _MISSING)
        if not isinstance(declaration, Field):
            declaration = Field(default=declaration)
        found[name] = declaration
    return found


def _getter(names: list[str]) -> Any:
    """A function from an object to the values of these fields."""
    if not names:
        return staticmethod(lambda _: ())
    return staticmethod(attrgetter(*names))


# The methods


def _init(self: Any, /, *values: Any, **named: Any) -> None:
    declared = getattr(self, _FIELDS)
    given = dict(zip(declared, values, strict=False))
    given.update(named)
    if given.keys() != declared.keys():
        _complete(given, type(self))
    for name, value in given.items():
        _set(self, name, value)
    finish = getattr(self, "__post_init__", None)
    if finish is not None:
        finish()


def _complete(given: dict[str, Any], kind: type) -> None:
    """Add the default values.

    Raises:
        TypeError: something is still missing, or unknown.
    """
    declared = fields(kind)
    for name in declared.keys() - given.keys():
        value = declared[name].default_value()
        if value is not _MISSING:
            given[name] = value
    wrong = given.keys() ^ declared.keys()
    if wrong:
        raise TypeError(f"{kind.__name__}() has no value, or no field, for {sorted(wrong)}")


def _repr(self: Any) -> str:
    shown = []
    for name, declaration in getattr(self, _FIELDS).items():
        if declaration.repr:
            shown.append(f"{name}={getattr(self, name)!r}")
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _eq(self: Any, other: Any) -> Any:
    if type(other) is not type(self):
        return NotImplemented
    return self._compared(self) == self._compared(other)


def _hash(self: Any) -> int:
    return hash(self._compared(self))


def _refuse_change(self: Any, name: str, _: object = None) -> None:
    raise AttributeError(f"{name} of {type(self).__name__} cannot be changed")


_OF_ALL = {"__init__": _init, "__repr__": _repr}
_OF_FROZEN = {**_OF_ALL, "__setattr__": _refuse_change, "__delattr__": _refuse_change}
_METHODS: dict[tuple[bool, bool], dict[str, Any]] = {  # by `frozen` and `eq`
    (False, False): _OF_ALL,
    (False, True): {**_OF_ALL, "__eq__": _eq, "__hash__": None},
    (True, False): _OF_FROZEN,
    (True, True): {**_OF_FROZEN, "__eq__": _eq, "__hash__": _hash},
}

if not TYPE_CHECKING:
    dataclass = _dataclass
    field = Field
    replace = _replace
