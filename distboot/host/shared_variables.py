"""Variables that ranks take from rank 0 where they have none: `--share-env 'HF_*,MODEL_DIR'`.

Never one that may be a secret, as values are sent in the clear; that is of one process or one host;
or that changes which code programs load.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import translate
from itertools import chain

from ..base.errors import DistbootError
from .environment import is_compared, may_be_secret

Shared = tuple[tuple[str, str], ...]  # names and values

MOST = 100  # variables
_QUOTES = 2  # characters
_MOST_BYTES = 16_384  # of all names and values in JSON, in which "学" takes 6
# Whoever sets these runs code in every program that is started
_OF_LOADERS = "(LD|DYLD|PYTHON|BASH|PERL|RUBY|NODE|GCONV|GIO|GTK|QT)_?.*|ENV|IFS"


def shared(environ: Mapping[str, str], patterns: Sequence[str]) -> tuple[Shared, list[str]]:
    """What rank 0 shares, and the names that are meant, too, but may be secrets.

    Raises:
        DistbootError: `usage`: it is too much to send to every rank.
    """
    meant = _meant(sorted(environ), patterns)
    secrets = []
    found = []
    for name in meant:
        value = environ[name]
        if may_be_secret(name, value):
            secrets.append(name)
        else:
            found.append((name, value))
    texts = chain.from_iterable(found)
    size = sum(len(json.dumps(text)) - _QUOTES for text in texts)
    is_too_much = len(found) > MOST or size > _MOST_BYTES
    if is_too_much:
        raise DistbootError(
            "usage",
            f"--share-env (or DISTBOOT_SHARE_ENV) means {len(found)} variables with {size} "
            f"bytes, as they are sent, and may share {MOST} with {_MOST_BYTES}",
            "give fewer names",
        )
    return tuple(found), secrets


def taken(shared: Shared, environ: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    """Those of rank 0's variables that this rank has not, and wants.

    Whoever says that it is rank 0 can set no other variable here.
    """
    of_rank_0 = dict(shared)
    found = {}
    missing = of_rank_0.keys() - environ.keys()
    for name in _meant(missing, patterns):
        found[name] = of_rank_0[name]
    return found


def _meant(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that a pattern fits, and that may be shared."""
    wanted = re.compile("|".join(map(translate, patterns)))
    loaders = re.compile(_OF_LOADERS)
    found = []
    for name in filter(wanted.match, names):
        is_of_loader = loaders.fullmatch(name) is not None
        if is_compared(name) and not is_of_loader:
            found.append(name)
    return found
