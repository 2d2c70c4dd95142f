"""The command line: `main` calls a command; `run` is the wrapper; the others are in `tools/`."""
