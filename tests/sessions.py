"""The sessions of a shell that the pages show: commands after `$`, and below each what it prints.

A session is run by bash, command by command. What is shown is compared line by line, in any order, as ranks print side
by side: each line that is shown must have been printed. `…` stands for anything, and so do numbers that change from
run to run (ports, process ids, times). `laptop` is the host on which it is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pages import Block

_MARK = "\x01"
_CHANGES = (
    (r"\bport \d+", "port N"),
    (r"(master_port +)\d+", r"\1N"),
    (r"prterun-[\w.-]+@\d+ *", "JOB "),
    (r"\bprocess \d+", "process N"),
    (r"\d\d:\d\d:\d\d UTC", "T UTC"),
    (r"\d+\.\d+ s\b", "N s"),
    (r"\b\d\.\d\d\b", "0.NN"),
    (r" +", " "),
)
# What a command that is to fail shows of it.
_FAILS = re.compile(r"error\[|failed first|^Not ready", re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """One command of a session, and what is shown below it."""

    text: str
    shown: tuple[str, ...]

    @property
    def program(self) -> str:
        """The first word that is not an assignment."""
        words = [word for word in self.text.split() if not re.match(r"\w+=", word)]
        return words[0]

    @property
    def fails(self) -> bool:
        """Whether it is shown as one that fails."""
        return bool(_FAILS.search("\n".join(self.shown)))


def commands(block: Block, replacements: Mapping[str, str] = {}) -> list[Command]:
    """Those of a block, with some of the text replaced by what can be run here."""
    text = block.text
    for old, new in replacements.items():
        text = text.replace(old, new)
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found and found[-1][0].endswith("\\") and not found[-1][1]:
            found[-1] = (f"{found[-1][0][:-1]}{line.strip()}", [])
        elif found:
            found[-1][1].append(line)
        else:
            raise ValueError(f"{block}: output without a command: {line}")
    return [Command(text, tuple(shown)) for text, shown in found]


def script(session: Sequence[Command], before: str = "") -> str:
    """What bash runs: after each command a mark and its exit code, which the next one still finds in `$?`."""
    marked = [f"{each.text}\n( code=$?; printf '{_MARK}%d{_MARK}' $code; exit $code )" for each in session]
    return "\n".join(["exec 2>&1", before, *marked, ""])


def disagreements(session: Sequence[Command], output: str, host: str) -> list[str]:
    """What is shown and was not printed, and exit codes that are not as they are shown."""
    found = []
    ran = output.split(_MARK)[:-1]
    if len(ran) != 2 * len(session):
        found.append(f"only {len(ran) // 2} of {len(session)} commands ended")
    for each, printed, code in zip(session, ran[::2], ran[1::2], strict=False):
        lines = [_normal(line, host) for line in printed.splitlines()]
        for line in filter(str.strip, each.shown):
            pattern = ".*".join(re.escape(part) for part in _normal(line, "laptop").split("…"))
            if not any(re.fullmatch(pattern, one) for one in lines):
                found.append(f"$ {each.text}\n  does not print: {line}")
        if (code != "0") != each.fails:
            found.append(f"$ {each.text}\n  ended with {code}")
    return found


def _normal(line: str, host: str) -> str:
    line = re.sub(rf"\b{re.escape(host)}\b", "laptop", line.rstrip())
    for pattern, instead in _CHANGES:
        line = re.sub(pattern, instead, line)
    return line
