"""Builds the sdist and the wheel into dist/ and checks both, for `make dist`.

    python packaging/dist.py [--url URL] [--tag TAG]

The sources do not name the address of their repository. A package index shows README.md on a page of its own, where
its relative links lead nowhere. With --url, the sdist gets `[project.urls]`, and for the index a copy of README.md
whose links lead to the files of this version in that repository. The wheel is built from that sdist alone, so that
the sdist that is published gives the wheel that is published. With --tag, nothing is built unless the tag, the
version, the changelog and the commit agree. Times in the archives are SOURCE_DATE_EPOCH, or else that of the commit.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
README = "packaging/README.md"  # for the index, in the sdist of a release alone
PICTURES = (".png", ".svg", ".gif", ".jpg")
# The target of a link: [text](target), ![text](target); none of these texts is code in README.md.
_LINK = re.compile(r"(\]\()([^()\s]+)(\))")
_LOCAL = re.compile(r"(?![a-z]+:|#|/)")
# pyroma asks for an e-mail address of the authors. None is known, and issues belong into the repository.
_SKIPPED = ["AuthorEmail"]


def version() -> str:
    text = (ROOT / "distboot" / "base" / "version.py").read_text()
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return str(found)


def tag_problems(tag: str, version: str, changelog: str) -> Iterator[str]:
    """What keeps a tag from being a release."""
    if tag != f"v{version}":
        yield f"the tag is {tag}, but distboot/base/version.py has {version}: use v{version}"
    heading = next(line for line in changelog.splitlines() if line.startswith("## "))
    if not re.fullmatch(rf"## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", heading):
        yield f"CHANGELOG.md begins with '{heading}': use '## [{version}] - YYYY-MM-DD'"


def with_absolute_links(text: str, url: str, ref: str) -> str:
    """The Markdown with each relative link replaced by the address of that file in the repository."""

    def absolute(found: re.Match[str]) -> str:
        before, target, after = found.groups()
        if not _LOCAL.match(target):
            return found[0]
        kind = "raw" if target.endswith(PICTURES) else "blob"
        return f"{before}{url}/{kind}/{ref}/{target}{after}"

    return _LINK.sub(absolute, text)


def for_an_index(pyproject: str, url: str, ref: str) -> str:
    """The pyproject.toml with the addresses of the repository, and the other README.md."""
    urls = {
        "Repository": url,
        "Documentation": f"{url}/tree/{ref}/docs",
        "Changelog": f"{url}/blob/{ref}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    table = "".join(f'{name} = "{address}"\n' for name, address in urls.items())
    changes = {
        '\nreadme = "README.md"\n': f'\nreadme = "{README}"\n',
        "\n[project.scripts]\n": f"\n[project.urls]\n{table}\n[project.scripts]\n",
    }
    for old, new in changes.items():
        assert pyproject.count(old) == 1, old
        pyproject = pyproject.replace(old, new)
    return pyproject


def repository(text: str) -> str:
    """The address of a repository, as an argument."""
    address = text.rstrip("/").removesuffix(".git")
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+){2,}", address):
        raise argparse.ArgumentTypeError(f"{text!r} is not https://HOST/OWNER/REPOSITORY")
    return address


def _git(*arguments: str) -> str | None:
    """What git prints; None in a folder that is not a clone, such as an unpacked sdist."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return None
    git = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(git, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _run(*arguments: str | Path) -> None:
    print("distboot: " + " ".join(str(each) for each in arguments), flush=True)
    command = [sys.executable, "-m", *arguments]
    subprocess.run(command, cwd=ROOT, check=True)


def _build(kind: str, source: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(command, cwd=source, stdout=subprocess.DEVNULL, check=True)
    (built,) = folder.glob("distboot-*.tar.gz" if kind == "sdist" else "distboot-*.whl")
    return built


def _unpacked(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        # The filter is there from Python 3.10.12 and 3.11.4 on; the archive is our own
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    (only,) = folder.iterdir()
    return only


def build(url: str | None, folder: Path) -> tuple[Path, Path]:
    """Build the sdist and, from that alone, the wheel."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("distboot-*"):
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="distboot-dist-") as scratch:
        source = ROOT
        if url:
            ref = f"v{version()}"
            plain = _build("sdist", ROOT, Path(scratch) / "plain")
            source = _unpacked(plain, Path(scratch) / "source")
            readme = (source / "README.md").read_text()
            (source / README).write_text(with_absolute_links(readme, url, ref))
            pyproject = source / "pyproject.toml"
            pyproject.write_text(for_an_index(pyproject.read_text(), url, ref))
        sdist = _build("sdist", source, folder)
        wheel = _build("wheel", _unpacked(sdist, Path(scratch) / "again"), folder)
    return sdist, wheel


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the sdist and the wheel, and check them.")
    parser.add_argument("--url", type=repository, help="the repository, https://HOST/OWNER/NAME")
    parser.add_argument("--tag", help="refuse to build anything but this release")
    options = parser.parse_args(arguments)
    if options.tag:
        changelog = (ROOT / "CHANGELOG.md").read_text()
        problems = list(tag_problems(options.tag, version(), changelog))
        changed = _git("status", "--porcelain")
        if changed is None:
            problems.append("this folder is not a clone of the repository that git can read")
        elif changed:
            problems.append(f"these files are not as they were committed:\n{changed}")
        if not options.url:
            problems.append("the links of README.md need the address of the repository: use --url")
        if problems:
            print("\n".join(f"distboot: no release: {each}" for each in problems), file=sys.stderr)
            return 1
    time = os.environ.get("SOURCE_DATE_EPOCH") or _git("log", "-1", "--format=%ct")
    if time:
        os.environ["SOURCE_DATE_EPOCH"] = time
    sdist, wheel = build(options.url, DIST)
    _run("twine", "check", "--strict", sdist, wheel)
    _run("check_wheel_contents", wheel)
    skipped = _SKIPPED if options.url else [*_SKIPPED, "Url"]
    _run("pyroma", "--min=10", f"--skip-tests={','.join(skipped)}", "--file", sdist)
    if not options.url:
        print(
            "distboot: without --url the archives have no project URLs and relative links in "
            "README.md: not for a package index"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
