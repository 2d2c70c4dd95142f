"""`env`: print the variables that `run` exports."""

from __future__ import annotations

import json
import os
import shlex

from ..detection import detect
from ..errors import said_by
from ..exports import variables
from ..nodes import refuse_unless_rank
from ..rendezvous import join_timeout_setting, settled, wait_until_resolves
from .output import say
from .parser import Parser


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = Parser("env", 'Print the variables that `run` exports: eval "$(python -m distboot env)"')
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--format",
        choices=("shell", "dotenv"),
        default="shell",
        help="shell: export and unset lines (default); dotenv: NAME=value lines for an env file",
    )
    form.add_argument("--json", action="store_true", help="print one JSON object; null means: must not be set")
    options = parser.parse_args(arguments)
    placement = detect(launcher=options.launcher)
    with said_by(placement.who):
        refuse_unless_rank(placement)
        placement = settled(placement)
        wait_until_resolves(placement, join_timeout_setting(None))
    exports = variables(placement, os.environ, named=options.launcher)
    if options.json:
        say(json.dumps(exports))
    elif options.format == "dotenv":
        say("\n".join(f"{name}={value}" for name, value in exports.items() if value is not None))
    else:
        say("\n".join(map(_shell, exports, exports.values())))
    return 0


def _shell(name: str, value: str | None) -> str:
    return f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
