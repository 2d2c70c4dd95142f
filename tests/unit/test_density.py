"""No function or module is packed too densely, except those that `density.txt` lists."""

import density
import pytest

PACKED = '''
def f(a, b):
    """Two lines that
    do not count."""

    # nor does this
    first, second = a, b
    if a and b or first:
        return [x for x in b if x]
    return 1 if a else 2


class C:
    def method(self):
        def inner():
            pass

        return inner
'''


@pytest.fixture(scope="module")
def now() -> density.Table:
    return density.measured()


@pytest.fixture(scope="module")
def text() -> str:
    return density.EXCEPTIONS.read_text(encoding="utf-8")


def test_nothing_is_denser_than_allowed(now: density.Table, text: str) -> None:
    found = density.too_dense(now, density.read_exceptions(text))
    assert not found, "unpack these (or move the line of what was moved):\n" + "\n".join(found)


def test_exceptions_are_needed(now: density.Table, text: str) -> None:
    exceptions = density.read_exceptions(text)
    found = density.too_generous(now, exceptions)
    assert not found, "run `python tests/density.py`, which does this:\n" + "\n".join(found)
    assert text == density.write_exceptions(exceptions), "run `python tests/density.py`"


def test_decisions_are_counted() -> None:
    table = density.measure(PACKED, "x.py")
    # f itself, if, and, or, the comprehension and its if, the conditional expression
    assert table["x.py f"] == {"decisions": 7, "tuples": 1, "long-lines": 0}
    assert table["x.py C.method"]["decisions"] == 2
    assert "x.py" not in table


def test_density_is_of_code_lines() -> None:
    calls = "".join(f"    a({number})\n    # a comment\n\n" for number in range(19))
    table = density.measure(f"def f(a):\n{calls}", "x.py")
    assert table["x.py"] == {"per-100": 5}  # 1 decision in 20 lines


def test_long_lines_are_those_of_code() -> None:
    comment = f"# {'c' * 100}\n"
    code = f"VALUE = '{'v' * 100}'\n"
    docstring = f'def f():\n    """{"d" * 100}"""\n    return "{"r" * 100}"\n'
    table = density.measure(comment + code + docstring, "x.py")
    assert table["x.py <module>"]["long-lines"] == 1
    assert table["x.py f"]["long-lines"] == 1


def test_exceptions_are_only_lowered() -> None:
    now = {
        "a.py better": {"decisions": 12},
        "a.py good": {"decisions": 9},
        "a.py worse": {"decisions": 15},
        "a.py new": {"decisions": 11},
    }
    exceptions = {
        "a.py better": {"decisions": 14, "tuples": 1},
        "a.py good": {"decisions": 11},
        "a.py worse": {"decisions": 13},
        "a.py gone": {"decisions": 20},
    }
    assert density.lowered(now, exceptions) == {
        "a.py better": {"decisions": 12},
        "a.py worse": {"decisions": 13},
    }
    assert density.too_generous(now, exceptions) == [
        "a.py better: decisions=14 becomes decisions=12",
        "a.py better: remove tuples=1",
        "a.py good: remove decisions=11",
        "a.py gone: remove decisions=20",
    ]
    assert density.too_dense(now, exceptions) == [
        "a.py worse: decisions is 15, allowed is 13",
        "a.py new: decisions is 11, allowed is 10",
    ]


def test_merged_exceptions_are_read() -> None:
    merged = """\
<<<<<<< ours
distboot/a.py f decisions=12
=======
distboot/a.py f decisions=14 tuples=1
>>>>>>> theirs
distboot/a.py per-100=40
"""
    exceptions = density.read_exceptions(merged)
    assert exceptions == {
        "distboot/a.py f": {"decisions": 14, "tuples": 1},
        "distboot/a.py": {"per-100": 40},
    }
    assert density.write_exceptions(exceptions).splitlines()[1:] == [
        "distboot/a.py per-100=40",
        "distboot/a.py f decisions=14 tuples=1",
    ]
