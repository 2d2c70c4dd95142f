"""The report of a job: the summary line, the page and the JSON, from its events.

`content` is pure: it makes them of `rendezvous/events`, with `job_state` and `steps`. `files`
writes them.
"""
