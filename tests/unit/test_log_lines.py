"""`PrefixedLines`: what a console that several ranks share shows of one stream, as tables of bytes and times."""

import os

import pytest

from distboot.agent.log_lines import BAR_INTERVAL, PrefixedLines
from distboot.agent.log_stream import LogStream
from distboot.base.text import log_line

# What a rank writes, and when, with what is shown after each piece. `None`: the stream ends.
Piece = tuple[float, bytes | None, bytes]

TQDM = b"\r 30%|###       | 3/10"
CASES: dict[str, list[Piece]] = {
    "a line": [(0.0, b"loss 0.1\n", b"> loss 0.1\n"), (0.0, None, b"")],
    "an empty line": [(0.0, b"\n", b"> \n")],
    "the end of a line on Windows": [(0.0, b"a\r\nb\r\n", b"> a\r\n> b\r\n")],
    "the same in two pieces": [(0.0, b"a\r", b""), (0.0, b"\nb\n", b"> a\r\n> b\n")],
    "a prompt and its answer": [(0.0, b"name? ", b"> name? "), (1.0, b"hello\n", b"hello\n")],
    "a bar that ends with a newline": [
        (0.0, b"\r 0%", b""),
        (0.1, b"\r50%", b""),
        (0.2, b"\r100%\n", b"> 100%\n"),
    ],
    "a bar whose states end with a return": [
        (0.0, b"10%\r", b""),
        (0.1, b"20%\r", b""),
        (0.2, b"\n", b"> 20%\r\n"),
    ],
    "a bar and then a line": [(0.0, TQDM, b""), (0.1, b"\rdone\n", b"> done\n")],
    "a bar at the end of the stream": [(0.0, TQDM, b""), (0.1, None, b"> " + TQDM[1:] + b"\n")],
    "a bar that moves for long": [
        (0.0, b"\r 1%", b""),
        (BAR_INTERVAL - 1, b"\r 9%", b""),
        (BAR_INTERVAL, b"\r10%", b"> 10%\n"),
        (BAR_INTERVAL + 1, b"\r11%", b""),
        (2 * BAR_INTERVAL + 1, b"\r20%", b"> 20%\n"),
        (2 * BAR_INTERVAL + 2, b"\n", b""),
    ],
    "a bar that is wiped away": [
        (0.0, b"\r 1%", b""),
        (BAR_INTERVAL, b"\r10%", b"> 10%\n"),
        (BAR_INTERVAL, b"\r    \r", b""),
        (BAR_INTERVAL, b"epoch 2\n", b"> epoch 2\n"),
    ],
    "a bar after a prompt": [(0.0, b"name? ", b"> name? "), (0.0, b"\r5%\n", b"\n> 5%\n")],
}


@pytest.mark.parametrize("pieces", CASES.values(), ids=CASES)
def test_console_shows(pieces: list[Piece]) -> None:
    lines = PrefixedLines(b"> ")
    for at, data, shown in pieces:
        assert (lines.close() if data is None else lines.feed(data, at)) == shown


def test_bar_that_stops_moving_is_shown_once() -> None:
    lines = PrefixedLines(b"> ")
    assert lines.feed(TQDM, 5.0) == b""
    assert lines.due == 5.0 + BAR_INTERVAL
    assert lines.release(lines.due) == b"> " + TQDM[1:] + b"\n"
    assert lines.release(1e9) == b""
    assert lines.close() == b""


def test_returns_without_end_keep_one_state() -> None:
    lines = PrefixedLines(b"> ")
    for _ in range(1000):
        assert lines.feed(b"\rx" * 5000 + b"y" * 5000, 0.0) == b""
    assert len(lines.close()) < 5000


def test_line_of_another_thread_begins_anew(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = LogStream("stderr", 2, b"", None, None)
    write = os.write

    def then_print_a_line(file: int, data: bytes) -> int:
        """As another thread may, between the write and what follows it."""
        written = write(file, data)
        if data == b"loading":
            log_line(None, "a line")
        return written

    monkeypatch.setattr(os, "write", then_print_a_line)
    write(stream.theirs, b"loading")
    os.close(stream.theirs)
    stream.work(lambda: None)
    assert capfd.readouterr().err == "loading\ndistboot: a line\n"
