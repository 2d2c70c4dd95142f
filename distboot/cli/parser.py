"""argparse with our errors: a usage error is one line with a hint and exit code 2."""

from __future__ import annotations

import argparse
from functools import partial

from ..errors import DistbootError, did_you_mean, printable

TYPE_CHECKING = False  # type checkers take the name for typing's, whose import would slow every start
if TYPE_CHECKING:
    from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `DistbootError` and accepts no abbreviated options."""

    def __init__(self, command: str, description: str, usage: str | None = None) -> None:
        super().__init__(
            prog=f"python -m distboot {command}",
            description=description,
            usage=usage,
            allow_abbrev=False,
            # Every option makes one, which asks for the terminal's width, with shutil: 3 ms that only --help needs.
            formatter_class=partial(argparse.HelpFormatter, width=80),
        )
        self.add_argument(
            "--launcher",
            metavar="NAME",
            help="believe this launcher, like DISTBOOT_LAUNCHER=NAME (default: the innermost one found)",
        )

    def format_help(self) -> str:
        """As wide as the terminal."""
        self.formatter_class = argparse.HelpFormatter
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Raise the `usage` error."""
        unknown, _, words = message.partition(": ")
        option = words.split("=")[0].split(" ")[0] if unknown == "unrecognized arguments" else ""
        meant = did_you_mean(option, self._option_string_actions) if option.startswith("--") else ""
        raise DistbootError("usage", printable(message), f"{meant}{self.prog} --help")
