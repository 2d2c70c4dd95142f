"""`env`: print the variables that `run` exports, for a shell, an env file or `docker run`."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping

from ..base.errors import with_rank
from ..base.settings import join_timeout_setting
from ..cli.output import emit
from ..cli.parser import Parser
from ..detection import inherited
from ..detection.detect import refuse_unless_rank
from ..detection.export import require_master, variables, wait_until_resolves
from ..detection.here import detect_here

_FORMAT = (
    "shell: export and unset lines (default); for a container: docker: -e NAME=value …, to be read "
    'by a shell (eval "docker run $(…) image"), or dotenv: NAME=value lines, '
    "for docker run --env-file"
)
# Both are about the variables of the launcher, which a container does not get.
_NOT_FOR_CONTAINERS = (inherited.VARIABLE, "DISTBOOT_LAUNCHER")


def env(arguments: list[str]) -> int:
    """The command `env`."""
    parser = Parser(
        "env", 'Print the variables that `run` exports: eval "$(python -m distboot env)"'
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--format", choices=("shell", "docker", "dotenv"), default="shell", help=_FORMAT
    )
    form.add_argument(
        "--json", action="store_true", help="print one JSON object; null means: must not be set"
    )
    options = parser.parse_args(arguments)
    placement = detect_here(launcher=options.launcher)
    with with_rank(placement.who):
        refuse_unless_rank(placement)
        placement = require_master(placement)
        wait_until_resolves(placement, join_timeout_setting(os.environ))
    exports = variables(placement, os.environ, named=options.launcher)
    if options.json:
        emit(json.dumps(exports))
    elif options.format == "shell":
        emit("\n".join(_shell_lines(exports)))
    elif options.format == "docker":
        emit(docker_options(_for_container(exports)))
    else:
        emit("\n".join(_for_container(exports)))
    return 0


def _shell_lines(exports: Mapping[str, str | None]) -> list[str]:
    lines = []
    for name, value in exports.items():
        if value is None:
            lines.append(f"unset {name}")
        else:
            lines.append(f"export {name}={shlex.quote(value)}")
    return lines


def _for_container(exports: Mapping[str, str | None]) -> list[str]:
    """NAME=value, without those that must not be set."""
    lines = []
    for name, value in exports.items():
        if value is not None and name not in _NOT_FOR_CONTAINERS:
            lines.append(f"{name}={value}")
    return lines


def docker_options(assignments: list[str]) -> str:
    """Options of `docker run`, as a shell reads them: `-e RANK=3 -e 'NAME=two words'`."""
    return " ".join(f"-e {shlex.quote(text)}" for text in assignments)
