"""What a terminal shows as an SVG: monospaced lines, with the colors that its codes name."""

import re
import textwrap
from collections.abc import Iterator
from xml.sax.saxutils import escape

WIDTH = 100  # columns
_CHARACTER = 8.4  # pixels of a column, at a font size of 14
_LINE = 20  # pixels
_TOP = 56
_LEFT = 18
_COLORS = {"1;31": "#ff7b72", "33": "#e3b341", "32": "#7ee787"}
_PLAIN = "#c9d1d9"
_CODE = re.compile(r"\x1b\[([0-9;]*)m")
_TEXT = re.compile(r"<text [^>]*>(.*?)</text>")
_HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"
    font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="14">
<title>{title}</title>
<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>
<circle cx="22" cy="20" r="6" fill="#ff5f56"/>
<circle cx="42" cy="20" r="6" fill="#ffbd2e"/>
<circle cx="62" cy="20" r="6" fill="#27c93f"/>
"""


def picture(shown: str, title: str) -> str:
    """The SVG of what a terminal has shown."""
    rows = list(_rows(shown))
    width = round(2 * _LEFT + WIDTH * _CHARACTER)
    height = _TOP + _LINE * len(rows)
    parts = [_HEAD.format(width=width, height=height, title=escape(title))]
    for number, (text, color) in enumerate(rows):
        y = _TOP + _LINE * number
        preserved = 'xml:space="preserve"'
        parts.append(
            f'<text x="{_LEFT}" y="{y}" fill="{color}" {preserved}>{escape(text)}</text>\n'
        )
    return "".join([*parts, "</svg>\n"])


def lines_of(svg: str) -> list[str]:
    """The lines of a picture."""
    found = _TEXT.findall(svg)
    names = {"&lt;": "<", "&gt;": ">", "&amp;": "&"}
    return [re.sub("&[a-z]+;", lambda name: names[name[0]], text) for text in found]


def rows_of(shown: str) -> list[str]:
    """The lines of what a terminal has shown, as a picture has them."""
    return [text for text, _ in _rows(shown)]


def _rows(shown: str) -> Iterator[tuple[str, str]]:
    """Each row with its color: that of the last code before its end."""
    for line in shown.splitlines():
        codes = [code for code in _CODE.findall(line) if code in _COLORS]
        color = _COLORS[codes[0]] if codes else _PLAIN
        plain = _CODE.sub("", line)
        wrapped = textwrap.wrap(plain, WIDTH, subsequent_indent="    ", drop_whitespace=False)
        for text in wrapped or [""]:
            yield text.rstrip(), color
