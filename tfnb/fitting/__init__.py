"""`fit`: one step for each batch, here or by the tasks of a cluster.

`fit_options` are its arguments, looked at; `fit_display` is what a notebook or terminal shows meanwhile; `fit_loop`
is the loop. `background` trains in a thread, `snapshots` put a training back to a step, `comparing`
trains in several ways.
"""

from tfnb.fitting.fit_loop import RunResult, fit

__all__ = ["RunResult", "fit"]
