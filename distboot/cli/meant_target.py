"""What may be meant by a script or module that is not there."""

from __future__ import annotations

import os
import shlex

from ..base.text import escape_control


def meant_by_script(script: str) -> str:
    """`"did you mean -m package.train?"` if Python finds that in the working directory; or empty."""
    path = script.replace(".", os.sep)
    files = {f"{script}.py": shlex.quote(f"{script}.py")}
    is_dotted = os.sep not in script and "." in script
    if is_dotted:
        module = shlex.join(["-m", script])
        files |= dict.fromkeys((f"{path}.py", os.path.join(path, "__main__.py")), module)
    for file in filter(os.path.isfile, files):
        meant = escape_control(files[file])
        return f"did you mean {meant}?"
    return ""


def meant_by_module(name: str) -> str:
    """`"did you mean train.py? …"` if that file is in the working directory; or empty."""
    if not os.path.isfile(name):
        return ""
    meant = escape_control(shlex.quote(name))
    return f"did you mean {meant}? After -m there is the name of a module"
