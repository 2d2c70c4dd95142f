"""What the wrapper puts into every Python of an unmodified script; see `sitecustomize`."""

import os
from collections.abc import Mapping


def injected(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child, with our `sitecustomize` before all others."""
    folder = os.path.dirname(os.path.abspath(__file__))
    return {**environ, "PYTHONPATH": os.pathsep.join([folder, *filter(None, [environ.get("PYTHONPATH")])])}
