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
    from typing import Any

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
# How it tells that it has waited for peers in vain.
WAITED = (
    # Gloo, and what it says of the other operations with the same peer then
    "timed out waiting",
    "application timeout caused pair closure",
    # NCCL, of which torch speaks twice
    "collective operation timeout",
    # torch's store
    "wait timeout after",
    # barrier() and main_first() of distboot itself
    "ranks arrived within",
    "did not finish its block within",
)
# What is in it where it was a process of its own that closed a connection: a worker of a data loader, for example.
_OWN_WORKER = "dataloader worker (pid"
_OWN_WORKER_FILE = "/multiprocessing/connection.py"
# Clients of services, of which an exception tells nothing about a peer: Python's, and those below `requests`,
# `huggingface_hub`, boto3 and fsspec.
_CLIENTS = (
    *("/urllib/request.py", "/http/client.py", "-packages/urllib3/"),
    *("-packages/httpcore/", "-packages/aiohttp/"),
)
_OUTPUTS = (1, 2)  # file descriptors

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
_WITHOUT_MODULE = ("", "builtins", "__main__")  # modules that a traceback does not name
_QUOTED = "Traceback (most recent call last)"
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
        if self.message:
            return f"{self.type}: {self.message}"
        return self.type

    def encode(self, most: int) -> bytes:
        """Seven parts, one a line, of which the excerpt has all that follow; at most so many bytes."""
        head = [
            f"{self.is_secondary:d}",
            f"{self.has_waited:d}",
            f"{self.more}",
        ]
        for part in (self.type, self.message, self.place):
            one_line = escaped(part)
            head.append(_cut(one_line, _MESSAGE))
        excerpt = [_cut(line, _WIDEST) for line in self.lines[-_LINES:]]
        mark = []
        if len(excerpt) < len(self.lines):
            mark = [_LEFT_OUT]
        data = _joined(head, mark + excerpt)
        while len(data) > most and excerpt:
            del excerpt[0]
            mark = [_LEFT_OUT]
            data = _joined(head, mark + excerpt)
        return data[:most]


def _joined(head: list[str], excerpt: list[str]) -> bytes:
    """All parts of a description in the form in which they are sent."""
    last = "\n".join(excerpt)
    text = "\n".join([*head, last])
    data = text.encode(errors="replace")
    return data.replace(b"\0", b"\\0")


def describe_text(type_name: str, text: str, clean: Callable[[str], str] = str) -> Description:
    """The description of an end for which there is no exception to look at."""
    lines = _lines_of(text, clean)
    message = _cut(_first(lines), _MESSAGE)
    found = Description(
        type_name,
        message,
        _with_type(type_name, lines),
    )
    judged = _judged(f"{type_name}: {text}")
    found.has_waited = _has_any(judged, WAITED)
    found.is_secondary = _has_any(judged, GONE + WAITED)
    return found


def describe(
    error: BaseException, trace: TracebackType | None, clean: Callable[[str], str] = str
) -> Description:
    """The description of an uncaught exception; `clean` takes a secret out of a text."""
    texts = _Texts()
    is_secondary = _is_secondary(error, texts)
    leaves = list(_leaves(error))
    shown = _most_telling(leaves, texts)
    if shown is not error and shown.__traceback__ is not None:
        trace = shown.__traceback__
    type_name = texts.type_name(shown)
    message = _with_cause(shown, texts, clean)
    place = _place(shown, trace)
    found = Description(
        clean(type_name),
        _cut(message, _MESSAGE),
        _traceback(shown, trace, texts, clean),
    )
    found.more = len(leaves) - 1
    found.place = clean(place)
    found.is_secondary = is_secondary
    for link in chain(shown):
        judged = texts.judged(link)
        found.has_waited |= _has_any(judged, WAITED)
    return found


def _with_cause(error: BaseException, texts: _Texts, clean: Callable[[str], str]) -> str:
    """The first line of a message, and of the exception from which it was raised in the end.

    "DataLoader worker (pid 7) exited unexpectedly (caused by RuntimeError: … killed by signal)".
    """
    message = _in_one_line(texts.message(error), clean)
    cause = _first_cause(error)
    if cause is None:
        return message
    said = _in_one_line(texts.message(cause), clean)
    if said in message:
        return message
    type_name = clean(texts.type_name(cause))
    return f"{message} (caused by {type_name}: {said})".lstrip()


def _first_cause(error: BaseException) -> BaseException | None:
    """What all others were raised from, with `raise … from`; None: it was raised from nothing."""
    found = None
    seen = {id(error)}
    link = error.__cause__
    while link is not None and id(link) not in seen and len(seen) <= _MOST_LINKS:
        seen.add(id(link))
        found = link
        link = link.__cause__
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
        key = id(error)
        if key not in self._messages:
            self._messages[key] = _message(error)
        return self._messages[key]

    def judged(self, error: BaseException) -> str:
        """What an exception itself tells, with its notes, in lower case."""
        type_name = self.type_name(error)
        message = self.message(error)
        parts = [
            f"{type_name.lower()}:",
            _judged(message),
            *map(_judged, _notes(error)),
        ]
        return " ".join(parts)

    @staticmethod
    def type_name(error: BaseException) -> str:
        kind = type(error)
        module = getattr(kind, "__module__", None)
        name = str.__str__(kind.__qualname__)
        is_named = isinstance(module, str)
        if is_named and module not in _WITHOUT_MODULE:
            name = f"{module}.{name}"
        return _end_of(name, _TYPE)


def _is_secondary(
    error: BaseException,
    texts: _Texts,
    depth: int = 0,  # of groups around it
) -> bool:
    """Whether an exception, or one of those that led to it, tells that a peer is gone.

    Of a group all members have to.
    """
    is_of_a_peer = False
    links = list(chain(error))
    of_services = _said_by_services(links, texts)
    for link in links:
        members = _members(link)
        if members:
            is_of_a_peer |= _are_secondary(members, texts, depth + 1)
            continue
        text = texts.judged(link)
        is_of_worker = _OWN_WORKER in text
        is_of_worker |= _passes(link.__traceback__, _OWN_WORKER_FILE)
        if is_of_worker:
            return False
        is_of_none = _passes(link.__traceback__, *_CLIENTS)
        is_of_none |= _is_of_output(link)
        if is_of_none:
            continue
        for quoted in of_services:
            text = text.replace(quoted, "")
        is_of_a_peer |= isinstance(link, ConnectionError)
        is_of_a_peer |= _has_any(text, GONE + WAITED)
    return is_of_a_peer


def _said_by_services(links: list[BaseException], texts: _Texts) -> list[str]:
    """What clients of services say as if a peer were gone; other exceptions may quote it."""
    found = []
    for link in links:
        if not _passes(link.__traceback__, *_CLIENTS):
            continue
        said = _judged(texts.message(link))
        if _has_any(said, GONE + WAITED):
            found.append(said)
    return found


def _is_of_output(error: BaseException) -> bool:
    """Whether nothing reads what this process prints any more, as after `train.py | head`."""
    if not isinstance(error, BrokenPipeError):
        return False
    try:
        import select

        poll = select.poll()
        for file in _OUTPUTS:
            poll.register(file, 0)
        events = poll.poll(0)
    except (ImportError, OSError):  # no file can be opened any more
        return False
    return any(event & select.POLLERR for _, event in events)


def _are_secondary(members: list[BaseException], texts: _Texts, depth: int) -> bool:
    if depth > _DEEPEST:
        return False
    return all(_is_secondary(member, texts, depth) for member in members)


def chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that led to it, also where `from None` hides them, each once."""
    seen = {id(None)}
    left: list[Any] = [error]
    while left and len(seen) <= _MOST_LINKS:
        link = left.pop()
        key = id(link)
        if key in seen:
            continue
        seen.add(key)
        yield link
        is_group = bool(_members(link))
        # A group is raised from None while one of its members is handled.
        if not (is_group and link.__suppress_context__):
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
    items = _items(error, "exceptions", _MOST_MEMBERS)
    members: list[Any] = list(filter(lambda item: isinstance(item, BaseException), items))
    return members


def _items(error: BaseException, name: str, most: int) -> list[object]:
    """An attribute that should be a list or a tuple, and may be anything."""
    items = getattr(error, name, ())
    if isinstance(items, (tuple, list)):
        return list(items[:most])
    return []


def _message(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        message = error.msg  # its str() adds file and line, which are the place
        if isinstance(message, str):
            return message
    return _text_of(error)


def _text_of(what: object) -> str:
    try:
        whole = slice(None)
        text = str.__getitem__(str(what), whole)  # a subclass of str may behave as it likes
    except BaseException:  # noqa: BLE001 - the script's own code may raise anything
        return _UNREADABLE
    return text


def _notes(error: BaseException) -> list[str]:
    notes = _items(error, "__notes__", _LINES)
    return list(map(_text_of, notes))


def _judged(text: str) -> str:
    """The part of a message that is judged, in lower case.

    It is without the lines of code of a traceback that the message quotes.
    """
    if len(text) > _JUDGED_HEAD + _JUDGED_TAIL:
        head = text[:_JUDGED_HEAD]
        tail = text[-_JUDGED_TAIL:]
        text = f"{head}\n{tail}"
    text = text.lower()
    if _QUOTED.lower() not in text:
        return text
    kept = filter(lambda line: not line.startswith("  "), text.split("\n"))
    return "\n".join(kept)


def _has_any(text: str, phrases: Iterable[str]) -> bool:
    return any(phrase in text for phrase in phrases)


def speaks_of_peer(text: str) -> bool:
    """Whether an exception with this text tells that a peer is gone, or did not answer."""
    return _has_any(text.lower(), GONE + WAITED)


def _passes(trace: TracebackType | None, *files: str) -> bool:
    """Whether an exception has come through one of these files or folders."""
    for frame in _frames_of(trace):
        name = frame.tb_frame.f_code.co_filename
        if _has_any(name, files):
            return True
    return False


def _frames_of(trace: TracebackType | None) -> Iterator[TracebackType]:
    """The frames of a traceback, from the outermost in."""
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _place(error: BaseException, trace: TracebackType | None) -> str:
    """Where it was raised: the innermost frame of the script's own code, else the innermost one."""
    if isinstance(error, SyntaxError):
        file = error.filename
        if isinstance(file, str) and not is_of_others(file):
            name = os.path.basename(file)
            name = _end_of(name, _NAME)
            return f"<module> ({name}:{error.lineno})"
    innermost = ""
    innermost_own = ""
    for frame in _frames_of(trace):
        code = frame.tb_frame.f_code
        function = _cut(code.co_name, _NAME)
        name = os.path.basename(code.co_filename)
        name = _end_of(name, _NAME)
        innermost = f"{function} ({name}:{frame.tb_lineno})"
        if not is_of_others(code.co_filename):
            innermost_own = innermost
    return innermost_own or innermost


def is_of_others(file: str) -> bool:
    """Whether a file with code is not the script's."""
    if file.startswith("<"):
        return True
    return _has_any(file, OF_LIBRARIES) or is_of_distboot(file)


def is_of_distboot(file: str) -> bool:
    """Whether it is one of this package, which every rank has, wherever that is."""
    _, found, path = file.rpartition("/distboot/")
    own = os.path.join(_PACKAGE, path)
    return bool(found) and os.path.isfile(own)


def _traceback(
    error: BaseException,
    trace: TracebackType | None,
    texts: _Texts,
    clean: Callable[[str], str],
) -> list[str]:
    """The end of what Python prints, as far as it is reported.

    The exceptions that led to this one come first.
    """
    lines = _one(error, trace, texts, clean)
    seen = {id(error)}
    link, between = _led_to(error)
    while link is not None:
        lines = ["", between, "", *lines]
        if id(link) in seen or len(lines) >= _ERROR_FILE_LINES:
            break
        seen.add(id(link))
        before = _one(
            link,
            link.__traceback__,
            texts,
            clean,
        )
        lines = [*before, *lines]
        link, between = _led_to(link)
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
    """The last frames of one exception, its type, the first lines of its message, and its notes."""
    lines = _frames(trace, clean)
    if isinstance(error, SyntaxError):
        lines += _of_syntax(error, clean)
    message = []
    for text in (texts.message(error), *_notes(error)):
        message += _lines_of(text, clean)
    name = texts.type_name(error)
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

        frames = traceback.format_tb(trace, -_FRAMES)
    except Exception:  # noqa: BLE001 - no file can be opened, or a loader of modules fails
        frames = list(map(_plain_frame, _frames_of(trace)))
    text = "".join(frames[-_FRAMES:])
    return [f"{_QUOTED}:", *clean(text).splitlines()]


def _plain_frame(frame: TracebackType) -> str:
    code = frame.tb_frame.f_code
    return f'  File "{code.co_filename}", line {frame.tb_lineno}, in {code.co_name}\n'


def _of_syntax(error: SyntaxError, clean: Callable[[str], str]) -> list[str]:
    lines = [f'  File "{error.filename}", line {error.lineno}']
    if isinstance(error.text, str):
        code = _lines_of(error.text, clean)
        lines.append(f"    {_first(code)}")
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
    """The first lines, and the last ones of a traceback that is quoted, but not of a C++ stack."""
    last = []
    if quotes:
        last = lines[-_QUOTED_LINES:]
    first = lines[: _MESSAGE_LINES - len(last)]
    return [*first, _LEFT_OUT, *last]


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
    """The first line of a message, and the next one if that is what it announces with a colon.

    Of a traceback that it quotes, the last one: "Caught ValueError in DataLoader worker process 0.
    … ValueError: the loss is NaN".
    """
    lines = _lines_of(message, clean)
    if not _quotes(message):
        return _with_announced(lines)
    first = _first(lines)
    last = _quoted_last(lines)
    # "-- Process 1 terminated with the following error:", of torch.multiprocessing.spawn
    if first.endswith(":"):
        return last
    return f"{first} … {last}"


def _with_announced(lines: list[str]) -> str:
    """The first line, and the second one if that is what it announces.

    "Error(s) in loading state_dict for Net: size mismatch for head.weight: …".
    """
    stripped = map(str.strip, lines)
    told = list(filter(None, stripped))
    first = told[:1]
    if first and first[0].endswith(":"):
        return " ".join(told[:2])
    return "".join(first)


def _quotes(message: str) -> bool:
    return _QUOTED in message[:_SHOWN]


def _quoted_last(lines: list[str]) -> str:
    """The last exception in a quoted traceback: its first line, below the frames."""
    text = "\n".join(lines)
    before, _, quoted = text.rpartition(_QUOTED)
    prefix = before.rpartition("\n")[2]  # "[rank1]: ", for example
    _, _, last_frame = quoted.rpartition('  File "')
    below = [line.removeprefix(prefix) for line in last_frame.split("\n")[1:]]
    for number, line in enumerate(below):
        if line[:1] not in ("", " ", _LEFT_OUT):
            return _with_announced(below[number:])
    return _first(lines[::-1])


def _first(lines: list[str]) -> str:
    """The first line that is not empty."""
    stripped = map(str.strip, lines)
    return next(filter(None, stripped), "")


def last_line(tail: str) -> str:
    """The last line in the end of an output.

    Of a line that began before, the end: its beginning here may be half a secret.
    """
    lines = tail.replace("\r", "\n").strip().split("\n")
    line = lines[-1].strip()
    if len(lines) == 1:
        return line[-_MESSAGE:]
    return _cut(line, _MESSAGE)


def _cut(text: str, most: int) -> str:
    if len(text) > most:
        text = text[: most - 1] + _LEFT_OUT
    return text


def _end_of(text: str, most: int) -> str:
    """The end of a text, which says more than its beginning."""
    if len(text) > most:
        text = _LEFT_OUT + text[1 - most :]
    return text


def escaped(text: str) -> str:
    """A text in one line."""
    if text.isprintable():
        return text
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    return ascii(character)[1:-1]
