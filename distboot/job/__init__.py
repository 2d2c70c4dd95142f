"""What rank 0's agent decides about a job, without io: keys, failures, late ranks, stops, restarts.

Nothing here opens a socket, a file or a process, waits, or reads a clock. `agent/` passes in what
has happened and when, and does what was decided; `shell` is the part of it that these decisions
call. The messages that agents exchange after the rendezvous are in `messages`. `journal` has the
lines of the file in which rank 0's agent notes each event.
"""
