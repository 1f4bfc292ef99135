"""Kinds of writes: calls in place, views, shared memory.

`in_place_calls` records the twins, `aliases` memory that several names share.
"""
