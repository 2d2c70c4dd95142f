"""The page of a report, in a real browser: what it shows, that it asks nobody for anything, and runs nothing."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, browser, missing_for_browser
from reported import NOON, begun

from distboot.base.errors import DistbootError
from distboot.rendezvous.membership import Membership
from distboot.report.content import (
    Doubts,
    job_report,
    startup_report,
    utc,
)
from distboot.report.files import write
from distboot.report.start_failure import StartFailure

pytestmark = [
    pytest.mark.all,
    pytest.mark.skipif(missing_for_browser() is not None, reason=str(missing_for_browser())),
]

HOSTILE = (
    '</script><!--<script>alert(1)</script><img src="https://example.invalid/x" onerror="alert(2)">'
)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def show(chromium: Browser, tmp_path: Path) -> Callable[..., Browser]:
    def it(content: Mapping[str, Any], width: int = 1280, **media: bool) -> Browser:
        write(str(tmp_path / "job.html"), content)
        chromium.open(tmp_path / "job.html", width, **media)
        return chromium

    return it


def content(
    size: int = 16,
    missing: frozenset[int] = frozenset({5}),
    host: str = "node",
    here: int = 8,
    **more: Any,
) -> dict[str, Any]:
    """The report of a job of which ranks are missing; rank 3 was slow to start, and all clocks but node 0's err."""
    joined = {}
    for rank in set(range(size)) - missing:
        node, local_rank = divmod(rank, here)
        offset, uncertainty = (0.25, 0.004) if node else (0.0, 0.0)
        times = {"process_start": NOON + 4 * (rank == 3) + offset, "detected": NOON + 4.5 + offset}
        place = {"node_rank": node, "local_rank": local_rank, "local_world_size": here}
        clock = {"offset": offset, "uncertainty": uncertainty}
        joined[rank] = {
            "host": f"{host}-{node}",
            "node": node,
            "pid": 4000 + rank,
            **place,
            **times,
            **clock,
        }
    error = DistbootError("missing-rank", "some ranks are missing", "look at their output")
    return {
        **startup_report(begun(size, joined), None, StartFailure.from_error(error), NOON + 300),
        **more,
    }


def _overflow(page: Browser) -> int:
    pixels: int = page.run(
        "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    return pixels


def test_page_says_what_happened_and_needs_nothing_else(show: Callable[..., Browser]) -> None:
    page = show(content(findings=["ranks 8-15 (node 1): torch 2.12.0, others 2.13.0"]))
    assert page.texts("h1") == ["The job did not start: some ranks are missing"]
    (text,) = page.texts("main")
    for said in (
        "look at their output",
        "ranks 8-15 (node 1): torch 2.12.0",
        "to within 4 ms (rank 8)",
    ):
        assert said in text
    assert "Slowest: Rank 3 took 4.00 s to be launched" in text
    cells = (
        "[...document.querySelectorAll('.cell[data-rank]')].map(one => "
        "[+one.dataset.rank, one.dataset.state])"
    )
    assert page.run(f"return {cells}") == [
        [rank, "missing" if rank == 5 else "joined"] for rank in range(16)
    ]
    assert page.texts(".node h3") == ["node-0", "node-1"]
    # Not by colour alone.
    assert [page.texts(f'[data-rank="{rank}"]') for rank in (5, 6)] == [["5\n○"], ["6\n•"]]
    assert (page.complaints(), page.requests()) == ([], [page.run("return document.URL")])
    assert (
        page.run(
            "return document.querySelectorAll('link[rel=stylesheet], img, iframe, object').length"
        )
        == 0
    )
    assert page.run("return [...document.scripts].map(one => one.type + one.src)") == [
        "application/json",
        "",
    ]


def test_late_ranks_are_marked_with_all_positions(
    show: Callable[..., Browser],
) -> None:
    said = "waiting for rank 1 (node-0) for 60 s: it is in load"
    places = ["rank 1: load (a.py:3)", HOSTILE]
    log = begun(2, {}).at(
        NOON + 60,
        "late",
        1,
        ranks=[1],
        text=said,
        stacks=places,
        seconds=60.0,
    )
    for rank, code in enumerate((1, 143)):
        exit_ = {
            "signal": None,
            "stopped_by_us": rank == 1,
            "external_signal": None,
            "at": NOON + 90,
        }
        log.at(NOON + 1, "registered", rank, pid=7).at(
            NOON + 90, "exited", rank, exit_code=code, **exit_
        )
    page = show(job_report(log, Membership(("node-0",), ((0, 1),)), Doubts(), NOON + 99))
    assert page.run(
        "return [...document.querySelectorAll('.cell[data-rank]')].map(one => one.dataset.state)"
    ) == [
        "failed later",
        "late",
    ]
    (text,) = page.texts("main")
    assert said in text
    assert page.texts("pre")[-1] == "\n".join(places)
    assert page.complaints() == []


@pytest.mark.parametrize("size", [2, 4])
def test_usual_value_is_shown_for_enough_ranks(show: Callable[..., Browser], size: int) -> None:
    step = {"step": "joined", "rank": 1, "seconds": 5.0, "median": 0.0, "said": "to reach rank 0"}
    (text,) = show(content(size, frozenset(), slowest=[step])).texts("main")
    said = "; half of all ranks took at most 0 ms" if size == 4 else ""
    assert f"Slowest: Rank 1 took 5.00 s to reach rank 0{said}.\n" in text


def test_missing_ranks_without_cell_and_ordered_events(
    show: Callable[..., Browser],
) -> None:
    page = show(content(2, frozenset(), unlisted=[[1, 1], [3, (1 << 24) - 1]]))
    (text,) = page.texts("main")
    assert "16777214 ranks are missing, and not in the map: 1, 3-16777215." in text
    assert page.texts("details:last-of-type summary") == ["All events"]
    events = (
        "return [...document.querySelectorAll('details:last-of-type "
        "td:nth-child(3)')].map(one => one.textContent)"
    )
    assert page.run(events) == ["rendezvous started", "joined", "joined"]


def test_bars_show_known_steps_and_nothing_else(
    show: Callable[..., Browser],
) -> None:
    page = show(content())
    left = "parseFloat(one.style.left)"
    right = "parseFloat(one.style.left) + parseFloat(one.style.width)"
    rows = page.run(
        "return [...document.querySelectorAll('.row')].map(row => [...row.querySelectorAll('.track i')].map(one => "
        f"[one.className, Math.round({left}), Math.round({right})]))"
    )
    assert rows[0] == [["start", 0, 90], ["join", 90, 100]]
    assert rows[3] == [["start", 80, 90], ["join", 90, 100]]
    assert rows[5] == []
    assert rows[8] == rows[0]  # on one clock


def test_one_line_shows_the_job_and_problems(show: Callable[..., Browser]) -> None:
    def event(after: float, kind: str, rank: int | None, **details: object) -> dict[str, object]:
        return {"time": utc(NOON + after), "rank": rank, "event": kind, "details": details}

    events = [
        event(5, "joined", 0),
        event(60, "late", None, text=HOSTILE),
        event(150, "failing", 3, text="uncaught exception: ValueError"),
        event(150, "root_cause", 3, text="rank 3 failed first"),
        event(300, "exited", 0),
    ]
    page = show(content(events=events))
    marks = page.run(
        "return [...document.querySelectorAll('.whole .mark')].map(one => "
        "[one.textContent, Math.round(parseFloat(one.style.left)), one.title])"
    )
    assert marks == [
        ["!", 50, "2 min 30 s: rank 3: uncaught exception: ValueError"],
        ["", 20, f"1 min 0 s: {HOSTILE}"],  # a drawing
        ["✕", 50, "2 min 30 s: rank 3: rank 3 failed first"],
    ]
    assert page.texts(".whole .last") == ["5 min 0 s"]
    # The 5 s below it
    assert page.run("return document.querySelector('.whole .track i').style.width") == "1.67%"
    assert page.texts(".legend .mark") == ["!", "", "✕"]
    assert page.run("return document.querySelectorAll('.mark svg path').length") == 2
    heads = page.texts("h2")
    assert heads.index("The whole job") + 1 == heads.index("How each rank started")
    assert _overflow(show(content(events=events), 390)) <= 0


def test_job_without_a_timeline_has_no_strip(show: Callable[..., Browser]) -> None:
    assert "The whole job" not in show(content(2, frozenset({0, 1}))).texts("h2")


def test_process_older_than_the_job_hides_nothing(
    show: Callable[..., Browser],
) -> None:
    report = content(2, frozenset())
    report["ranks"][0]["steps"]["process_start"] = "2026-11-01T00:00:00.000+00:00"  # a notebook
    assert show(report).texts(".axis span")[-1] == "50 s"


@pytest.mark.parametrize(("size", "here", "rows"), [(512, 8, 512), (4096, 8, 512), (4096, 64, 64)])
@pytest.mark.parametrize("width", [1280, 390])
def test_large_jobs_fit_every_window(
    show: Callable[..., Browser], size: int, here: int, rows: int, width: int
) -> None:
    page = show(content(size, frozenset({17, 96, 97}), here=here), width)
    assert page.run("return document.querySelectorAll('.cell[data-rank]').length") == size
    assert page.run("return document.querySelectorAll('.cell[data-state=missing]').length") == 3
    assert page.run("return document.querySelectorAll('.row').length") == rows
    assert _overflow(page) <= 0


def test_dark_scheme_is_only_for_the_screen(show: Callable[..., Browser]) -> None:
    colours = "const it = getComputedStyle(document.body); return [it.backgroundColor, it.color]"
    light = ["rgb(255, 255, 255)", "rgb(28, 32, 36)"]
    assert show(content()).run(colours) == light
    assert show(content(), dark=True).run(colours) == ["rgb(20, 23, 26)", "rgb(230, 233, 236)"]
    assert show(content(), dark=True, on_paper=True).run(colours) == light


def test_texts_of_a_rank_stay_text(show: Callable[..., Browser]) -> None:
    words = f"Traceback (most recent call last):\n{HOSTILE}\n\x1b[31mred\x1b[0m\x00\u202e" + "x" * (
        1 << 20
    )
    cause = {
        "text": HOSTILE,
        "hint": HOSTILE,
        "traceback": words,
        "code": None,
        "ranks": [1],
        "rank": 1,
    }
    more: dict[str, Any] = {"headline": HOSTILE, "first_failure": cause, "findings": [HOSTILE]}
    more["versions"] = {HOSTILE: HOSTILE}
    page = show(content(host=HOSTILE, launcher=HOSTILE, **more), 390)
    assert page.run("return document.querySelectorAll('main script, img').length") == 0
    assert page.run("return document.scripts.length") == 2
    # Not even of a script that the policy of the page has kept from running
    assert page.complaints() == []
    assert page.requests() == [page.run("return document.URL")]
    assert page.texts("h1") == [HOSTILE]
    (trace,) = page.texts("pre")
    assert "\\x1b[31mred\\x1b[0m\\x00\\u202e" in trace
    assert len(trace) < 2000
    assert _overflow(page) <= 0


def _node(number: int, *findings: str, host: str = "node") -> dict[str, Any]:
    seen = {"free memory": "903 GiB", "link to the next node": "94 Gbit/s, 0.2 ms to node-1"}
    return {
        "node_rank": number,
        "host": f"{host}-{number}",
        "findings": list(findings),
        "seen": seen,
    }


def test_nodes_are_a_table_with_the_odd_first(show: Callable[..., Browser]) -> None:
    nodes = [_node(7, HOSTILE, host=HOSTILE), *(_node(number) for number in range(600))]
    page = show(content(nodes=nodes), 390)
    assert "Nodes, as they were before the start" in page.texts("h2")
    assert "free memory" in page.texts("th")
    cells = page.texts("td")
    first = cells.index(f"{HOSTILE}-7")
    assert cells[first - 1 : first + 3] == ["7", f"{HOSTILE}-7", HOSTILE, "903 GiB"]
    assert "and 89 nodes more, of which none is odd" in page.texts("p.quiet")
    assert page.run("return document.querySelectorAll('main script, img').length") == 0
    assert _overflow(page) <= 0


def test_all_reduce_is_drawn(show: Callable[..., Browser]) -> None:
    measured = {
        "backend": "nccl",
        "ranks": 16,
        "sizes": [
            {"bytes": 4096, "seconds": 0.00004, "rate": 1e8},
            {"bytes": 1 << 28, "seconds": 0.003, "rate": 1.6e11},
        ],
        "pairs": [
            {"hosts": ["node-0", HOSTILE], "rate": 4e8},
            {"hosts": ["node-0", "node-1"], "rate": 8e9},
        ],
        "median": 8e9,
        "findings": ["odd"],
    }
    page = show(content(allreduce=measured), 390)
    assert "All-reduce" in page.texts("h2")
    labels = page.texts(".bars .last")
    assert labels == ["100 MB/s, 0.04 ms", "160 GB/s, 3 ms", "400 MB/s", "8 GB/s"]
    assert page.texts(".bars .label")[:2] == ["4 KiB", "256 MiB"]
    widths = page.run(
        "return [...document.querySelectorAll('.bars i')].map((one) => one.style.width)"
    )
    assert widths == ["0.06%", "100%", "5%", "100%"]
    assert page.run("return document.querySelectorAll('.bars i.later').length") == 1
    assert page.complaints() == []
    assert _overflow(page) <= 0
