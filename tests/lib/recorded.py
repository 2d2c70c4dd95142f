"""Machines for the doctor's checks: what `tests/machines/*.json` holds, laid out below a folder, and changes to it."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from distboot.tools.doctor.command import examine
from distboot.tools.doctor.finding import Finding
from distboot.tools.doctor.machine import Machine

FOLDER = Path(__file__).parents[1] / "machines"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
PACKAGES = "usr/lib/python3/dist-packages"
INSTALLED = 1_780_000_000.0  # seconds since the epoch: 2026-05-28

Get = Callable[..., Machine]

READY = {  # what azure-nd-h100 lacks
    "dev/infiniband/uverbs{0-7}": "",
    "etc/ld.so.cache": "libibverbs.so.1\0/lib/x86_64-linux-gnu/libibverbs.so.1\0",
    "etc/libibverbs.d/mlx5.driver": "driver mlx5\n",
    "opt/microsoft/ndv5/topo.xml": "<system/>",
    "proc/self/limits": (
        "Max open files  1048576  1048576  files\nMax locked memory  unlimited  unlimited  bytes\n"
    ),
}


def lay_out(files: Mapping[str, str | None], root: Path) -> None:
    for path, text in files.items():
        if text is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)


def machine(
    name: str,
    root: Path,
    /,
    *,
    environ: Mapping[str, str] = {},
    files: Mapping[str, str | None] = {},
    **changes: object,
) -> Machine:
    """One of the machines, with other variables, other files (None: removed) or other attributes."""
    told = json.loads((FOLDER / f"{name}.json").read_text())
    lay_out(_spread({**told["files"], **files}), root)

    def look_up(host: str) -> list[str]:
        if host not in told["names"]:
            raise OSError(-2, "Name or service not known")
        found: list[str] = told["names"][host]
        return found

    attributes: dict[str, object] = {
        "environ": {**told["environ"], **environ},
        "root": root,
        "system": "linux",
        "packages": [PACKAGES],
        "host": told["host"],
        "now": INSTALLED + 3600,
        "installed_at": INSTALLED,
        "may_open": lambda _: True,
        "shared_memory": lambda: tuple(told["shared_memory"]),
        "look_up": look_up,
        "program_above": lambda _: None,
        "addresses": lambda: [(interface, address) for interface, address in told["addresses"]],
        **changes,
    }
    return Machine(**attributes)  # type: ignore[arg-type]


def _spread(files: Mapping[str, str | None]) -> dict[str, str | None]:
    """`"dev/nvidia{0-7}"` stands for eight files; the same digit replaces `{}` in what they hold."""
    spread: dict[str, str | None] = {}
    for path, text in files.items():
        span = re.search(r"\{([0-9])-([0-9])\}", path)
        digits = range(int(span[1]), int(span[2]) + 1) if span else range(1)
        for digit in digits:
            its = path.replace(span[0], str(digit)) if span else path
            spread[its] = text.replace("{}", str(digit)) if text and span else text
    return spread


def bad(one: Machine) -> dict[str, str]:
    return {finding.name: finding.status for finding in examine(one) if finding.status != "ok"}


def one_of(one: Machine, name: str) -> Finding:
    (found,) = (finding for finding in examine(one) if finding.name == name)
    return found
