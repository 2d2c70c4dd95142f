"""`python -m distboot …`: see `python -m distboot --help`."""

import os
import sys


def _leave_out_working_directory() -> None:
    """Undo what `python -m` has put before `sys.path`, as `python -P` does.

    In this process a `logging.py` of the user must not shadow Python's. The script is another process.
    """
    try:
        here = os.getcwd()
    except FileNotFoundError:  # Python has added nothing then
        return
    # With these nothing was added: what is first there comes from elsewhere
    is_left_out = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
    if sys.path[:1] == [here] and not is_left_out:
        del sys.path[0]


if __name__ == "__main__":
    _leave_out_working_directory()

    import gc
    import signal

    # Nearly all that a start creates stays: a search for garbage in it finds none.
    gc.set_threshold(20_000)
    # Before anything else is imported: until `main` runs, Ctrl-C ends this process without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from .cli.main import main

    code = main(sys.argv[1:])
    # All output is written. To end the interpreter takes a quarter as long as to start it, and the
    # launcher would wait for that.
    os._exit(code)
