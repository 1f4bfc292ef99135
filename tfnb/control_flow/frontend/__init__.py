"""The AutoGraph frontend: from source to code that calls operators. Independent of recordings and graphs.

`trees` finds a function's syntax tree and says what is in it; `edited_files` finds it in files that were edited since,
and `tree_copies` copies trees, which conversions change.
`source` and `cell_parts` turn the trees of functions and cells into code. `autograph_frontend` calls the library that
makes functions of bodies, and `expressions` adds what the library leaves out; `yields` has generator functions,
`frame_names` calls that look at their frame. `cannot_stage` is how source, or a statement of it, is left to Python.
"""
