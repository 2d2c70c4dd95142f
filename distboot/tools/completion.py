"""`completion`: what a shell needs to complete the commands and their options."""

from __future__ import annotations

from ..cli.commands import COMMANDS
from ..cli.output import emit
from ..cli.parser import Parser

# The options of a command are what its --help shows when the key is pressed
_BASH = """\
_distboot() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} command=run
  if [[ " {commands} " == *" ${{COMP_WORDS[1]}} "* ]]; then
    command=${{COMP_WORDS[1]}}
  fi
  if [[ $word == -* ]]; then
    local options=$("${{COMP_WORDS[0]}}" $command --help 2>/dev/null | sed -nE '{options}')
    COMPREPLY=($(compgen -W "$options" -- "$word"))
  elif [[ $command == completion ]]; then
    COMPREPLY=($(compgen -W "{shells}" -- "$word"))
  else
    local IFS=$'\\n'  # as file names may have spaces; the bash of macOS has no mapfile
    COMPREPLY=($(compgen -f -- "$word"))
    unset IFS
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
  local command=run
  if [[ " {commands} " == *" $words[2] "* ]]; then
    command=$words[2]
  fi
  if [[ $words[CURRENT] == -* ]]; then
    compadd -- $("$words[1]" $command --help 2>/dev/null | sed -nE '{options}')
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
for command in {commands}
  complete -c distboot -n "__fish_seen_subcommand_from $command" \
    -a "(distboot $command --help 2>/dev/null | sed -nE '{options}')"
end
"""
# Of a line of --help, "  -t N, --tee N  …", the option; a program of sed
_OPTIONS = r"s/^ +(-[a-zA-Z]( [^ ]+)?, )?(--[a-z-]+).*/\3/p"
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
        options=_OPTIONS,
        shells=" ".join(_SHELLS),
    )
    emit(text.rstrip())
    return 0
