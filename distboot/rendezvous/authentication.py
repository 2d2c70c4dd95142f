"""SHA-256 of a body, and HMAC with the secret of the job.

A module of its own, as only a job with DISTBOOT_SECRET needs it: OpenSSL takes 4 MB in each agent.
"""

from __future__ import annotations

import hashlib
import hmac

are_equal = hmac.compare_digest


def digest_of(body: bytes) -> bytes:
    """The 32 bytes that stand for a body."""
    return hashlib.sha256(body).digest()


def mac_of(secret: str, signed: bytes) -> bytes:
    """The 32 bytes that only who knows the secret can make of what is signed."""
    return hmac.digest(secret.encode(errors="surrogateescape"), signed, "sha256")
