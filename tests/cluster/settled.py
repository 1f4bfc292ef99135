"""The fork server imports this last: the collector of a worker does not look at what was imported before it began.

Each end of a connection collects garbage in the workers; else that is most of what a small test costs.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
