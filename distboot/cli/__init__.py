"""The command line: `main` finds the command, `run` is the wrapper; the other commands are in `tools/`."""
