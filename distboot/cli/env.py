"""`env`: print the variables that `run` exports."""

from __future__ import annotations

import json
import os
import shlex

from ..detection import detect
from ..exports import variables
from ..rendezvous import join_timeout_setting, settled
from .parser import Parser


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = Parser("env", 'Print the variables that `run` exports: eval "$(python -m distboot env)"')
    parser.add_argument(
        "--format",
        choices=("shell", "dotenv"),
        default="shell",
        help="shell: export and unset lines (default); dotenv: NAME=value lines for an env file",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; null means: must not be set")
    options = parser.parse_args(arguments)
    placement = settled(detect(launcher=options.launcher), join_timeout_setting(None))
    exports = variables(placement, os.environ)
    if options.json:
        print(json.dumps(exports))
        return 0
    for name, value in exports.items():
        if options.format == "dotenv":
            if value is not None:
                print(f"{name}={value}")
        else:
            print(f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}")
    return 0
