"""The agent of a rank: it owns every connection of the job, watches the process of the rank, and serves its script.

It is the wrapper itself (`in_wrapper`), or, under a bare `init`, a sidecar that `sidecar_start` starts before the ranks
meet, and `sidecar` is. The script has one local socket to it (`link`), and no other of ours. Rank 0's agent receives
every exit, decides which failure was first (`failure_coordinator`, with `job/root_cause`), and tells all others
(`failure_reporter`), which print it, and stop their process: TERM, a grace, KILL. What a script leaves behind when it
fails (`script/crash_hooks`) comes through a pipe, read by `monitored_process`. The folder is the only one with sockets,
pipes and signals after the rendezvous.
"""
