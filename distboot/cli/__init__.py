"""The command line: `python -m distboot`, and the console script `distboot`."""
