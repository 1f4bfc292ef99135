"""Watching a run: one tracer, running generated code with probes; the records to keep are an argument.

`probes` makes the code, `tracer` runs it and keeps the times of parts, `everything` keeps nodes, memory and iterations.
`trace` is what a run did, `iterations` the part of it inside of loops, `live_memory` counts bytes, `clocks` seconds,
`kernel_events` reads torch's profiler, and `node_seconds` times the nodes of a step that writes nothing. `health`
counts bad numbers, `value_health` looks at those of each node, `origins` is where they began, and `checked_steps`
writes nothing that is not finite. Of a step that runs at several places `place_tracer` keeps the times at one of them,
and `clock_offsets` says how far their clocks are apart.
"""
