"""The pieces of `make bench` that turn times into a page: what it writes must be right whatever was measured."""

import platform
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import jobs
import run
from measure import Contender, Effort, Series, UnmeasuredError, interleaved, output_of
from page import Limit, Section, Table, page, promise
from plot import Bar, bars, lines

SVG = "{http://www.w3.org/2000/svg}"


def test_sides_alternate_at_random_without_the_first_round() -> None:
    turns: list[str] = []

    def side(name: str) -> Callable[[], float]:
        def measure() -> float:
            turns.append(name)
            return float(len(turns))

        return measure

    found = interleaved([Contender("a", side("a"), times=2), Contender("b", side("b"))], 40)
    assert sorted(turns[:2]) == ["a", "b"]
    assert {"".join(turns[at : at + 3]) for at in range(2, len(turns), 3)} == {"aab", "baa"}
    assert sorted(found["a"].values + found["b"].values) == list(range(3, 123))
    assert len(found["a"].values) == 80


def test_failing_side_is_a_reason_and_others_continue(
    capfd: pytest.CaptureFixture[str],
) -> None:
    contenders = [
        Contender("absent", lambda: float(output_of(["no-such-launcher"]))),
        Contender(
            "failed", lambda: float(output_of(["sh", "-c", "echo 'no | such device'; exit 3"]))
        ),
        Contender("broken", lambda: 1 / 0),
        Contender("good", lambda: 0.25),
    ]
    found = interleaved(contenders, 3)
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert {name: series.said() for name, series in found.items()} == {
        "absent": "not measured: no no-such-launcher",
        "failed": "not measured: exit code 3: no ¦ such device",
        "broken": "not measured: ZeroDivisionError: division by zero",
        "good": "0.25 s (0.25 to 0.25)",
    }


@pytest.mark.parametrize(
    ("series", "unit", "digits", "sign", "said"),
    [
        (Series((0.3, 0.1, 0.2)), "s", 1, False, "0.2 s (0.1 to 0.3)"),
        (Series((0.1, 0.2, 0.3, 0.4, 0.5)), "ms", 0, False, "300 ms (150 to 450)"),
        (
            Series((0.07, 0.06, 0.05)).less(Series((0.01, 0.01))),
            "ms",
            0,
            True,
            "+50 ms (+40 to +60)",
        ),
        (Series((2.0,)), "s", 2, False, "2.00 s"),
        (Series((1.0,)).less(Series(why="no tini")), "s", 2, False, "not measured: no tini"),
    ],
)
def test_median_and_quartiles(
    series: Series, unit: str, digits: int, sign: bool, said: str
) -> None:
    assert series.said(unit, digits, sign=sign) == said


def test_promise_is_kept_by_the_median_or_open() -> None:
    kept = promise(
        "start", Series((0.01, 0.02, 0.09)), 0.02, "≤ 20 ms", unit="ms", digits=0, more=True
    )
    assert kept == Limit("start", "+20 ms (+10 to +90)", "≤ 20 ms more", reached=True)
    assert promise("start", Series((0.01, 0.03, 0.09)), 0.02, "≤ 20 ms").reached is False
    assert promise("start", Series(why="no tini"), 0.02, "≤ 20 ms").reached is None


def test_page_has_verdicts_tables_and_no_host_name() -> None:
    rows = [("ours", "1 s"), ("theirs", "2 s")]
    compared = Table("Start", ("way", "time"), rows, "Half the time.", ("start.svg", "<svg/>"))
    limits = [Limit("a", "1 s", "≤ 2 s", reached=True), Limit("b", "3 s", "≤ 2 s", reached=False)]
    limits += [Limit("c", "not measured", "", reached=None)]
    text = page([Section([compared], limits), Section()], "Measured on 2026-01-02.")
    for part in (
        "1 of 3 limits reached, 1 missed.",
        (
            "| a | 1 s | ≤ 2 s | reached |\n| b | 3 s | ≤ 2 s | **missed** |\n| c | not "
            "measured |  | not measured |"
        ),
        (
            "## Start\n\n![Start](start.svg)\n\n| way | time |\n| --- | --- |\n| ours | "
            "1 s |\n| theirs | 2 s |"
        ),
        "\n\nHalf the time.\n",
        "Measured on 2026-01-02.",
        f"Python {platform.python_version()}, torch ",
    ):
        assert part in text
    assert re.search(r"Machine: \d+ cores \(.+\), \d+ GiB of memory", text)
    assert str(Path(__file__).parents[2]) not in text


def test_a_part_that_breaks_is_a_row(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def breaks(_: Effort) -> Section:
        raise UnmeasuredError("no such thing")

    monkeypatch.setitem(run.PARTS, "start", breaks)
    found = run.measured("start", Effort(quick=True))
    assert [limit.verdict for limit in found.limits] == ["not measured"]
    assert "no such thing" in page([found], "")
    assert "bench: start: " in capfd.readouterr().err


def texts(svg: str) -> dict[str, float]:
    return {
        str(text.text): float(text.get("y", 0)) for text in ET.fromstring(svg).iter(f"{SVG}text")
    }


def test_bars_have_the_length_of_their_value() -> None:
    svg = bars(
        "A <title>",
        [Bar("ours", 1, "1 s", ours=True), Bar("a & b", 4, "4 s"), Bar("c", 2, "?", silent=True)],
    )
    root = ET.fromstring(svg)
    paper, *lengths = root.iter(f"{SVG}rect")
    assert paper.get("class") == "paper"
    widths = [float(rect.get("width", 0)) for rect in lengths]
    assert widths[0] * 4 == pytest.approx(widths[1], rel=0.01)
    assert widths[0] * 2 == pytest.approx(widths[2], rel=0.01)
    assert [rect.get("class") for rect in lengths] == [None, None, "silent"]
    assert {"A <title>", "ours", "1 s", "a & b", "4 s", "c", "?"} <= texts(svg).keys()
    assert max(texts(svg).values()) < float(root.get("viewBox", "").split()[3])


@pytest.mark.parametrize("log_y", [True, False])
def test_lines_rise_with_values_and_names_stay_apart(*, log_y: bool) -> None:
    series = {f"way {number}": [(1.0, 1.0), (8.0, 2 + number / 100)] for number in range(8)} | {
        "nothing": []
    }
    svg = lines("Title", "ranks", "seconds", series, log_y=log_y)
    places = sorted(height for text, height in texts(svg).items() if text.startswith("way "))
    assert len(places) == 8
    assert all(lower - upper >= 16 for upper, lower in pairwise(places))
    drawn = [line.get("points", "") for line in ET.fromstring(svg).iter(f"{SVG}polyline")]
    assert len(drawn) == 8
    for points in drawn:
        (left, low), (right, high) = (map(float, point.split(",")) for point in points.split())
        assert left < right
        assert low > high, "heights are counted from above"


@pytest.mark.parametrize(
    ("case", "line", "named"),
    [
        (
            "missing",
            (
                "distboot: rank 0 on nodea: 3/4 ranks joined; missing: "
                "rank 2 (node 1); giving up in 298 s"
            ),
            True,
        ),
        ("missing", "[W1122 06:41:00 TCPStore.cpp:294] [c10d] 3/4 clients joined.", False),
        ("missing", "[rank2]: still importing", False),
        (
            "dead",
            "distboot: rank 3 on nodeb: rank 2 failed first: killed by SIGKILL, on nodeb (node 1)",
            True,
        ),
        (
            "dead",
            "distboot: rank 2 on nodeb: rank 1 failed first: exit code 1, on nodea (node 0)",
            False,
        ),
        ("dead", "prterun noticed that process rank 2 with PID 366 on node nodeb exited on", True),
        ("dead", "  rank      : 2 (local_rank: 0)", True),
        ("dead", "srun: error: nodeb: task 2: Killed", True),
        ("dead", "  rank      : 20 (local_rank: 2)", False),
        (
            "lost",
            "distboot: rank 0 on nodea: ranks 2-3 became unreachable first: no answer for 15 s",
            True,
        ),
        ("lost", "srun: error: Node failure on nodeb", True),
        ("lost", "[rank0]: RuntimeError: Connection closed by peer [10.77.0.12]:1234", False),
    ],
)
def test_whether_a_line_names_the_culprit(case: str, line: str, named: bool) -> None:
    assert jobs.names(case, line) is named
