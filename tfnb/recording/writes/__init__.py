"""Kinds of writes: calls in place, views, shared memory, buffers that get another tensor.

`in_place_calls` records the twins, `aliases` memory that several names share, `buffer_assignments` what `m.h = ...` is.
"""
