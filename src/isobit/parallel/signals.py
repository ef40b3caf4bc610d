"""The signals that a run answers, alone or as several processes.

SIGINT (Ctrl-C), SIGTERM,       stop with a checkpoint; a second Ctrl-C stops at once
SIGHUP (the terminal is gone),
SIGXCPU (a limit on CPU time)
SIGUSR1                         a checkpoint after the step, and on
"""

import signal

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)
SAVES = signal.SIGUSR1
