"""The report as one HTML file that needs nothing else: no script, no font, no picture, and no network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..roster import ranks_said
from .grid import grid
from .markup import clock, duration, lines, seconds, text
from .steps import LAUNCH, PHASES
from .style import CSS
from .timeline import timeline

_MOST_RANKS = 512  # in the table of all ranks; of larger jobs it has those that did not just end
_MOST_RUNS = _MOST_FINDINGS = 50
_SLOWER = 0.05  # seconds that are worth a sentence; and a fifth of what is usual
_COMPARED = 4  # ranks, of which half say what is usual: rank 0, of the first two, need not even join
_OUTCOMES = {"ended": "ended", "failed": "failed", "stopped": "stopped from outside", "started": "started"}

# Whatever a traceback or a host name brings along, a browser runs no script for it, and asks nobody for anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(content: Mapping[str, Any]) -> str:
    """The page for a report."""
    ranks: Sequence[Mapping[str, Any]] = content["ranks"]
    parts = [
        _head(content),
        _failure(content),
        _section("Ranks", _unlisted(content["unlisted"]) + grid(ranks)),
        _start(content),
        _section("What differs between the ranks", _list(content["findings"])),
        _section("Exit codes", _exit_codes(ranks)),
        _section("Versions on rank 0", _versions(content["versions"])),
        _all_ranks(ranks, content["world_size"]),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{text(content['headline'], 120)}</title>\n<style>{CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(parts)}</main>\n</body>\n</html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>\n{body}\n" if body else ""


def _head(content: Mapping[str, Any]) -> str:
    outcome, nodes = content["outcome"], len(content["hosts"])
    size = content["world_size"]
    length = duration(max(seconds(content["end"]) - seconds(content["start"]), 0.0))
    said = [
        f"{size} rank{'s' * (size > 1)} on {nodes} node{'s' * (nodes != 1)}",
        f"launcher {content['launcher']}",
        f"{clock(content['start'])}, {length}",
    ]
    return (
        f'<span class="badge {outcome}">{_OUTCOMES[outcome]}</span>\n<h1>{text(content["headline"], 600)}</h1>\n'
        f'<p class="quiet">{text(" · ".join(said))}</p>\n'
    )


def _unlisted(runs: Sequence[Sequence[int]]) -> str:
    """Those of a large job that did not come, and have no cell in the map."""
    if not runs:
        return ""
    count = sum(last - first + 1 for first, last in runs)
    said = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:_MOST_RUNS])
    more = f" and {len(runs) - _MOST_RUNS} more" if len(runs) > _MOST_RUNS else ""
    return f"<p><b>{count} ranks are missing</b>, and not in the map: {text(said, 1000)}{more}.</p>"


def _failure(content: Mapping[str, Any]) -> str:
    cause = content["first_failure"] or content["stopped"]
    if cause is None:
        return ""
    parts = [f"<p>{text(cause['text'], 2000)}</p>"]
    if cause["traceback"]:
        parts.append(f"<pre>{lines(cause['traceback'])}</pre>")
    if cause["hint"]:
        parts.append(f"<p><b>What to do:</b> {text(cause['hint'], 2000)}</p>")
    later = [rank["rank"] for rank in content["ranks"] if rank["state"] == "failed later"]
    if later:
        parts.append(f"<p>Failed after that: {text(ranks_said(later))}.</p>")
    title = (
        "Why it did not start" if cause["code"] else "First failure" if content["first_failure"] else "Why it stopped"
    )
    return _section(title, "\n".join(parts))


def _start(content: Mapping[str, Any]) -> str:
    drawn = timeline(content["ranks"])
    if not drawn:
        return ""
    began = _section("How each rank started", _slowest(content["slowest"], content["world_size"]) + drawn)
    return began + _section("The slowest in each step", _slow_table(content["slowest"]))


def _slowest(found: Sequence[Mapping[str, Any]], size: int) -> str:
    """Who kept the others waiting most, in one sentence."""
    most = max(found, key=lambda one: one["seconds"] - one["median"], default=None)
    if most is None or most["seconds"] - most["median"] < max(_SLOWER, 0.2 * most["median"]):
        return "<p>No rank was much slower than the others in any step.</p>"
    said = f"Rank {most['rank']} took {duration(most['seconds'])} {most['said']}"
    if size >= _COMPARED:
        said += f"; half of all ranks took at most {duration(most['median'])}"
    return f"<p><b>Slowest:</b> {text(said)}.</p>"


def _slow_table(found: Sequence[Mapping[str, Any]]) -> str:
    names = {phase.end: phase.name for phase in (LAUNCH, *PHASES)}
    rows = [
        (names[one["step"]], f"rank {one['rank']}", duration(one["seconds"]), duration(one["median"]), one["said"])
        for one in found
    ]
    return _table(("step", "slowest", "it took", "median", "what for"), rows, numbers=(2, 3))


def _list(found: Sequence[str]) -> str:
    items = [f"<li>{text(one, 1000)}</li>" for one in found[:_MOST_FINDINGS]]
    items += [f"<li>and {len(found) - _MOST_FINDINGS} more</li>"] if len(found) > _MOST_FINDINGS else []
    return f"<ul>{''.join(items)}</ul>" if items else ""


def _exit_codes(ranks: Iterable[Mapping[str, Any]]) -> str:
    codes: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        code = rank["exit_code"]
        codes["lost" if rank["lost"] else "not known" if code is None else str(code)].append(rank["rank"])
    if set(codes) == {"not known"}:
        return ""
    rows = [(code, ranks_said(here)) for code, here in sorted(codes.items())]
    return _table(("exit code", "ranks"), rows)


def _versions(versions: Mapping[str, str]) -> str:
    return f"<p>{text(' · '.join(f'{name} {value}' for name, value in versions.items()), 4000)}</p>"


def _all_ranks(ranks: Sequence[Mapping[str, Any]], size: int) -> str:
    shown = (
        ranks if len(ranks) <= _MOST_RANKS else [rank for rank in ranks if rank["state"] not in ("ended", "stopped")]
    )
    rows = [
        (
            rank["rank"],
            rank["host"] or "-",
            _or_dash(rank["node_rank"]),
            _or_dash(rank["local_rank"]),
            _or_dash(rank["pid"]),
            rank["state"],
            _or_dash(rank["exit_code"]),
            "-" if rank["end"] is None else clock(rank["end"]),
        )
        for rank in shown[:_MOST_RANKS]
    ]
    title = "All ranks" if len(rows) == size else f"{len(rows)} of the {size} ranks"
    table = _table(("rank", "host", "node", "local rank", "process", "state", "exit code", "ended"), rows)
    return f"<details><summary>{title}</summary>\n{table}</details>\n" if rows else ""


def _or_dash(value: object) -> object:
    return "-" if value is None else value


def _table(head: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[int] = ()) -> str:
    def cells(tag: str, values: Sequence[object]) -> str:
        return "".join(
            f"<{tag}{' class=number' if index in numbers else ''}>{text(value, 1000)}</{tag}>"
            for index, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{cells("th", head)}</tr>{body}</table></div>'
