"""The agent of a rank: it owns every connection of the job, watches the process of the rank, and serves its script.

It is the wrapper itself (`in_wrapper`), or, under a bare `init`, a sidecar that `sidecar_start` starts before the ranks
meet, and `sidecar` is. The script has one local socket to it (`local`), and no other of ours. Rank 0's agent hears of
every end, decides which failure was first (`failure_coordinator`, `root_cause`), and tells all others
(`failure_reporter`), which print it, and stop their process: TERM, a grace, KILL. What a script leaves behind when it
fails (`crash_hooks`) comes through a pipe, read by `monitored_process`. The script's own workers outlive a TERM for all
(`workers`).
"""
