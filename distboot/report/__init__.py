"""The report of a job: the summary line, the page and the JSON, from its events.

`content` is pure: it makes them of `rendezvous/events`, with `job_state` and `steps`;
`from_journal` makes the same of the journal of a job. `files` writes them.
"""
