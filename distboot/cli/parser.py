"""argparse with errors of distboot, and options declared as `--help` shows them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

from ..base.errors import DistbootError
from ..base.settings import option_help
from ..base.text import escape_control
from .option_table import entries
from .target import begins_target


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `DistbootError` and accepts no abbreviated options.

    `options` is as `option_table` describes it. `more` has, by option, further arguments of
    `add_argument`; `hints`, by an unknown option, what to do instead. Every command that
    detects this process has `--launcher`.
    """

    def __init__(
        self,
        command: str,
        description: str,
        options: str = "",
        *,
        more: Mapping[str, Any] = {},
        usage: str | None = None,
        hints: Mapping[str, str] = {},
        detects: bool = True,
    ) -> None:
        super().__init__(
            prog=f"python -m distboot {command}",
            description=description,
            usage=usage,
            allow_abbrev=False,
            # argparse makes one for every option, and would ask for the width of the terminal, with
            # shutil: 3 ms that only --help needs.
            formatter_class=partial(argparse.HelpFormatter, width=80),
        )
        self._hints = hints
        self._target: list[str] = []  # what follows the options
        add = self.add_argument
        if detects:
            options = f"{option_help('DISTBOOT_LAUNCHER')}\n{options}"
        for names, metavar, text in entries(options):
            if not text:
                add = self.add_argument_group(names).add_argument
                continue
            form: dict[str, Any] = {"action": "store_true"}
            if metavar:
                form = {"metavar": metavar}
            add(*names.split(","), help=text, **form, **more.get(names, {}))

    def split(self, argv: list[str]) -> tuple[list[str], list[str]]:
        """The options of this command, and what follows: a target with its arguments."""
        own = []
        index = 0
        while index < len(argv):
            word = argv[index]
            if begins_target(word):
                break
            option = self._with_dashes(word)
            own.append(option)
            index += 1
            action = self._option_string_actions.get(option)
            if action is not None and action.nargs is None:
                own += argv[index : index + 1]  # its value
                index += 1
        self._target = argv[index:]
        return own, self._target

    def _with_dashes(self, word: str) -> str:
        """`"--nproc_per_node=2"` -> `"--nproc-per-node=2"`, if that is an option."""
        name, equals, value = word.partition("=")
        dashed = name.replace("_", "-")
        if dashed in self._option_string_actions:
            return f"{dashed}{equals}{value}"
        return word

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # argparse of Python 3.10 to 3.12 drops the value of `--option=--`
        for word in args or ():
            name, _, value = word.partition("=")
            if value == "--" and name in self._option_string_actions:
                self.error(f"argument {name}: expected one argument")
        options, unknown = super().parse_known_args(args, namespace)
        # The value of an unknown option may be a secret, and other ranks print the error, too
        names = [word.partition("=")[0] for word in unknown]
        return options, names

    def format_help(self) -> str:
        self.formatter_class = argparse.HelpFormatter  # as wide as the terminal
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        hint = f"{self.prog} --help"
        problem, _, words = message.partition(": ")
        if problem == "unrecognized arguments":
            option = words.partition(" ")[0]
            hint = self._hint_for(option) or hint
        raise DistbootError(
            "usage",
            escape_control(message),
            hint,
        )

    def _hint_for(self, option: str) -> str:
        """What to do about an unknown option; empty: that is not known."""
        known = self._hints.get(option.replace("_", "-"))
        if known is not None:
            return known
        from .unknown_option import after_script, meant_by

        # --help follows in any case; it is near to any short option
        names = self._option_string_actions.keys() - {"--help"}
        meant = meant_by(option, names)
        what_to_do = after_script(option, self._target, self.prog)
        if meant and not what_to_do:
            what_to_do = f"{self.prog} --help"
        return escape_control(f"{meant}{what_to_do}")
