"""Session: fetches and feeds become code, and code runs as steps; a step computes, then commits.

`structures` and `feeding` resolve fetches and feeds, `divided_feeds` those of microbatches. `prepared` is one
signature, ready to run, with the `breakpoints`, the `printed` lines and the `value_cache` of its graph. `step_runner`
runs one step and can stop it; `step` runs one in pieces; `step_parts` shows one over several tasks. `saved_state` is
what a file has of a graph and its session, `checkpoint_graphs` which graph a file is of. `session` owns the signatures
of a graph.
"""

from tfnb.session.saved_state import Moment
from tfnb.session.session import Session, connected, default_session, limit, run

__all__ = ["Moment", "Session", "connected", "default_session", "limit", "run"]
