"""The table of dependencies in CONTRIBUTING.md has all of them, each with the licence that it states itself."""

from __future__ import annotations

import re
from importlib import metadata

import pytest
from conftest import ROOT

# What packages without a License-Expression (PEP 639) call it, in `License` or in a classifier.
_SPDX = {
    "Apache": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "Apache Software License 2.0": "Apache-2.0",
}


def _table() -> dict[str, str]:
    """Name of a package -> its licence; without the rows of Debian's packages."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("\n| package | licence | for |\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in text.splitlines()[1:]]
    return {name: licence for names, licence in rows if "(Debian)" not in names for name in names.split(", ")}


def _used() -> set[str]:
    """All that pyproject.toml and the Makefile install."""
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*pyproject["build-system"]["requires"], *pyproject["project"]["dependencies"]]
    needed += [each for extra in pyproject["project"]["optional-dependencies"].values() for each in extra]
    words = re.findall(r"^\t\$\(PIP\) (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    needed += [word for line in words for word in line.split() if re.fullmatch(r"[a-z][\w-]+", word)]
    return {re.split(r"[^\w-]", each)[0] for each in needed} - {"distboot"}


def _stated(name: str) -> str:
    """The licence in the metadata of an installed package."""
    said = metadata.metadata(name)
    kinds = [each.rpartition(" :: ")[2] for each in said.get_all("Classifier") or [] if each.startswith("License ::")]
    named = [*(said.get_all("License-Expression") or []), *(said.get_all("License") or []), *kinds]
    short = [str(each) for each in named if len(each) < 200 and "\n" not in each]
    return _SPDX.get(short[0], short[0])


def test_table_has_what_is_used_and_nothing_else() -> None:
    assert set(_table()) == _used()


@pytest.mark.parametrize("name", sorted(_table()))
def test_licence_is_the_one_that_the_package_states(name: str) -> None:
    try:
        stated = _stated(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    assert set(stated.split(" AND ")) <= set(_table()[name].split(" AND "))  # of which a build may have but some
