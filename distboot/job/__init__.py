"""What an agent decides about its job, without io.

A `job` is a pure machine: the agent of rank 0 passes in what has happened and when (a message of a
rank, a rank that is lost, that time has passed), and carries out the `effects` that this leads to.
Its services have one concern each (`service`): the check of all nodes (`check`), keys
(`key_service`, with `keys`), late ranks (`late`), failures (`failure_service`, with
`first_failure`), the agreed stop (`stop_agreement`), and separate models (`separate_models`). All
of them read the `facts`. Whether a failed round is followed by another one is decided in `restarts`.

Any other agent has a `follower` in place of a job. It sends on what its ranks say, does what rank 0
says, and knows its connection as a `rank_0_link`. When an agent may exit is in `stay`, for both.

Nothing here opens a socket, a file or a process, waits, or reads a clock. The messages that agents
exchange after the rendezvous are in `messages`. `journal` has the lines of the file in which rank
0's agent notes each event.
"""
