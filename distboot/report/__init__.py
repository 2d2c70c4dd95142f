"""The report of a job: pure functions of its events (`rendezvous/events`), and the file it is written to."""
