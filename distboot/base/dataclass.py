"""Dataclasses that take little time to define: a part of `dataclasses` of the standard library.

That one compiles six methods for each class. This takes half a millisecond a class, and an agent has
67: it was half of the time until the agent beside a rank was there (33 of 72 ms). It also imports
`inspect`. Here the methods are written once, and go through the fields of the class. Only `__init__`
is compiled, when the first object of a class is made: most processes use a part of the classes.

What is here behaves as there. It is for classes of data without bases and without special methods of
their own, `__post_init__` excepted: all have slots, none is copied or pickled, and `match` takes no
values of them by place. To type checkers these are the classes of the standard library.
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


def fields(kind: type) -> dict[str, Field]:
    """The fields of a dataclass, by name."""
    known: Any = kind
    found: dict[str, Field] = known._fields_of_dataclass  # noqa: SLF001 - its own
    return found


def as_dict(content: object) -> dict[str, Any]:
    """The values of a dataclass by name; nested ones stay what they are."""
    return {name: getattr(content, name) for name in fields(type(content))}


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
        content["_fields_of_dataclass"] = declared
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
    """For the first object of a class; it gives the class an `__init__` of its own."""
    kind: Any = type(self)
    kind.__init__ = _compiled_init(kind)
    kind.__init__(self, *values, **named)


def _compiled_init(kind: type) -> Any:
    """`__init__` with the fields as its parameters, as in the standard library."""
    known: dict[str, Any] = {"_set": _set, "_MISSING": _MISSING}
    parameters = ["self"]
    lines = []
    for name, declaration in fields(kind).items():
        parameter = name
        if declaration.default_factory is not None:
            known[f"_make_{name}"] = declaration.default_factory
            parameter = f"{name}=_MISSING"
            lines.append(f"if {name} is _MISSING: {name} = _make_{name}()")
        elif declaration.default is not _MISSING:
            known[f"_default_{name}"] = declaration.default
            parameter = f"{name}=_default_{name}"
        parameters.append(parameter)
        lines.append(f"_set(self, {name!r}, {name})")
    if hasattr(kind, "__post_init__"):
        lines.append("self.__post_init__()")
    body = "\n ".join(["pass", *lines])
    exec(f"def __init__({', '.join(parameters)}):\n {body}", known)  # noqa: S102 - names of fields
    return known["__init__"]


def _repr(self: Any) -> str:
    shown = []
    for name, declaration in self._fields_of_dataclass.items():
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
