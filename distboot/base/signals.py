"""Signals that come from outside of a job."""

import signal

# A process that one of these ends was stopped; it did not fail.
FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
