"""What holds for every test."""

from __future__ import annotations

import os
import signal

# Nodes that tests stop need not wait until a load balancer has noticed.
os.environ.setdefault("SDSTORE_DRAIN_S", "0")

# A shell starts its background jobs deaf to Ctrl-C, and their children inherit that. The processes
# that tests start, and interrupt, shall hear it however the tests themselves were started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
