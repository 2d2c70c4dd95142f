"""The pages as such: blocks of code are of a kind that a test knows, what is quoted is really said, README.md is short.

Which blocks are run, and how, is in test_docs_console.py, test_docs_python.py and test_docs_yaml.py. Links between the
pages are checked by `make docs`, which makes every warning of MkDocs an error.
"""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest
from conftest import PACKAGE, ROOT
from inside import CODES
from pages import PAGES, Block, blocks, load

# Console, Python and most YAML are run, or fed to what reads it; of a text the lines are looked for in the code, here.
KINDS = {"console", "python", "yaml", "json", "bash", "dockerfile", "text"}
# Texts that are not distboot's own lines, by page and first line.
HOSTS = "        rank 0's host                           another host"
LATE = (
    "distboot: rank 0 on node-0: waiting for rank 3 (node-1) for 60 s: it is in load_batch (data.py:41); "
    "ranks 0-2 wait in all_reduce (train.py:84), collective operation 1,968, rank 3 has begun 1,967"
)
CHECK = "distboot: rank 0 on node-0: warning: node-2: 1.1 Gbit/s to node-3, median of the others 94 Gbit/s"
DEMO = "     launcher                           ranks     loss  accuracy  seconds"
OTHER_TEXTS = {
    ("README.md", DEMO): "what the demonstration ends with: below",
    (
        "docs/how-to/infiniband.md",
        "NCCL_IB_PCI_RELAXED_ORDERING=1",
    ): "NCCL's own file, from Azure/azhpc-images",
    (
        "docs/how-to/late-ranks.md",
        LATE,
    ): "values for the most part: test_late.py has all of its words",
    (
        "docs/how-to/check-a-cluster.md",
        CHECK,
    ): "values for the most part: test_node_check.py has all of its words",
    ("docs/explanation/failure-detection.md", HOSTS): "a drawing",
}
# Pages whose texts test_reference.py compares with the code, word for word.
IN_FULL = ("docs/reference/cli.md", "docs/reference/errors.md")
# Quoted in docs/troubleshooting.md, and looked for in the libraries of the torch that is installed.
OF_TORCH = (
    "clients joined.",
    "The client socket has timed out after ",
    "The server socket has failed to listen on any local network address",
    "Gloo connectFullMesh failed with ",
    "Unable to resolve hostname to a (local) address. ",
    "Using the loopback address as fallback. ",
    "Connection closed by peer ",
    "is killed by signal: ",
    "It is possible that dataloader's workers are out of shared memory.",
)
OF_TORCHS_PYTHON = (
    "expected, but not set",
    "trying to initialize the default process group twice!",
    "Distributed package doesn't have NCCL built in",
    "Setting OMP_NUM_THREADS environment variable for each process to be ",
)


def test_every_block_is_of_a_known_kind() -> None:
    assert [
        f"{block}: {block.language or 'none'}" for block in blocks() if block.language not in KINDS
    ] == []
    assert len(blocks()) > 100


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    docs = ROOT / "docs"
    assert [
        path.name for path in docs.rglob("*.md") if f": {path.relative_to(docs)}\n" not in menu
    ] == []


@cache
def _pieces() -> tuple[str, ...]:
    """All strings in the code, cut where a value stands, the longest first; short ones say nothing."""
    nodes = [
        node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
    ]
    texts = [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    found = {piece for text in texts for piece in text.splitlines()}
    return tuple(sorted((piece for piece in found if len(piece) > 3), key=len, reverse=True))


def _said_by_the_code(line: str) -> float:
    """How much of a line the code has, from 0 to 1; the rest are values."""
    rest = line
    known = 0
    for piece in _pieces():
        while piece in rest:
            rest = rest.replace(piece, "\0", 1)
            known += len(piece)
    return known / len(line)


_LINE = re.compile(
    r"distboot: (error\[(?P<code>[\w-]+)\]: |hint: )?(rank \S+ on \S+: )?(?P<message>.*)"
)


@pytest.mark.parametrize("block", blocks("text"), ids=str)
def test_text_is_really_said(block: Block) -> None:
    if (block.page, block.first) in OTHER_TEXTS or block.page in IN_FULL:
        return
    for line in block.text.splitlines():
        said = _LINE.match(line)
        if said is None:
            assert line.startswith("  | "), (
                f"{block}: neither distboot's nor in OTHER_TEXTS: {line}"
            )
            continue
        assert said["code"] in (None, *CODES)
        assert _said_by_the_code(said["message"]) > 0.55, f"{block}: the code does not say: {line}"


def test_table_names_only_what_is_there() -> None:
    assert set(OTHER_TEXTS) <= {(block.page, block.first) for block in blocks("text")}


@pytest.mark.all
def test_demonstration_ends_with_this_table(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    (shown,) = [block.text for block in blocks("text") if block.first == DEMO]
    demo = load(ROOT / "examples" / "demo.py")
    rows = list(demo.all_rows([]))
    for row, line in zip(rows, shown.splitlines()[1:], strict=False):
        row.loss = 0.11837
        row.accuracy = 0.972
        row.seconds = float(line.split()[-1])
    assert demo.report(rows) == 0
    assert capsys.readouterr().out.strip("\n") == shown.strip("\n")


def test_troubleshooting_quotes_torch() -> None:
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        pytest.skip("torch is not installed")
    page = " ".join((ROOT / "docs" / "troubleshooting.md").read_text().split())
    folder = Path(torch.origin).parent
    libraries = [
        (folder / "lib" / f"lib{name}.so").read_bytes() for name in ("torch_cpu", "torch_python")
    ]
    modules = ["distributed/rendezvous.py", "distributed/distributed_c10d.py", "distributed/run.py"]
    python = "".join((folder / module).read_text() for module in modules)
    assert [
        text for text in OF_TORCH if not any(text.encode() in library for library in libraries)
    ] == []
    assert [text for text in OF_TORCHS_PYTHON if text not in python] == []
    assert [text for text in (*OF_TORCH, *OF_TORCHS_PYTHON) if text.strip() not in page] == []


def _tables_of_texts() -> list[list[list[str]]]:
    """The rows of the two tables of distboot's own texts, cell by cell."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    found = []
    for heading in ("## Errors of distboot\n", "## Other texts of distboot\n"):
        section = page.partition(heading)[2].partition("\n## ")[0]
        lines = [line for line in section.splitlines() if line.startswith("| ")]
        found.append([line.strip("| ").split(" | ") for line in lines[1:]])
    return found


def test_troubleshooting_has_every_code_and_its_texts() -> None:
    errors, others = _tables_of_texts()
    codes = [re.match(r"\[`([\w-]+)`\]\(reference/errors\.md#\1\)$", row[0]) for row in errors]
    assert [code and code[1] for code in codes] == sorted(CODES)
    quoted = " ".join([*(row[1] for row in errors), *(row[0] for row in others)])
    texts = re.findall(r"`([^`]+)`", quoted)
    assert len(texts) > 60
    code = "\0".join(_pieces())
    assert [text for text in texts if text not in code] == []


def test_troubleshooting_is_in_alphabetical_order() -> None:
    def key(text: str) -> str:
        return re.sub("[`…]", "", text).lower()

    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    of_others, without = (
        re.findall("^### (.*)$", page.partition(heading)[2].partition("\n## ")[0], re.MULTILINE)
        for heading in ("## Texts of other programs\n", "## Without a text\n")
    )
    assert len(of_others) > 20
    for headings in (of_others, without, [row[0] for row in _tables_of_texts()[1]]):
        assert headings == sorted(headings, key=key)


def test_codes_and_variables_in_the_pages_exist() -> None:
    known = set(
        re.findall(
            r"`(DISTBOOT_[A-Z_]+)", (ROOT / "docs" / "reference" / "environment.md").read_text()
        )
    )
    for path in PAGES:
        text = path.read_text()
        assert {*re.findall(r"error\[([\w-]+)\]", text)} <= {*CODES, "code"}, path
        variables = {
            name
            for name in re.findall(r"\bDISTBOOT_[A-Z_]+[A-Z]", text)
            if "DISTBOOT_WRITE_" not in name
        }
        assert variables <= known, path


README = (ROOT / "README.md").read_text()
LINKS = re.findall(r"\]\((?!https?://)([^)#\s]+)\)", README)


@pytest.mark.parametrize("link", dict.fromkeys(LINKS))
def test_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).is_file()


def test_readme_opens_with_problem_picture_line_and_decisions() -> None:
    opening = README.partition("\n## Try it")[0]
    wanted = (
        "N processes on M machines",
        "(docs/pictures/hang.svg)",
        "distboot.init()",
        "| instead of |",
        "| maturity |",
        "| what it costs |",
        "(docs/pictures/report.png)",
    )
    assert (places := [opening.index(text) for text in wanted]) == sorted(places)
    assert len(README.splitlines()) <= 160


def test_tables_of_the_code_are_in_the_reference() -> None:
    assert "written by `make docs`" not in README
    assert not re.search(r"^\| `DISTBOOT_", README, re.MULTILINE)
    assert not any(f"| `{code}` |" in README for code in CODES)


_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")


@cache
def _anchors(page: Path) -> set[str]:
    """The anchors of a page: its own, and of headings those that a repository's pages make."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    of_headings = {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}
    return of_headings | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    for path, anchor in _LINK.findall(page.read_text()):
        target = page.parent / path if path else page
        assert target.exists(), path
        if anchor:
            assert anchor in _anchors(target.resolve()), f"{path}#{anchor}"


def test_glossary_is_in_order_and_linked() -> None:
    glossary = (ROOT / "docs" / "reference" / "glossary.md").read_text()
    words = re.findall(r"^## (.*)$", glossary, re.MULTILINE)
    assert words == sorted(words)
    for page in ("explanation/architecture.md", "how-to/late-ranks.md", "how-to/restarts.md"):
        assert "reference/glossary.md#" in (ROOT / "docs" / page).read_text(), page
