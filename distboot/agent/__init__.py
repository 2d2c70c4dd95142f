"""The agent of a rank: it owns every connection of the job, and watches the process of the rank.

It is the wrapper itself (`wrapper_agent`, beside the `supervisor` of its children), or, under a bare
`init`, a sidecar that `sidecar_start` starts before the ranks meet. The script has one local socket
to it (`link`; `link_messages` has what is sent there; `script_server` is the agent's end), and no
other of ours.

An `agent` is a `loop` that calls a `shell`. The shell hears what happens, lets its job decide, and
carries out the effects. Rank 0's job (`job/job`) decides for all; that of any other agent
(`job/follower`) sends on what its ranks say. What the two kinds do about their connections is in
`rank_connections` (rank 0's, to all others) and `rank_0_connection`. `peer_watch` knows which of
the other agents are there, by the `heartbeat` of each `peer_connection`.

The shell has its `own_processes`, each a `monitored_process` with what its parts share
(`rank_process`). What a script leaves behind when it fails (`script/crash_hooks`) comes through a
pipe (`hook_reader`) to `script_failure`. `stopping` ends a process: TERM, a grace, KILL.

Where that is wanted, rank 0's agent writes each event when it happens (`event_files`: `journal`,
`metrics_file`, `kubeflow_status`).

The folder is the only one with sockets, pipes and signals after the rendezvous.
"""
