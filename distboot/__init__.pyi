# What editors and type checkers see of the package: `__init__.py` imports each of these when it is first used.

from .base.errors import DistbootError as DistbootError
from .base.version import __version__ as __version__
from .context import Context as Context
from .detection.detect import detect as detect
from .detection.placement import Placement as Placement
from .initialize import init as init

__all__ = ["Context", "DistbootError", "Placement", "__version__", "detect", "init"]
