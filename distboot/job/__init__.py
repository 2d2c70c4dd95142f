"""What rank 0 decides about a job, without io.

A `job` is a pure machine: the agent of rank 0 passes in what has happened and when (a message of a
rank, a rank that is lost, that time has passed), and carries out the `effects` that this leads to.
Its services have one concern each (`service`): `keys`, late ranks (`late`), failures
(`failure_service`, with `first_failure`), and the agreed stop (`stop_agreement`). All of them read
the `facts`. Whether a failed round is followed by another one is decided in `restarts`.

Nothing here opens a socket, a file or a process, waits, or reads a clock. The messages that agents
exchange after the rendezvous are in `messages`. `journal` has the lines of the file in which rank
0's agent notes each event.
"""
