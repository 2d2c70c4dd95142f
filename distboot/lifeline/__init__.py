"""The lifeline: after the roll call its connections stay open, and the first failure of a rank is known to all at once.

Beside every rank stands a process that the rank cannot block: the wrapper (`keeper`), or, under a bare `init`, a guard
(`beside` starts it, `guard` is it). It watches the rank's process, and speaks with rank 0's over the connection of the
roll call. Rank 0 (`hub`) hears of every end, decides which was first, and tells all others (`spoke`); they print it,
and stop their process: TERM, a grace, KILL.

The protocol goes on where the roll call's ends (same frames, same mac):

    rank   -> rank 0   {"watch": {"pid": …}}   from now on this rank is watched; rank 0 answers with its own
    both               {"beat": null}          once a second, or less often in a large job: `line.interval_of`
    rank   -> rank 0   {"steps": {step: time}} how its beginning went, for the report of the job
    rank   -> rank 0   {"trouble": end}        the script fails (its traceback is there), and will end soon
    rank   -> rank 0   {"ending": null}        the script is about to end; its exit code comes later
    rank   -> rank 0   {"stopping": signal}    somebody outside stops this rank
    rank   -> rank 0   {"end": end}            the script has ended: exit code or signal, last words, time
    rank 0 -> rank     {"first": verdict}      why all stop
    both               {"bye": null}           no lifeline on this connection any more, and no failure either

Through the relay of a node (see `rollcall`, and `relay`) the same, for rank 0 with the rank that it is of, or for:

    relay  -> rank 0   {"of": [[rank, kind, content], …]}   and in place of an end without a word: [rank, "gone", why]
    rank 0 -> relay    {"to": [rank or null, kind, content]}

A connection that ends before "end" or "bye" is a rank that was lost. So is one that is silent for the bound, unless
its host answers elsewhere: then only the lifeline is cut, which is said, and the training goes on. Whether the peer's
kernel takes what we send tells a host that has gone from a process that is stopped.

What a script leaves behind when it fails (`last_words`, `farewell`) comes through pipes, read by `words`.
"""
