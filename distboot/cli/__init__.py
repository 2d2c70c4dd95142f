"""The command line: one file a command; `main` has what all of them share."""
