"""`doctor`: whether this container is ready for a distributed job, and the remedy where it is not."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ...base.dataclass import as_dict, replace
from ...base.text import counted, escape_control, first_line
from ...cli.output import emit
from ...cli.parser import Parser
from . import CHECKS, ON_EVERY_SYSTEM, Check
from .finding import STATUSES, Finding, unknown
from .job_findings import examine_job
from .machine import Machine

# By whether the container is ready; EX_CONFIG of sysexits.h, as for every broken environment
_EXIT_CODES = {True: 0, False: 78}


def doctor(arguments: list[str]) -> int:
    """`doctor`: examine this container, or those of all ranks."""
    options = Parser(
        "doctor",
        "Look for what will make a distributed job fail, hang or be slow here: exit code 78 if so.",
        "--json  print one JSON object\n"
        "--job  run on all ranks: they meet once, and rank 0 prints what is not ok on which of\n"
        "  them",
    ).parse_args(arguments)
    environ = dict(os.environ)
    if options.launcher:
        environ["DISTBOOT_LAUNCHER"] = options.launcher
    machine = Machine(environ, named_launcher=options.launcher)
    found = examine(machine)
    report: dict[str, Any] = {
        "host": machine.host,
        "findings": [as_dict(finding) for finding in found],
    }
    shown = text(found, machine.host)
    if options.job:
        of_all = examine_job(machine, found)
        if of_all is None:
            # Rank 0's exit code is that of all; many launchers would kill rank 0 if another rank
            # failed first.
            return 0
        report = of_all.report
        shown = _titled_text(of_all.titled, of_all.where)
    statuses = [finding["status"] for finding in report["findings"]]
    is_ready = "problem" not in statuses
    if options.json:
        shown = json.dumps({"ready": is_ready, **report})
    emit(shown)
    return _EXIT_CODES[is_ready]


def examine(machine: Machine, checks: tuple[Check, ...] | None = None) -> list[Finding]:
    """All that the checks find, in their order; default: all checks for the machine's system."""
    if checks is None:
        checks = ON_EVERY_SYSTEM
        if machine.system == "linux":
            checks = CHECKS
    results = []
    for check in checks:
        name = check.__name__.replace("_", "-")
        for finding in _found(check, machine):
            results.append(replace(finding, name=name))
    return results


def _found(check: Check, machine: Machine) -> list[Finding]:
    try:
        result = check(machine)
        if isinstance(result, Finding):
            return [result]
        return list(result)
    except Exception as error:  # noqa: BLE001 - a machine may be stranger than a check expects
        seen = f"the check itself failed: {type(error).__name__}: {first_line(error)}"
        remedy = "please report it, with the output of `python -m distboot doctor --json`"
        return [unknown(seen, remedy)]


def text(found: Sequence[Finding], host: str) -> str:
    """The findings on one host for people, the worst first."""
    titled = []
    for finding in sorted(found, key=lambda finding: STATUSES.index(finding.status)):
        titled.append((finding, finding.name))
    return _titled_text(titled, host)


def _titled_text(titled: Sequence[tuple[Finding, str]], where: str) -> str:
    """`"Not ready: 2 problems, 1 warning (node-3)."`, and below it each finding with its title."""
    lines = [f"{_summary(titled)} ({where})."]
    if titled:
        lines.append("")
    for finding, title in titled:
        # problem  shared-memory: /dev/shm has 64 MiB …
        #            remedy: docker run --ipc=host
        lines.append(f"{finding.status:<8} {title}: {finding.seen}")
        label = "remedy: "
        for line in filter(None, finding.remedy.split("\n")):
            lines.append(f"{'':<8}   {label}{line}")
            label = "  "
    return "\n".join(map(escape_control, lines))


def _summary(titled: Sequence[tuple[Finding, str]]) -> str:
    counts = Counter(finding.status for finding, _ in titled)
    problems = counted(counts["problem"], "problem")
    warnings = counted(counts["warning"], "warning")
    if counts["problem"] and counts["warning"]:
        return f"Not ready: {problems}, {warnings}"
    if counts["problem"]:
        return f"Not ready: {problems}"
    if counts["warning"]:
        return f"Ready: {warnings}"
    return "Ready: no problems found"
