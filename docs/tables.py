"""Rewrite what the reference says about the code, from the records that the code itself uses: `make docs`.

A page has `<!-- name: written by `make docs` -->` and `<!-- end of name -->` around what is written here, and is a
person's otherwise. tests/docs/test_reference.py fails when a page is not as this would write it.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import python_page

import distboot
from distboot.base.errors import CODES
from distboot.base.internal_variables import INTERNAL
from distboot.base.settings import SETTINGS, Setting
from distboot.cli.commands import COMMANDS
from distboot.detection.launchers import Launcher, sample_of
from distboot.detection.node_platform import NodePlatform
from distboot.detection.order import INNERMOST_FIRST, LAUNCHERS, node_platforms
from distboot.detection.placement import PLATFORMS, Platform
from distboot.script.patch_table import GROUPS

REFERENCE = Path(__file__).parent / "reference"
PACKAGE = Path(distboot.__file__).parent

_COMMANDS = ("", *COMMANDS)
# What looks like the name of a variable, as a whole string: OMPI_COMM_WORLD_RANK, OMPI_MCA_orte_hnp_uri, NCCL_ as the
# beginning of many; and those few that have no underscore.
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*_(?:[A-Za-z0-9_]*[A-Za-z0-9])?")
_WORDS = ("RANK", "ENVIRONMENT", "HOME", "HOSTNAME", "PYTHONPATH", "PYTHONUNBUFFERED", "container")
_LOOKS_LIKE_VARIABLE = re.compile(r"\b(?:DISTBOOT|SLURM)_[A-Z_]+\b")
_PROXY = re.compile(r"(no_)?(grpc|https?|no)_proxy|no_proxy")


def variables(path: Path, record: str = "") -> set[str]:
    """The names in a source file that are, by their looks, those of environment variables; docstrings do not count.

    Args:
        path: of the file.
        record: only those of this record, and of what it uses in its file; default: of all that is in the file.
    """
    tree: ast.AST = ast.parse(path.read_text())
    if record:
        tree = ast.Module(_with_parts(_defined(path), record), [])
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return {name for node in ast.walk(tree) if id(node) not in prose for name in _names(node)}


def _defined(path: Path) -> dict[str, ast.stmt]:
    """The constants, functions and classes of a file by name."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {
                name.id: node for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)
            }
    return found


def _with_parts(defined: Mapping[str, ast.stmt], record: str) -> list[ast.stmt]:
    """The statement that makes a record, and those that make what it uses, and what that uses."""
    found, names = dict[str, ast.stmt](), [record]
    while names:
        name = names.pop()
        if name in defined and name not in found:
            found[name] = defined[name]
            names += [node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)]
    return list(found.values())


def _names(node: ast.AST) -> Iterator[str]:
    text = node.value if isinstance(node, ast.Constant) else None
    if isinstance(text, str) and (
        _VARIABLE.fullmatch(text) or _PROXY.fullmatch(text) or text in _WORDS
    ):
        yield text


def rendered(text: str) -> str:
    """The text of a page with all that is written here as it is to be."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: written by `make docs` -->", f"<!-- end of {name} -->"
        pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
        made = f"{begin}\n{table()}\n{end}"
        text = re.sub(pattern, partial(_constant, made), text, flags=re.DOTALL)
    # What the exit code and the meaning of an error are stands below its heading, too.
    for code in CODES:
        heading = f"## {code}\n\n"
        made = heading + _meaning(code)
        text = re.sub(f"^{heading}.*$", partial(_constant, made), text, flags=re.MULTILINE)
    return text


def _constant(replacement: str, _: re.Match[str]) -> str:
    """The replacement as it is: `re.sub` would read backslashes in a text."""
    return replacement


def _meaning(code: str) -> str:
    number, meaning = CODES[code]
    return f"Exit code {number}: {meaning}."


def _errors() -> str:
    rows = [
        f"| [`{code}`](#{code}) | {number} | {meaning} |"
        for code, (number, meaning) in CODES.items()
    ]
    return "\n".join(["| code | exit code | meaning |", "|---|---|---|", *rows])


def _recognized(kind: str, records: Iterable[Launcher | Platform]) -> str:
    rows = [f"| name | {kind} | recognized by | facts from |", "|---|---|---|---|"]
    for known in records:
        markers = ", ".join(f"`{marker}`" for marker in known.markers) or "no trace of any of these"
        rows.append(f"| `{known.name}` | {known.title} | {markers} | {known.source} |")
    return "\n".join(rows)


def _of_launchers() -> str:
    """Which variables are read for each launcher: all that its file or record names, the markers first."""
    rows = ["| launcher | variables |", "|---|---|"]
    for entry in INNERMOST_FIRST:
        known = LAUNCHERS[entry.name]
        file = PACKAGE / "detection" / "launchers" / f"{entry.file}.py"
        found = variables(file, known.name.upper())
        names = [f"**`{name}`**" for name in known.markers] + [
            f"`{name}…`" if name.endswith("_") else f"`{name}`"
            for name in sorted(found - set(known.markers))
        ]
        rows.append(f"| `{known.name}` | {', '.join(names)} |")
    return "\n".join(rows)


def _samples() -> str:
    """What the third rank of two nodes with two ranks each finds."""
    rows = ["| launcher | variables |", "|---|---|"]
    for known in LAUNCHERS.values():
        if known.sample:
            found = sample_of(known.sample, rank=2, nodes=2, per_node=2)
            words = [f"`{name}={value}`" for name, value in found.items()]
            rows.append(f"| `{known.name}` | {' '.join(words)} |")
    return "\n".join(rows)


def _of_nodes() -> str:
    """The platforms that number nodes: what is read, and what to type."""
    sections = []
    for known in node_platforms(LAUNCHERS.values()):
        sections += [
            f"### {known.title}",
            "",
            f"Launcher `{known.name}`, facts from [{_site(known.source)}]({known.source}).",
            *([known.note] if known.note else []),
            "",
            *_derived(known),
            "",
        ]
    return "\n".join(sections).rstrip()


def _site(page: str) -> str:
    return page.removeprefix("https://").partition("/")[0]


def _derived(known: NodePlatform) -> list[str]:
    """The rows of the table of one platform."""
    per_node = (
        "one: one process uses all of a node" if known.one_rank else _variables(known.per_node)
    )
    cells = (
        ("number of the node", _variables((known.index_variable,))),
        (
            "number of nodes",
            _variables((known.count_variable or known.hosts or known.index_variable,)),
        ),
        ("address of node 0", _variables((known.address, known.hosts)) or "`MASTER_ADDR`"),
        ("port", _variables((known.port,)) or "`MASTER_PORT`, or derived"),
        ("ranks per node (`auto`)", per_node or "not given"),
        ("job id", _variables(known.job_id_variables)),
        ("also read", _variables(known.also_reads)),
        ("to type on every node", f"`{_command(known)}`"),
    )
    rows = [f"| {what} | {said} |" for what, said in cells if said]
    return ["| what | from |", "|---|---|", *rows]


def _variables(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names if name)


def _command(known: NodePlatform) -> str:
    """What to type on every node."""
    if known.one_rank:
        return "python -m distboot run -- python train.py"
    count = "auto" if known.per_node else "8"
    return f"python -m distboot run --nproc-per-node {count} -- python train.py"


def _of_platforms() -> str:
    rows = [
        "| platform | recognized by | address of rank 0 | not if `true` | job id |",
        "|---|---|---|---|---|",
    ]
    for known in PLATFORMS:
        cells = (known.markers, known.addresses, [known.silenced_by], known.job_id_variables)
        said = (", ".join(f"`{name}`" for name in names if name) for names in cells)
        rows.append(f"| `{known.name}` | {' | '.join(said)} |")
    return "\n".join(rows)


def _patches() -> str:
    """What distboot changes in the process of a script, a table for each purpose."""
    sections = []
    for group in GROUPS:
        sections += [f"## {group.title}", ""]
        if group.about:
            sections += [group.about, ""]
        sections += ["| what | why | when | turned off by |", "|---|---|---|---|"]
        for patch in group.patches:
            sections.append(f"| {patch.what} | {patch.why} | {patch.when} | {patch.off} |")
        sections.append("")
    return "\n".join(sections).rstrip()


def _settings() -> str:
    """What users can set: variable, option of `run` and argument of `init`, default, meaning."""
    rows = [
        "| variable | option | argument of `init` | default | meaning |",
        "|---|---|---|---|---|",
    ]
    for known in SETTINGS:
        names = (known.variable, known.option, known.argument)
        cells = [f"`{name}`" if name else "" for name in names]
        rows.append(f"| {' | '.join(cells)} | {_default(known)} | {_setting_meaning(known)} |")
    return "\n".join(rows)


def _default(known: Setting) -> str:
    if known.default:
        return f"`{known.default}` {known.unit}".rstrip()
    return _LOOKS_LIKE_VARIABLE.sub(r"`\g<0>`", known.without)


def _setting_meaning(known: Setting) -> str:
    text = _LOOKS_LIKE_VARIABLE.sub(r"`\g<0>`", known.help)
    if known.unit and not known.default:
        text = f"{text}; in {known.unit}"
    if known.page:
        text = f"{text}. [More]({known.page})"
    return text


def _internal() -> str:
    rows = ["| variable | set | meaning |", "|---|---|---|"]
    for variable, known in INTERNAL.items():
        rows.append(f"| `{variable}` | {known.written} | {known.help} |")
    return "\n".join(rows)


def _help() -> str:
    """What every command says of itself."""
    sections = []
    for command in _COMMANDS:
        words = [sys.executable, "-m", "distboot", *filter(None, [command]), "--help"]
        environ = {**os.environ, "COLUMNS": "100"}
        said = subprocess.run(
            words, env=environ, cwd=PACKAGE.parent, capture_output=True, text=True, check=True
        ).stdout
        sections += [f"## {command or 'All commands'}", "", "```text", said.rstrip(), "```", ""]
    return "\n".join(sections).rstrip()


TABLES: dict[str, Callable[[], str]] = {
    "launchers": lambda: _recognized("launcher", LAUNCHERS.values()),
    "platforms": lambda: _recognized("platform", PLATFORMS),
    "errors": _errors,
    "variables of launchers": _of_launchers,
    "samples of launchers": _samples,
    "variables of platforms": _of_platforms,
    "platforms that number nodes": _of_nodes,
    "patches": _patches,
    "help": _help,
    "python": python_page.page,
    "settings": _settings,
    "variables of distboot's own": _internal,
}


def main() -> None:
    """Write them."""
    for page in sorted(REFERENCE.glob("*.md")):
        page.write_text(rendered(page.read_text()))


if __name__ == "__main__":
    main()
