"""The roll call: before any framework starts, every rank reports to rank 0 once and gets the roster back.

It is plain TCP and the standard library, so it works in every image and fails before a slow import.

The protocol, version 1. Every message is a frame: its length in 4 bytes, most significant first, and a JSON object of
that length. Rank 0 listens; for every other rank, on a connection of its own:

    rank   -> rank 0   {"distboot": 1, "job": digest of the job id, "nonce": 32 hex digits}
    rank 0 -> rank     {"distboot": 1, "challenge": 32 hex digits}
    rank   -> rank 0   {"record": what the rank says of itself, "mac": …}
    rank 0 -> rank     {"roster": nodes, hosts and ranks of the whole job, "mac": …}

In place of any of its messages rank 0 may send {"error": [code, message, hint]}, which ends the job on every rank, or
{"refused": message}, which ends this connection only: the peer belongs to another job, or speaks another version.

With DISTBOOT_SECRET, "mac" is HMAC-SHA256 over challenge, nonce, direction and content: nobody without the secret can
join, pose as rank 0, or send again what was said in another run. Without it the job id keeps strangers out by accident
only, not by force. Nothing is encrypted: a record has host names and versions, no secrets.

Limits: a peer sends at most 64 kB in one frame and has 10 seconds to report; what does not answer like this is
dropped, whatever it sends and however slowly, and the job goes on waiting for its own ranks until the join timeout.
"""
