"""Runs that are watched: clocks, traces, values of iterations.

`clocks`, `trace` (what a run did), `tracer` (node by node), `probes` (few clocks), `loop_trace` and `iterations`
(inside of loops), `kernel_events`.
"""
