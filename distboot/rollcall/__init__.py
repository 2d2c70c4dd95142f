"""The roll call: before any framework starts, every rank reports to rank 0 once and gets the roster back.

It is plain TCP and the standard library, so it works in every image and fails before a slow import.

The protocol, version 1. Every message is a frame: its length in 4 bytes, most significant first, and a JSON object of
that length. Rank 0 listens; for every other rank, on a connection of its own:

    rank   -> rank 0   {"distboot": 1, "job": digest of job id and MASTER_PORT, "nonce": 32 hex digits}
    rank 0 -> rank     {"distboot": 1, "challenge": 32 hex digits}
    rank   -> rank 0   {"record": what the rank says of itself, "mac": …}
    rank 0 -> rank     {"roster": nodes, hosts and ranks of the whole job, "mac": …}

and, in `init`, once more when the framework is imported and the device set:

    rank   -> rank 0   {"ready": its accelerator, or why it cannot go on, "mac": …}
    rank 0 -> rank     {"go": null, "mac": …}

Rank 0 answers only when it has heard of all ranks. In place of roster and go it may send {"error": [code, message,
hint], "mac": …}, which ends the job on every rank: a rank is missing, there twice, fits not or has failed. In place of
any message it may send {"refused": message}, which ends this connection only: the peer belongs to another job, or
speaks another version.

With DISTBOOT_SECRET, "mac" is HMAC-SHA256 over challenge, nonce, kind and the content's digest: nobody without the
secret can join, pose as rank 0, or send again what was said in another run. Without it the job id keeps strangers out
by accident only, not by force. Nothing is encrypted: a record has host names, versions and settings, no secrets.

In a job of 4,096 ranks and more the ranks of a node share one connection, that of their relay (`node`, `relay`). To
them it is rank 0, on a Unix socket: the same messages, and its welcome says where rank 0 was reached. To rank 0 it is
another peer, with batches in place of records and readies; what rank 0 answers to all, it answers to the relay once:

    relay  -> rank 0   {"records": [[record, challenge, nonce], …], "mac": …}   of the ranks that have come by now
    relay  -> rank 0   {"of": [[rank, "ready" or "gone", content], …], "mac": …}

Where: rank 0 listens at the first free one of five ports, MASTER_PORT and four derived from it and the job id; under
torchrun, whose agent has MASTER_PORT, all five are derived. The others knock at all of them in this order, again and
again with jitter.

Long frames are compressed (zlib), which the highest bit of the length says.

Limits: a peer sends at most 64 kB in one frame and has 10 seconds to report; what does not answer like this is
dropped, whatever it sends and however slowly, and the job goes on waiting for its own ranks. A record says how long its
rank is still going to wait: when the first is out of patience, all are told who is missing.
"""
