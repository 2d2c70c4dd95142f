"""Our dataclasses, beside those of the standard library: what both do."""

import dataclasses
from typing import Any, ClassVar

import pytest
from inside import dataclass as module

KINDS = [dataclasses, module]
SIDES = pytest.mark.parametrize("side", KINDS, ids=["standard", "ours"])


def _point(side: Any, **options: Any) -> Any:
    class Point:
        key: "ClassVar[None]" = None
        x: "int"
        y: "int" = 2
        tags: "list[str]" = side.field(default_factory=list, compare=False)
        secret: "str" = side.field(default="", repr=False)

        def total(self) -> int:
            return self.x + self.y

    return side.dataclass(slots=True, **options)(Point)


@SIDES
def test_values_are_given_by_place_or_name(side: Any) -> None:
    kind = _point(side)
    first = kind(1, tags=["a"])
    assert (first.x, first.y, first.tags, first.secret) == (1, 2, ["a"], "")
    assert first.total() == 3
    assert kind.key is None
    assert kind(1).tags is not kind(1).tags


@SIDES
@pytest.mark.parametrize(("values", "named"), [((), {}), ((1,), {"z": 3}), ((), {"y": 1})])
def test_wrong_values_are_refused(side: Any, values: Any, named: Any) -> None:
    kind = _point(side)
    with pytest.raises(TypeError):
        kind(*values, **named)


@SIDES
def test_equal_if_of_one_kind_and_values(side: Any) -> None:
    kind = _point(side)
    assert kind(1, tags=["a"]) == kind(1, tags=["b"])
    assert kind(1) != kind(2)
    assert kind(1) != _point(side)(1)
    with pytest.raises(TypeError, match="unhashable"):
        hash(kind(1))
    by_identity = _point(side, eq=False)
    assert by_identity(1) != by_identity(1)
    assert hash(by_identity(1))


@SIDES
def test_frozen_values_cannot_be_changed(side: Any) -> None:
    one = _point(side, frozen=True)(1)
    with pytest.raises(AttributeError):
        one.x = 2
    with pytest.raises(AttributeError):
        del one.x
    assert (one.x, hash(one)) == (1, hash(side.replace(one, tags=["b"])))


@SIDES
def test_other_names_have_no_slot(side: Any) -> None:
    one = _point(side)(1)
    one.x = 5
    assert one.total() == 7
    with pytest.raises(AttributeError):
        one.z = 1


@SIDES
def test_replaced_values_are_of_a_copy(side: Any) -> None:
    one = _point(side)(1, secret="s")
    other = side.replace(one, y=7)
    assert (one.y, other.y, other.secret) == (2, 7, "s")


@SIDES
def test_secret_is_not_shown(side: Any) -> None:
    assert repr(_point(side)(1, secret="s")).endswith("Point(x=1, y=2, tags=[])")


@SIDES
def test_object_is_finished_at_the_end(side: Any) -> None:
    class Pair:
        x: "int"
        y: "int" = 0

        def __post_init__(self) -> None:
            self.y = self.x + 1

    assert side.dataclass(slots=True)(Pair)(1).y == 2


@SIDES
def test_kind_without_fields(side: Any) -> None:
    class Empty:
        pass

    kind = side.dataclass(slots=True, frozen=True)(Empty)
    assert kind() == kind()
    assert len({kind(), kind()}) == 1
