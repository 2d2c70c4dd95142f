"""`python -m distboot try`: a script here, as launchers would start it elsewhere. The core does not import it.

Environments are those of the captures in `tests/captures`; the agents take each node for a host of its own.
"""
