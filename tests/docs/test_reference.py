"""The reference says what the code says: every table, every code, every variable, every name of the public API."""

import ast
import inspect
import itertools
import re
from functools import cache
from pathlib import Path

import pytest
from conftest import PACKAGE, ROOT
from inside import CODES
from pages import load

import distboot

REFERENCE = ROOT / "docs" / "reference"
TEXTS = Path(__file__).parents[1] / "error_texts"
ERRORS = (REFERENCE / "errors.md").read_text()
ENVIRONMENT = (REFERENCE / "environment.md").read_text()
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Strings that look like the name of an environment variable, and are something else.
NO_VARIABLES = {
    **{
        f"HOROVOD_WITH_{name}": "a flag of its build"
        for name in ("GLOO", "MPI", "PYTORCH", "TENSORFLOW")
    },
    "TYPE_CHECKING": "a condition in scripts, of typing",
    "THREAD_": "the beginning of MPI's levels of threading",
    "MASTER_": "the beginning of a line in a message",
    "HOROVOD_": "the beginning of a name whose end is a number's",
    **dict.fromkeys(("PMI_", "PMIX_"), "the beginning of names in slurm.py"),
    **dict.fromkeys(("INIT_METHOD", "DIST_URL"), "the end of a name in signs.py"),
    **dict.fromkeys(("NUM_", "TOTAL_", "RANK_"), "a part of a name in signs.py"),
    **dict.fromkeys(("SC_CLK_TCK", "SC_OPEN_MAX"), "a name of sysconf(3)"),
}


PYTHON_PAGE = load(ROOT / "docs" / "python_page.py")  # which the next one imports
WRITER = load(ROOT / "docs" / "tables.py")


@cache
def _in_code() -> dict[str, str]:
    """The names that look like those of environment variables, each with a file that has it."""
    return {name: path.name for path in SOURCES for name in WRITER.variables(path)}


def _words(text: str) -> str:
    """Without line ends: where argparse breaks a line depends on the version of Python."""
    return " ".join(text.split())


@pytest.mark.parametrize("page", sorted(REFERENCE.glob("*.md")), ids=lambda page: page.stem)
def test_page_is_as_written_from_the_code(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text()
    own = [name for name in WRITER.TABLES if f"<!-- {name}: written by" in text]
    monkeypatch.setattr(WRITER, "TABLES", {name: WRITER.TABLES[name] for name in own})
    assert _words(WRITER.rendered(text)) == _words(text), "run `make docs`"


def test_everything_that_is_written_has_its_page() -> None:
    begun = re.findall(
        r"<!-- (.*?): written by", "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
    )
    assert set(begun) == WRITER.TABLES.keys()


def test_every_variable_is_in_code_and_page() -> None:
    named = {
        name.rstrip("…*") for name in re.findall(r"`([A-Za-z0-9_…*]+)(?:=[^`]*)?`", ENVIRONMENT)
    }
    missing = {
        name: file
        for name, file in _in_code().items()
        if name not in named and name not in NO_VARIABLES
    }
    assert missing == {}, "say on docs/reference/environment.md what they are for"
    assert NO_VARIABLES.keys() <= _in_code().keys(), "an excuse for what is no longer there"
    on_page = set(re.findall(r"`([A-Z]+_[A-Z0-9_]+)(?:=[^`]*)?`", ENVIRONMENT))
    never_read = {"OMPI_COMM_WORLD_NODE_RANK", "SLURM_JOB_NODELIST"}
    assert on_page - never_read - _in_code().keys() == {"MPISPAWN_MPIRUN_RANK_0"}, (
        "which goes on with the local rank"
    )
    settings = {name for name in _in_code() if name.startswith("DISTBOOT_")}
    assert (
        set(re.findall(r"^\| `(DISTBOOT_[A-Z_]+)` \| .* \| .*\|$", ENVIRONMENT, re.MULTILINE))
        >= settings
    )


def test_every_public_name_is_on_the_page() -> None:
    page = (REFERENCE / "api.md").read_text()
    shown = set(re.findall(r"^## distboot\.(\S+)$", page, re.MULTILINE))
    names = set(distboot.__all__) - {"__version__"}
    assert shown == names | {"lightning.DistbootEnvironment"}


def test_every_part_of_a_signature_is_documented() -> None:
    """Else an editor shows an argument or an attribute without a word."""
    methods = [member for _, member in inspect.getmembers(distboot.Context, inspect.isfunction)]
    public = [member for member in methods if not member.__name__.startswith("_")]
    for function in (*PYTHON_PAGE.FUNCTIONS, *public):
        documented = dict(PYTHON_PAGE.parsed(function).sections.get("Args", ()))
        arguments = set(inspect.signature(function).parameters) - {"self"}
        assert documented.keys() == arguments, function
    for kind in (distboot.Context, distboot.Placement):
        documented = dict(PYTHON_PAGE.parsed(kind).sections["Attributes"])
        fields = {name for name in kind.__annotations__ if not name.startswith("_")}
        assert documented.keys() == fields, kind


def test_every_folder_is_on_the_architecture_page() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    floors = page.partition("## The floors")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)/?` \|", floors, re.MULTILINE)
    parts = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in SOURCES}
    assert sorted(rows) == sorted(part for part in parts if not part.startswith("__"))


def test_modules_of_the_architecture_page_exist() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    folders = "|".join(path.name for path in PACKAGE.iterdir() if path.is_dir())
    named = set(re.findall(rf"`((?:{folders})/[a-z0-9_/]*)`", page))
    modules = {str(path.relative_to(PACKAGE).with_suffix("")) for path in SOURCES}
    lost = [name for name in named - modules if not (PACKAGE / name).is_dir()]
    assert sorted(lost) == []
    assert len(named) > 50


def test_every_code_is_raised_and_has_its_section() -> None:
    source = re.sub(
        r"CODES: .*?\n}\n", "", "\n".join(path.read_text() for path in SOURCES), flags=re.DOTALL
    )
    assert [code for code in CODES if f'"{code}"' not in source] == []
    assert re.findall(r"^## (.*)$", ERRORS, re.MULTILINE) == list(CODES)
    for code in CODES:
        section = ERRORS.partition(f"\n## {code}\n")[2].partition("\n## ")[0]
        parts = (f"distboot: error[{code}]: ", "**Cause.** ", "**Remedy.** ")
        assert [part for part in parts if part not in section] == [], code


Texts = list[tuple[re.Pattern[str], str]]


@pytest.fixture(scope="module")
def texts() -> Texts:
    """What each text in the source can be, if it has words of its own; and the source that it is in."""
    found = []
    for source in (path.read_text() for path in SOURCES):
        patterns = {
            _pattern(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.expr)
        }
        patterns = {
            one
            for one in patterns
            if sum(map(str.islower, one)) >= 10 and not re.fullmatch(one, "x y")
        }
        found += [(re.compile(one), source) for one in patterns]
    return found


EXAMPLES = re.findall(r"```text\n(distboot: error\[.*?)```", ERRORS, re.DOTALL)


@pytest.mark.parametrize(
    "example", EXAMPLES, ids=lambda example: example.partition("]")[0].partition("[")[2]
)
def test_example_is_what_distboot_says(example: str, texts: Texts) -> None:
    """Word for word one of `error_texts/`, or a message and a hint that can be texts of the source."""
    golden = [path.read_text().rpartition("exit code ")[0] for path in TEXTS.iterdir()]
    if re.sub(r" on [\w-]+: ", " on HOST: ", example) in golden:
        return
    code = example.partition("error[")[2].partition("]")[0]
    whose = re.compile(r"(?:rank|node) [0-9?]+ on [\w-]+: (?:rank 0 says: )?")
    first, *rest = example.rstrip("\n").split("\n")
    # Of the driver
    said = [whose.sub("", first.partition("]: ")[2], count=1)] if code != "device-failed" else []
    said += [whose.sub("", rest[-1].removeprefix("distboot: hint: "), count=1)] if rest else []
    found = {
        text: [source for pattern, source in texts if pattern.fullmatch(text)] for text in said
    }
    assert all(found.values()), "not said in the source"
    assert f'"{code}"' in "".join(itertools.chain(*found.values())), "said of other errors"


def _pattern(node: ast.expr) -> str:
    """What the text of an expression can be, as a pattern; a value in it can be anything."""
    if isinstance(node, ast.Constant):
        return re.escape(str(node.value))
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_pattern, node.values))
    if isinstance(node, ast.BinOp):
        return _pattern(node.left) + _pattern(node.right)
    if isinstance(node, ast.IfExp):
        return f"(?:{_pattern(node.body)}|{_pattern(node.orelse)})"
    return ".*"
