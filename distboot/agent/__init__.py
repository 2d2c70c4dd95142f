"""The agent of a rank: it owns every connection of the job, and watches the process of the rank.

It is the wrapper itself (`in_wrapper`, beside the `supervisor` of its children), or, under a bare
`init`, a sidecar that `sidecar_start` starts before the ranks meet. The script has one local socket
to it (`link`; `link_messages` has what is sent there; `script_server` is the agent's end), and no
other of ours.

An `agent` is a `loop` that calls one side of failure detection (`participant`). Rank 0's side
(`failure_coordinator`) receives every exit, and carries out what its job (`job/job`) decides. That
of any other agent (`failure_reporter`) prints what rank 0 has decided, and stops its processes
(`stopping_process`: TERM, a grace, KILL). `peer_watch` knows which of the other agents are there,
by the `heartbeat` of each `peer_connection`. What a script leaves behind when it fails
(`script/crash_hooks`) comes through a pipe (`hook_reader`) to the `monitored_process`.

Where that is wanted, rank 0's agent writes each event when it happens (`event_files`: `journal`,
`metrics_file`, `kubeflow_status`).

The folder is the only one with sockets, pipes and signals after the rendezvous.
"""
