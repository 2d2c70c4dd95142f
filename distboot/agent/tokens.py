"""The tokens with which scripts show whose they are, below a wrapper.

They are compared by OpenSSL, which takes 3.6 MB: the agent of a script that has its connection from
the beginning does without.
"""

from __future__ import annotations

import hmac
import os


class Tokens:
    """The tokens of the scripts of one agent."""

    def __init__(self) -> None:
        self._tokens: dict[int, str] = {}  # by rank

    def of(self, rank: int) -> str:
        """The token for the script of a rank."""
        return self._tokens.setdefault(rank, os.urandom(16).hex())

    def rank_of(self, token: str) -> int | None:
        """The rank whose script has this token."""
        given = token.encode(errors="replace")
        for rank, own in self._tokens.items():
            if hmac.compare_digest(given, own.encode()):
                return rank
        return None
