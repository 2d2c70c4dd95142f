"""The first word of whoever calls, as the side that is called takes it."""

from __future__ import annotations

from ..errors import quoted
from .wire import VERSION, Membership, Session, WireError


class OtherVersionError(Exception):
    """The peer speaks another version of the protocol; the text says which, and reads well after "the peer"."""


def session_with(message: dict[str, object], membership: Membership, us: str, challenge: str) -> Session:
    """What the messages of a peer that says hello are sealed with.

    Args:
        message: what it said.
        membership: what tells the ranks of this job from everybody else.
        us: the side that this is, as a refusal names it.
        challenge: ours, fresh for this connection.

    Raises:
        WireError: it does not belong to the job.
        OtherVersionError: it does, as far as it says, and would not understand us.
    """
    if message.get("job") != membership.job:
        raise WireError("belongs to another job")
    if message.get("distboot") != VERSION:
        version = quoted(message.get("distboot"))
        said = f"speaks version {version} of the protocol, and {us} {VERSION}"
        if membership.secret:  # then it is nobody's word
            raise WireError(said)
        raise OtherVersionError(said)
    nonce = message.get("nonce")
    if not isinstance(nonce, str) or len(nonce) != len(challenge):
        raise WireError("sends no nonce")
    return Session(membership.secret, us, challenge, nonce)
