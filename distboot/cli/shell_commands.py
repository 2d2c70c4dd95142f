"""The commands that a shell script runs in any case.

Only these count, as a warning about a command that is not run would be wrong. The commands of a
function, and of a script that this one starts, do not count. Nor does what follows a guard that
lets only some ranks go on: `[ "$RANK" = 0 ] || exit 0`.

The text is split into commands, each with the operator before it, and `_Place` goes through them
in order. It holds where the current command is:

- `_depth` counts the open `if`, `case`, loops and function bodies. What is in one may not be run,
  except the condition of the outermost `if` or `while` (`_is_condition`).
- `_brackets` counts the open brackets: a subshell, an array, or `((`, whose words are operands
  (`_is_computed`). An `exit` in a subshell does not end the script.
- `_is_tested` and `_is_skipped` are about a chain of `&&` and `||` outside of these. What follows
  `||` may not be run, nor does what follows a test and `&&`. `cd x && torchrun` counts, as `cd`
  is expected to succeed.
- `_names_rank` is set when a command that may decide on the next ones reads a value that differs
  among the ranks. It is kept to the end of the chain, or to the closing `fi`. If the shell can end
  before that, or wait for long, other ranks may not go on: nothing after it counts.

`move` follows the order of the text. `_follow_chain` comes first, as the operator is before the
command: it belongs to the place outside of what this command opens, so that the `if` of
`a && if b; then` continues the chain of `a`. Then `_open` notes what the command opens or closes
for those behind it. `_names_rank` is last: a new chain clears it, and `_open` has to note first
whether the command is in the condition of an `if`, which decides on all in that `if`.
"""

from __future__ import annotations

import itertools
import re

from ..base.patterns import pattern
from .shell_text import LOOKED_AT, without_prefixes

# A text for a command, whose lines are no commands: <<EOF … EOF
_HERE_DOCUMENT = pattern(
    r"<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*\n)(?:.{0,3999}?\n)??[ \t]*\2(?=\n|\Z)", re.DOTALL
)
# What is quoted, a number that is computed, and any other character
_WORD = r"(?:'[^']*'|\"(?:\\.|[^\"\\])*\"|\$\(\([^()]*\)\)|\\[^\n]|[^\s;&|()<>'\"\\])+"
# A line that goes on, a comment, a redirection with its target (the `(` of a process substitution
# ends the command), what ends a command, or a word with what is quoted in it
_PARTS = pattern(
    r"\\\n|#[^\n]*"
    rf"|(?:[0-9]+|&)?[<>]{{1,3}}[&|]?[ \t]*(?:{_WORD})?"
    r"|(?P<end>[;&|()\n]+)"
    rf"|(?P<word>{_WORD})",
    re.DOTALL,
)
_QUOTES = pattern(r"'([^']*)'|\"((?:\\.|[^\"\\])*)\"|\\(.)", re.DOTALL)
# Words of the shell before a command
_KEYWORDS = {"!", "{", "do", "elif", "else", "if", "then", "until", "while"}
# Others that are not its program: commands of the shell, and assignments
_BEFORE = pattern(r"exec|command|[A-Za-z_]\w*\+?=.*", re.DOTALL)
# First words that open what is run only if something holds, or is called, and those that close it
_DEPTHS = {
    **dict.fromkeys(("if", "case", "for", "while", "until", "select", "{"), 1),
    **dict.fromkeys(("fi", "esac", "done", "}"), -1),
}
_OPENS_CONDITION = {"if", "while", "until"}
_ENDS_CONDITION = {"then", "do"}
_HAS_CONDITION = {*_OPENS_CONDITION, "elif", "case"}
# What may be between two commands, and what of it begins a new chain of && and ||
_JOINTS = ("&&", "||", "|", "&", ";", "\n")
_NEW_CHAIN = ("&", ";", "\n")
# The one word before the bracket of a function or an array
_NAME = pattern(r"(?!(?:!|\{|do|elif|else|for|if|then|until|while)\Z)[^\0]*\Z")
_TESTS = ("[", "[[", "test")
# A command after which the shell runs no other one; `exec >log` is none
_END = pattern(r"(?:exit|return)(?:\0|\Z)|exec\0[^\0]", re.DOTALL)
# An hour or more: a rank that waits so long takes no further part in the job
_LONG = (
    r"inf|(?:3[6-9][0-9]{2}|[4-9][0-9]{3}|[0-9]{5,})s?\Z"
    r"|(?:[6-9][0-9]|[0-9]{3,})m|[1-9][0-9.]*[hd]"
)
# Such a command after which the job goes on. Others only return from a function, or end the job.
_LEAVES_OTHERS = pattern(
    r"exit(?:\0(?![1-9])|\Z)|exec\0[^\0]"
    rf"|sleep\0(?:{_LONG})|tail\0-[fF]\0/dev/null"
    r"|(?:[^\0]*/)?sshd\0(?:[^\0]*\0)*?-[46deiqt]*D",
    re.DOTALL,
)
# In names of variables that differ among the ranks: RANK, SLURM_PROCID, JOB_COMPLETION_INDEX, …,
# but not in RANKING_DATA, NUM_RANKS or POD_NAMESPACE
_OF_RANK = pattern(
    "(?:rank(?:_?id)?|procid|localid|hostname|current_host|node_?name|app_pe|pod_name"
    "|(?:completion|node|pod|replica|task|worker|process|role|array|local|pmi)_?(?:id|index)"
    ")(?![a-z])",
    re.IGNORECASE,
)
# The variables that a command reads, and those in a number that is computed
_READ = pattern(r"(?:\$\{?[#!]?|\bprintenv )([A-Za-z_]\w*)")
_COMPUTED = pattern(r"\$\(\(([^()]*)")
_OPERAND = pattern(r"[A-Za-z_]\w*")
# A command that prints the host's name, also in $(…) or `…`. `uname` alone prints the system's.
_PRINTS_HOST = pattern(
    r"(?:\A|\$\(|`)[ \t]*(?:[\w./-]*/)?"
    r"(?:hostname(?![\w.-])|uname[ \t]+(?:-\w*[an]|--(?:all|nodename)))"
)
# A variable whose value begins with that of another, or with what a command prints
_ASSIGNMENT = pattern(r"(?<![\w$-])([A-Za-z_]\w*)=(\"?(?:\$\(+[^()\n]*|`[^`\n]*|\$[^\s;&|()/]*))")


def commands_in(text: str) -> list[list[str]]:
    """The words, without quotes, of each command that a shell script runs in any case."""
    found = []
    place = _Place(_variables_of_rank(text[:LOOKED_AT]))
    for operator, words in _split(text):
        place.move(operator, words)
        joined = "\0".join(_without_keywords(words))
        if place.is_run:
            found.append(_from_its_program(words))
            if _END.match(joined) is not None:
                break
        elif place.is_below_guard and _LEAVES_OTHERS.match(joined) is not None:
            break
    return list(filter(None, found))


def all_commands_in(text: str) -> list[list[str]]:
    """The words of each command of a shell script, also of those that may not be run."""
    found = []
    for _, words in _split(text):
        found.append(_from_its_program(words))
    return list(filter(None, found))


class _Place:
    """Where a command of a script is: whether it is run in any case, and below which guard."""

    def __init__(self, of_rank: set[str]) -> None:
        self._of_rank = of_rank  # the script's own variables that differ among the ranks
        self._depth = 0  # of what is run only if something holds, or is called
        self._brackets = 0  # that are open
        self._is_computed = False  # whether they are `((`, whose words are operands
        self._is_condition = False  # of the outermost `if` or `while`, which is run in any case
        self._is_tested = False  # whether the chain of && and || depends on a test
        self._is_skipped = False  # whether the pipe is not run in any case, as the chain has it
        self._names_rank = False  # whether what decides on this command differs among the ranks

    @property
    def is_run(self) -> bool:
        """Whether the command is run in any case."""
        is_below = self._depth > int(self._is_condition)
        return not any((is_below, self._brackets, self._is_skipped))

    @property
    def is_below_guard(self) -> bool:
        """Whether the shell, and no other one in brackets, runs it for some of the ranks."""
        return all((self._names_rank, self._brackets == 0))

    def move(self, operator: str, words: list[str]) -> None:
        """Go to the next command, before which the operator is."""
        command = _without_keywords(words)
        keywords = words[: len(words) - len(command)]
        first = {*keywords, *command[:1]}
        was_outside = self._depth + self._brackets == 0
        self._brackets = max(self._brackets + operator.count("(") - operator.count(")"), 0)
        tests = (
            not first.isdisjoint(_TESTS),
            words[-1] == "]]",
            operator.endswith("(("),
        )
        if operator.endswith("(("):
            self._is_computed = True
        if not self._brackets:
            self._is_computed = False
        joint = "&&"  # what is opened belongs to the chain around it
        if any((was_outside, self._depth + self._brackets == 0)):
            joint = next(filter(operator.__contains__, _JOINTS), "")
        self._follow_chain(joint, is_test=any(tests))
        self._open(keywords, command, is_outside=was_outside)
        has_condition = not first.isdisjoint(_HAS_CONDITION)
        decides = any((*tests, has_condition, self._is_condition, self._depth == 0))
        if decides and self._reads_rank(command):
            self._names_rank = True

    def _reads_rank(self, command: list[str]) -> bool:
        """Whether the command reads what differs among the ranks."""
        text = " ".join(command)
        if self._is_computed:
            text = f"$(({text}"
        return _differs(text, self._of_rank)

    def _follow_chain(self, joint: str, *, is_test: bool) -> None:
        """Note on what the command depends, of a chain of && and ||."""
        if joint in _NEW_CHAIN:
            self._names_rank = False
        if joint in (*_NEW_CHAIN, "||"):
            self._is_tested = False
        if joint != "|":
            self._is_skipped = any((joint == "||", self._is_tested))
        if is_test:
            self._is_tested = True

    def _open(self, keywords: list[str], command: list[str], *, is_outside: bool) -> None:
        """Note what is opened and closed, and where its condition begins and ends."""
        if is_outside and not _OPENS_CONDITION.isdisjoint(keywords):
            self._is_condition = True
        elif not _ENDS_CONDITION.isdisjoint(keywords):
            self._is_condition = False
        first = [*keywords, *command[:1]]
        opened = sum(map(_DEPTHS.get, first, itertools.repeat(0)))
        opened += command.count("{")  # function train {
        self._depth = max(self._depth + opened, 0)


def _split(text: str) -> list[tuple[str, list[str]]]:
    """The words of each command without its redirections, and the operators before it."""
    found: list[tuple[str, list[str]]] = []
    operator = ""
    words: list[str] = []
    without_texts = _HERE_DOCUMENT.sub(r"\3", text[:LOOKED_AT])
    for part in _PARTS.finditer(f"{without_texts}\n"):
        if part["word"]:
            word = _QUOTES.sub(_unquoted, part["word"])
            words.append(word)
        elif part["end"]:
            is_before_bracket = part["end"].startswith("(")
            is_name = is_before_bracket and _NAME.match("\0".join(words)) is not None
            if words and not is_name:
                found.append((operator, words))
                operator = ""
            operator += part["end"]
            words = []
    return found


def _variables_of_rank(text: str) -> set[str]:
    """The variables that a script sets from what differs among the ranks: me=$(hostname)."""
    found: set[str] = set()
    for name, value in _ASSIGNMENT.findall(text):
        if _differs(value, found):
            found.add(name)
    return found


def _differs(text: str, of_rank: set[str]) -> bool:
    """Whether a text reads a variable that differs among the ranks, or the host's name."""
    computed = " ".join(_COMPUTED.findall(text))
    names = {*_READ.findall(text), *_OPERAND.findall(computed)}
    is_known = not names.isdisjoint(of_rank)
    is_of_rank = _OF_RANK.search(" ".join(names)) is not None
    prints_host = _PRINTS_HOST.search(text) is not None
    return any((is_known, is_of_rank, prints_host))


def _without_keywords(words: list[str]) -> list[str]:
    rest = itertools.dropwhile(_KEYWORDS.__contains__, words)
    return list(rest)


def _from_its_program(words: list[str]) -> list[str]:
    rest = _without_keywords(words)
    before: list[str] = []
    while rest not in (before, []):
        before = rest
        if rest[0] == "eval":
            rest = " ".join(rest[1:]).split()
        rest = list(itertools.dropwhile(_BEFORE.fullmatch, rest))
        rest = without_prefixes([*rest, ""])[:-1]
    return rest


def _unquoted(quoted: re.Match[str]) -> str:
    texts = filter(None, quoted.groups())
    return "".join(texts)
