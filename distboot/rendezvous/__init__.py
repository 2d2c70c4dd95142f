"""The rendezvous: before any framework starts, every rank reports to rank 0 once, and gets the membership back.

Where: rank 0 listens at the first free one of five ports, MASTER_PORT and four derived from it and the job id; under
torchrun, whose agent has MASTER_PORT, all five are derived. The others try all of them in this order, again and again
with jitter.

Limits: a connecting process sends at most 64 kB in one frame and has 10 seconds to report; what does not answer like
this is dropped, whatever it sends and however slowly, and the job goes on waiting for its own ranks. A rank says how
long it is still going to wait: when the first is out of patience, all are told who is missing.
"""
