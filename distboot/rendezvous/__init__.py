"""The rendezvous: before any framework starts, every rank reports to rank 0 once.

It gets the membership back: the whole job, with exact numbers. `plan` is what an agent knows before
it joins; `join` is rank 0's `coordinator` or another rank's `worker`; `protocol` and `messages` are
what they send. Where, and within which limits: docs/explanation/rendezvous.md.
"""
