"""docker, podman, enroot, apptainer, and srun with pyxis, by whichever name this is called, without a container.

The command is run on the host, with the variables that the tool would give it: docker, podman and enroot those that -e
names; apptainer all, or with --cleanenv those of --env; pyxis all. The image has the wrapper as its ENTRYPOINT.
test_images.py does the same with podman itself.
"""

import os
import shutil
import sys
from pathlib import Path

_ENTRYPOINT = ["python", "-m", "distboot", "run", "--"]
_OF_THE_IMAGE = ("HOME", "LANG", "PATH", "PYTHONPATH")
_WITH_A_VALUE = ("-e", "--env", "-v", "--bind", "--env-file")


def install(folder: Path) -> str:
    """Put these tools into a new folder; what PATH is set to in a shell, so that they come first."""
    folder.mkdir()
    for name in ("docker", "podman", "enroot", "apptainer", "srun"):
        (folder / name).write_text(f"#!{sys.executable}\n{Path(__file__).read_text()}")
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}$PATH"


def main(tool: Path, words: list[str]) -> None:
    others = os.pathsep.join(
        path for path in os.environ["PATH"].split(os.pathsep) if path != str(tool.parent)
    )
    if tool.name == "srun":
        program = shutil.which("srun", path=others) or "srun"
        own = [word for word in words if not word.startswith(("--container-", "--no-container-"))]
        os.execve(program, [program, *own], dict(os.environ))
    options, command = _split(words[1:])
    given = [value for name, value in options if name in ("-e", "--env")]
    passed = [
        text
        for value in given
        for text in (value.split(",") if tool.name == "apptainer" else [value])
    ]
    passed += [
        line
        for name, value in options
        if name == "--env-file"
        for line in Path(value).read_text().splitlines()
    ]
    environ = {name: os.environ[name] for name in _OF_THE_IMAGE if name in os.environ}
    if tool.name == "apptainer":
        environ = environ if ("--cleanenv", "") in options else dict(os.environ)
    else:
        command = [*_ENTRYPOINT, *command]
    environ |= dict(text.split("=", 1) for text in passed if "=" in text)
    environ |= {name: os.environ[name] for name in passed if "=" not in name and name in os.environ}
    os.execvpe(command[0], command, environ)


def _split(words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """The options with their values, and the command behind the image."""
    options = []
    while words[0].startswith("-"):
        name, given, value = words.pop(0).partition("=")
        options.append((name, value if given else words.pop(0) if name in _WITH_A_VALUE else ""))
    return options, words[1:]


if __name__ == "__main__":
    main(Path(sys.argv[0]), sys.argv[1:])
