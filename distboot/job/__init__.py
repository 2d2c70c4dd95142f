"""What rank 0's agent decides about a job, without io: keys, the first failure, late ranks, stops, restarts.

Nothing here opens a socket, a file or a process. `agent/` hands in what has happened and does what
was decided; the messages that agents exchange after the rendezvous are in `messages`.
"""
