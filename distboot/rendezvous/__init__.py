"""The rendezvous: before any framework starts, every rank reports to rank 0 once, and gets the membership back.

Where, and within which limits: docs/explanation/rendezvous.md.
"""
