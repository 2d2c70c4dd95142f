"""`completion`: what a shell needs to complete the commands, and the options of `run`."""

from __future__ import annotations

import re

from ..cli.commands import COMMANDS
from ..cli.output import emit
from ..cli.parser import Parser
from ..cli.run_options import run_parser

_BASH = """\
_distboot() {{
  local word=${{COMP_WORDS[COMP_CWORD]}}
  if [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "{options}" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
    if [[ $COMP_CWORD == 1 ]]; then
      COMPREPLY+=($(compgen -W "{commands}" -- "$word"))
    fi
  fi
}}
complete -o filenames -F _distboot distboot
"""
_ZSH = """\
#compdef distboot
_distboot() {{
  if [[ $words[CURRENT] == -* ]]; then
    compadd -- {options}
  else
    if (( CURRENT == 2 )); then
      compadd -- {commands}
    fi
    _files
  fi
}}
compdef _distboot distboot
"""
_FISH = """\
complete -c distboot -n __fish_use_subcommand -a "{commands}"
for option in {options}
  complete -c distboot -l (string sub -s 3 -- $option)
end
"""
_SHELLS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_HOW = (
    "Print what completes the commands and options of distboot. "
    'bash: eval "$(distboot completion bash)" in ~/.bashrc; '
    'zsh: eval "$(distboot completion zsh)" after compinit in ~/.zshrc; '
    "fish: distboot completion fish > ~/.config/fish/completions/distboot.fish"
)


def completion(arguments: list[str]) -> int:
    """The command `completion`."""
    parser = Parser("completion", _HOW, detects=False)
    parser.add_argument("shell", choices=tuple(_SHELLS))
    options = parser.parse_args(arguments)
    text = _SHELLS[options.shell].format(
        commands=" ".join(COMMANDS),
        options=" ".join(_options_of_run()),
    )
    emit(text.rstrip())
    return 0


def _options_of_run() -> list[str]:
    helped = run_parser().format_help()
    found = re.findall(r"^ +(?:-\w, )?(--[\w-]+)", helped, re.MULTILINE)
    return sorted(set(found))
