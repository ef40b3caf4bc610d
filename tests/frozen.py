"""Imported last by the fork server: what it has imported is no garbage, and no process that it
forks looks through it, or copies its pages to do so.
"""

import gc

gc.collect()
gc.freeze()
