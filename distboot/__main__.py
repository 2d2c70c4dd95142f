"""`python -m distboot …`: see `python -m distboot --help`."""

import signal
import sys

if __name__ == "__main__":
    # Before anything else is imported: until `main` runs, Ctrl-C ends us quietly and not with a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from .cli.main import main

    sys.exit(main(sys.argv[1:]))
