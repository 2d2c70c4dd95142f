"""What a script reports of the exception that ends it: type, first line, place, verdict, and an excerpt.

The script judges, because only here all of the exception is there: its message, notes, `__cause__` and `__context__`,
and the members of a group. Its agent gets a bounded description, and decides on that alone. An exception is *secondary*
if it only tells that a peer is gone or did not answer: then another rank has failed first.

Every part is bounded before it is looked at: a message may have 200 MB, and `str()` of an exception may fail. No module
is imported at module level but `os`: an exception may say that no file can be opened any more.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

EXIT = "SystemExit"  # no exception that Python's hook is called for has this type
# In a file's name; others are the script's own
OF_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3")

# How an exception tells that a peer is gone, in lower case, in its type and message.
GONE = (
    # The kernel, in Gloo's "Read error … : Connection reset by peer", torch's store, and NCCL's "Last error"
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    # Gloo's pair.cc
    "connection closed by peer",
    "application timeout caused pair closure",
    # NCCL: of ncclRemoteError, and of ncclInternalError where its socket says so; torch, after it has ended NCCL
    "connection closed by remote peer",
    "ncclremoteerror",
    "remote process exited",
    "nccl communicator was aborted",
    # UCX
    "connection reset by remote peer",
    # torch's store: its client, and NCCL's start by way of it
    "connection was likely closed",
    "failed to recv",
    "the client socket has timed out",
    "the client socket has failed to connect",
    "possible application crash on rank",
    # MPI
    "mpi_err_proc_failed",
    # TensorFlow of gRPC
    "errors_impl.unavailableerror",
    # Horovod, which does not say why
    "horovod has been shut down",
    # distboot: in init(), and at a key
    "error[rank-failed]",
    "ended, or closed its context",
)
# How it tells that it has waited for peers in vain: Gloo; NCCL, of which torch speaks twice; torch's store.
WAITED = ("timed out waiting", "collective operation timeout", "wait timeout after")
# What is in it where it was a process of its own that closed a connection: a worker of a data loader, for example.
_OWN_WORKER = "dataloader worker (pid"
_OWN_WORKER_FILE = "/multiprocessing/connection.py"

_JUDGED_HEAD = 4 << 20  # characters of the beginning of a message
_JUDGED_TAIL = 1 << 20  # characters of its end
_SHOWN = 1 << 16  # characters of a message that are looked at to show some of them
_MOST_LINKS = 1000  # exceptions in one chain
_DEEPEST = 20  # groups in groups
_MOST_MEMBERS = 1000  # of one group
_TYPE = 80  # characters of a type
_MESSAGE = 300  # characters of the first line
_NAME = 60  # characters of a function or file
_WIDEST = 320  # characters of a line of the excerpt
_MESSAGE_LINES = 8  # of a message in the excerpt
_MESSAGE_BYTES = 1500  # the same
_QUOTED_LINES = 3  # of these, where it quotes a traceback
_FRAMES = 24  # of a traceback in the excerpt
_LINES = 40  # of the excerpt
_ERROR_FILE_LINES = 400
_LEFT_OUT = "…"
_UNREADABLE = "<its str() failed>"
_CAUSE = "The above exception was the direct cause of the following exception:"
_CONTEXT = "During handling of the above exception, another exception occurred:"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Description:
    """Of an exception, or of the text of `sys.exit`; all parts are bounded, and without the secret."""

    def __init__(self, type_name: str, message: str, lines: list[str]) -> None:
        self.type = type_name  # with its module, as a traceback has it; of `sys.exit` it is EXIT
        self.message = message  # its first line
        self.more = 0  # other members of its group
        self.place = ""  # in the code, "load (data.py:41)"
        self.is_secondary = False
        self.has_waited = False
        self.lines = lines  # of the traceback

    @property
    def headline(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type

    def encode(self, most: int) -> bytes:
        """Seven parts, one a line, of which the excerpt has all that follow; at most so many bytes."""
        verdict = [f"{self.is_secondary:d}", f"{self.has_waited:d}", f"{self.more}"]
        parts = (self.type, self.message, self.place)
        head = [*verdict, *(_cut(escaped(part), _MESSAGE) for part in parts)]
        excerpt = [_cut(line, _WIDEST) for line in self.lines[-_LINES:]]
        is_whole = len(excerpt) == len(self.lines)
        while True:
            marked = excerpt if is_whole else [_LEFT_OUT, *excerpt]
            text = "\n".join([*head, "\n".join(marked)])
            data = text.encode(errors="replace").replace(b"\0", b"\\0")
            if len(data) <= most or not excerpt:
                return data[:most]
            del excerpt[0]
            is_whole = False


def describe_text(type_name: str, text: str, clean: Callable[[str], str] = str) -> Description:
    """The description of an end for which there is no exception to look at."""
    lines = _lines_of(text, clean)
    message = _cut(_first(lines), _MESSAGE)
    found = Description(type_name, message, _with_type(type_name, lines))
    judged = _judged(f"{type_name}: {text}")
    found.has_waited = _has_any(judged, WAITED)
    found.is_secondary = found.has_waited or _has_any(judged, GONE)
    return found


def describe(
    error: BaseException, trace: TracebackType | None, clean: Callable[[str], str] = str
) -> Description:
    """The description of an uncaught exception; `clean` takes a secret out of a text."""
    texts = _Texts()
    is_secondary = _is_secondary(error, texts)
    leaves = list(_leaves(error))
    shown = _most_telling(leaves, texts)
    shown_trace = trace
    if shown is not error:
        shown_trace = shown.__traceback__ or trace
    lines = _traceback(shown, shown_trace, texts, clean)
    message = _cut(_in_one_line(texts.message(shown), clean), _MESSAGE)
    found = Description(clean(texts.type_name(shown)), message, lines)
    found.more = len(leaves) - 1
    found.place = clean(_place(shown, shown_trace))
    found.is_secondary = is_secondary
    found.has_waited = any(_has_any(texts.judged(link), WAITED) for link in _chain(shown))
    return found


def _most_telling(leaves: list[BaseException], texts: _Texts) -> BaseException:
    """The first member of a group that does not only tell that a peer is gone."""
    for leaf in leaves:
        if not _is_secondary(leaf, texts):
            return leaf
    return leaves[0]


class _Texts:
    """Types and messages of exceptions, each read once."""

    def __init__(self) -> None:
        self._messages: dict[int, str] = {}

    def message(self, error: BaseException) -> str:
        if id(error) not in self._messages:
            self._messages[id(error)] = _message(error)
        return self._messages[id(error)]

    def judged(self, error: BaseException) -> str:
        """What an exception itself tells, with its notes, in lower case."""
        notes = " ".join(_judged(note) for note in _notes(error))
        return f"{self.type_name(error).lower()}: {_judged(self.message(error))} {notes}"

    @staticmethod
    def type_name(error: BaseException) -> str:
        kind = type(error)
        module = getattr(kind, "__module__", None)
        name = str.__str__(kind.__qualname__)
        if isinstance(module, str) and module not in ("", "builtins", "__main__"):
            name = f"{module}.{name}"
        if len(name) > _TYPE:  # the end says more
            name = _LEFT_OUT + name[1 - _TYPE :]
        return name


def _is_secondary(error: BaseException, texts: _Texts, depth: int = 0) -> bool:
    """Whether an exception, or one of those that led to it, tells that a peer is gone; of a group all members."""
    is_of_a_peer = False
    for link in _chain(error):
        members = _members(link)
        if members:
            is_of_a_peer |= depth < _DEEPEST and all(
                _is_secondary(member, texts, depth + 1) for member in members
            )
            continue
        text = texts.judged(link)
        if _OWN_WORKER in text or _passes(link.__traceback__, _OWN_WORKER_FILE):
            return False
        is_of_a_peer |= isinstance(link, ConnectionError) or _has_any(text, GONE + WAITED)
    return is_of_a_peer


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that led to it, also where `from None` hides them, each once."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left and len(seen) < _MOST_LINKS:
        link = left.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        # A group is raised from None while one of its members is handled.
        if not _members(link) or not link.__suppress_context__:
            left.append(link.__context__)
        left.append(link.__cause__)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The members of a group and of the groups in it; of any other exception itself."""
    left = [(error, 0)]
    count = 0
    while left and count < _MOST_MEMBERS:
        link, depth = left.pop()
        members = _members(link)
        if members and depth < _DEEPEST:
            left += [(member, depth + 1) for member in reversed(members)]
        else:
            count += 1
            yield link


def _members(error: BaseException) -> list[BaseException]:
    """Those of an exception group, also of the backport for Python 3.10; none of any other exception."""
    types = {kind.__name__ for kind in type(error).__mro__}
    if "BaseExceptionGroup" not in types:
        return []
    members = getattr(error, "exceptions", ())
    if not isinstance(members, (tuple, list)):
        return []
    return [one for one in members[:_MOST_MEMBERS] if isinstance(one, BaseException)]


def _message(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and isinstance(error.msg, str):
        return error.msg  # its str() adds file and line, which are the place
    return _text_of(error)


def _text_of(what: object) -> str:
    try:
        text = str(what)
        # A subclass of str may behave as it likes
        return text if type(text) is str else str.__getitem__(text, slice(_JUDGED_HEAD))
    except BaseException:  # noqa: BLE001 - whatever the script's own code raises, as `traceback` does
        return _UNREADABLE


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", None)
    if not isinstance(notes, (tuple, list)):
        return []
    return [_text_of(note) for note in notes[:_LINES]]


def _judged(text: str) -> str:
    """What of a message is judged, in lower case: not the lines of code of a traceback that it quotes."""
    if len(text) > _JUDGED_HEAD + _JUDGED_TAIL:
        text = f"{text[:_JUDGED_HEAD]}\n{text[-_JUDGED_TAIL:]}"
    text = text.lower()
    if "traceback (most recent call last)" in text:
        text = "\n".join(line for line in text.split("\n") if not line.startswith("  "))
    return text


def _has_any(text: str, phrases: Iterable[str]) -> bool:
    return any(phrase in text for phrase in phrases)


def _passes(trace: TracebackType | None, file: str) -> bool:
    """Whether an exception has come through this file."""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.replace(os.sep, "/").endswith(file):
            return True
        trace = trace.tb_next
    return False


def _place(error: BaseException, trace: TracebackType | None) -> str:
    """Where it was raised: the innermost frame of the script's own code, else the innermost one."""
    file = error.filename if isinstance(error, SyntaxError) else None
    if isinstance(file, str) and not is_of_others(file):
        return f"<module> ({_base(file)}:{error.lineno})"  # type: ignore[attr-defined]
    innermost = ""
    innermost_own = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        innermost = f"{_cut(code.co_name, _NAME)} ({_base(code.co_filename)}:{trace.tb_lineno})"
        if not is_of_others(code.co_filename):
            innermost_own = innermost
        trace = trace.tb_next
    return innermost_own or innermost


def _base(file: str) -> str:
    name = os.path.basename(file)
    return name if len(name) <= _NAME else _LEFT_OUT + name[1 - _NAME :]


def is_of_others(file: str) -> bool:
    """Whether a file with code is not the script's."""
    return (
        file.startswith("<") or any(part in file for part in OF_LIBRARIES) or is_of_distboot(file)
    )


def is_of_distboot(file: str) -> bool:
    """Whether it is one of this package, which every rank has, wherever that is."""
    _, found, path = file.rpartition("/distboot/")
    return bool(found) and os.path.isfile(os.path.join(_PACKAGE, path))


def _traceback(
    error: BaseException,
    trace: TracebackType | None,
    texts: _Texts,
    clean: Callable[[str], str],
) -> list[str]:
    """The end of what Python prints, as far as it is reported: the exceptions that led to this one come first."""
    lines: list[str] = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None:
        if id(link) in seen or len(lines) >= _ERROR_FILE_LINES:
            break
        seen.add(id(link))
        if link is not error:
            trace = link.__traceback__
        lines = _one(link, trace, texts, clean) + lines
        link, between = _led_to(link)
        if link is not None:
            lines = ["", between, "", *lines]
    return lines


def _led_to(error: BaseException) -> tuple[BaseException | None, str]:
    """The exception that a traceback shows before this one, and the line between them."""
    if error.__cause__ is not None:
        return error.__cause__, _CAUSE
    if error.__suppress_context__:
        return None, ""
    return error.__context__, _CONTEXT


def _one(
    error: BaseException,
    trace: TracebackType | None,
    texts: _Texts,
    clean: Callable[[str], str],
) -> list[str]:
    """The lines of one exception: its last frames, its type and the first lines of its message, its notes."""
    lines = _frames(trace, clean)
    if isinstance(error, SyntaxError):
        lines += _of_syntax(error, clean)
    name = texts.type_name(error)
    message = _lines_of(texts.message(error), clean)
    for note in _notes(error):
        message += _lines_of(note, clean)
    return lines + _with_type(name, message)


def _with_type(name: str, message: list[str]) -> list[str]:
    if not message:
        return [name]
    return [f"{name}: {message[0]}", *message[1:]]


def _frames(trace: TracebackType | None, clean: Callable[[str], str]) -> list[str]:
    if trace is None:
        return []
    try:
        import traceback

        text = "".join(traceback.format_tb(trace, -_FRAMES))
    except Exception:  # noqa: BLE001 - no file can be opened, or a loader of the script's modules fails
        text = "\n".join(_plain_frames(trace)[-_FRAMES:])
    return ["Traceback (most recent call last):", *clean(text).splitlines()]


def _plain_frames(trace: TracebackType | None) -> list[str]:
    found = []
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append(f'  File "{code.co_filename}", line {trace.tb_lineno}, in {code.co_name}')
        trace = trace.tb_next
    return found


def _of_syntax(error: SyntaxError, clean: Callable[[str], str]) -> list[str]:
    lines = [f'  File "{error.filename}", line {error.lineno}']
    if isinstance(error.text, str):
        lines.append(f"    {_first(_lines_of(error.text, clean)).strip()}")
    return lines


def _lines_of(text: str, clean: Callable[[str], str]) -> list[str]:
    """The first lines of a message, without empty ones before the first."""
    head = text[:_SHOWN]
    lines = clean(head).strip("\n").splitlines()
    is_cut = len(head) < len(text)
    if is_cut and len(lines) > 1:
        del lines[-1]  # it may end within a secret
    if len(lines) > _MESSAGE_LINES + 1:
        lines = _without_middle(lines, quotes=_quotes(text))
    return _of_few_bytes(lines)


def _without_middle(lines: list[str], *, quotes: bool) -> list[str]:
    """The first lines, and the last ones of a traceback that is quoted; those of a C++ stack say nothing."""
    last = []
    if quotes:
        last = lines[-_QUOTED_LINES:]
    return [*lines[: _MESSAGE_LINES - len(last)], _LEFT_OUT, *last]


def _of_few_bytes(lines: list[str]) -> list[str]:
    """Narrow lines, as many as there is room for."""
    kept: list[str] = []
    size = 0
    for whole in lines:
        line = _cut(whole, _WIDEST)
        size += len(line.encode(errors="replace"))
        if kept and size > _MESSAGE_BYTES:
            return [*kept, _LEFT_OUT]
        kept.append(line)
    return kept


def _in_one_line(message: str, clean: Callable[[str], str]) -> str:
    """The first line of a message, and of a traceback that it quotes the last one.

    "Caught ValueError in DataLoader worker process 0. … ValueError: the loss is NaN".
    """
    lines = _lines_of(message, clean)
    first = _first(lines)
    if not _quotes(message):
        return first
    last = _first(lines[::-1])
    if first.endswith(
        ":"
    ):  # "-- Process 1 terminated with the following error:", of torch.multiprocessing.spawn
        return last
    return f"{first} … {last}"


def _quotes(message: str) -> bool:
    return "Traceback (most recent call last)" in message[:_SHOWN]


def _first(lines: list[str]) -> str:
    return next((line.strip() for line in lines if line.strip()), "")


def last_line(tail: str) -> str:
    """The last line in the end of an output; of a longer one the end, as its beginning may be half a secret."""
    lines = tail.replace("\r", "\n").strip().split("\n")
    line = lines[-1].strip()
    if len(lines) == 1:
        return line[-_MESSAGE:]
    return line[:_MESSAGE]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + _LEFT_OUT


def escaped(text: str) -> str:
    """A text in one line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
