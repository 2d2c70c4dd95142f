"""`python -m distboot …`: see `python -m distboot --help`."""

import gc
import os
import signal
import sys

if __name__ == "__main__":
    # Nearly all that a start creates stays: a search for garbage in it finds none.
    gc.set_threshold(20_000)
    # Before anything else is imported: until `main` runs, Ctrl-C ends us quietly and not with a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from .cli.main import main

    code = main(sys.argv[1:])
    # All that we had to say is written. To end the interpreter takes a quarter as long as to start it, and the
    # launcher would wait for that.
    os._exit(code)
