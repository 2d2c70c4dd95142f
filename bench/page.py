"""The page of results: tables, limits with a verdict, and the machine that they are from. `run.py` fills it."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from measure import Series

_PACKAGES = ("torch", "deepspeed", "horovod", "accelerate", "lightning", "tensorflow-cpu", "mpi4py")
# Around what `gpu.py` writes, which a run of everything else leaves as it is.
_GPU_BEGIN, _GPU_END = "<!-- on a GPU: written by `make gpu` -->", "<!-- end of on a GPU -->"
_PROGRAMS = {
    "Open MPI": ("mpirun", "--version"),
    "Slurm": ("slurmd", "-V"),
    "tini": ("tini", "--version"),
    "podman": ("podman", "--version"),
}


@dataclass(frozen=True)
class Limit:
    """What the project promises, and whether it holds; `reached` is None where it could not be measured."""

    what: str
    measured: str
    limit: str
    reached: bool | None

    @property
    def verdict(self) -> str:
        return {True: "reached", False: "**missed**", None: "not measured"}[self.reached]


def promise(
    what: str,
    series: Series,
    most: float,
    limit: str,
    *,
    unit: str = "s",
    digits: int = 2,
    more: bool = False,
) -> Limit:
    """The limit that the median is at most so many seconds; `more`: they come on top of something."""
    reached = series.median <= most if series.values else None
    return Limit(
        what, series.said(unit, digits, sign=more), f"{limit} more" if more else limit, reached
    )


@dataclass(frozen=True)
class Table:
    """One comparison.

    Attributes:
        title: its heading.
        head: names of the columns.
        rows: cells, as Markdown.
        meaning: what the figures mean for a user, in a sentence or two.
        plot: name of a file and SVG, shown above the table.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    meaning: str
    plot: tuple[str, str] | None = None


@dataclass(frozen=True)
class Section:
    """What one part of the benchmarks has found.

    Attributes:
        tables: the comparisons.
        limits: the promises that they were held against.
    """

    tables: Sequence[Table] = ()
    limits: Sequence[Limit] = ()


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def limits_table(limits: Iterable[Limit]) -> str:
    """The promises and their verdicts."""
    rows = [(each.what, each.measured, each.limit, each.verdict) for each in limits]
    return table(("what", "measured", "must reach", ""), rows)


def section_text(section: Section) -> str:
    """The part of the page below the limits."""
    parts: list[str] = []
    for each in section.tables:
        plot = [f"![{each.title}]({each.plot[0]})"] if each.plot else []
        parts += [f"## {each.title}", *plot, table(each.head, each.rows), each.meaning]
    return "\n\n".join(parts)


def page(sections: Sequence[Section], how: str) -> str:
    """All of RESULTS.md.

    Args:
        sections: in the order of the page.
        how: when, with which command and under which load it was measured.
    """
    limits = [limit for section in sections for limit in section.limits]
    missed = sum(limit.reached is False for limit in limits)
    verdict = f"{sum(limit.reached is True for limit in limits)} of {len(limits)} limits reached, {missed} missed."
    return "\n\n".join([
        "# Results of the benchmarks",
        ("Written by `make bench`, and the last part by `make gpu`; `bench/run.py` and `bench/gpu.py` say how. All "
        "sides of a comparison ran in turn in that one run, with `OMP_NUM_THREADS=1`. Where a cell has three figures "
        "they are the median and, in brackets, the quartiles (of three rounds: the least and the most). A ratio of "
        "3 × is three times as long as distboot."),
        how,
        machine(),
        "## Limits",
        "What the project promises. " + verdict,
        limits_table(limits),
        *map(section_text, sections),
    ]) + "\n"  # fmt: skip


def with_gpu(text: str, part: str) -> str:
    """A page whose last part is what was seen on a GPU.

    Args:
        text: of the page.
        part: what was seen; empty: nothing.
    """
    rest = text.partition(_GPU_BEGIN)[0].rstrip()
    return f"{rest}\n\n{_GPU_BEGIN}\n{part}\n{_GPU_END}\n" if part else f"{rest}\n"


def gpu_part(text: str) -> str:
    """What was seen on a GPU, of a page; empty: nothing."""
    return text.partition(_GPU_BEGIN)[2].partition(_GPU_END)[0].strip()


def machine() -> str:
    """What it was measured on, without its name."""
    info = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in info.splitlines()
            if line.startswith("model name")
        ),
        "?",
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    kernel = ".".join(platform.release().split("-")[0].split(".")[:3])
    hardware = f"{len(os.sched_getaffinity(0))} cores ({model}), {memory:.0f} GiB of memory"
    return f"Machine: {hardware}, {platform.system()} {kernel}. {', '.join(versions())}."


def versions() -> list[str]:
    """Of everything that was compared."""
    return [
        f"Python {platform.python_version()}",
        *(f"{name} {_package(name)}" for name in _PACKAGES),
        *(f"{name} {_program(command)}" for name, command in _PROGRAMS.items()),
    ]


def _package(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _program(command: Sequence[str]) -> str:
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        ).stdout
        return next(word for word in said.split() if word[0].isdigit())
    except (OSError, subprocess.SubprocessError, StopIteration):
        return "not installed"
