"""A recording from its opening to new contents of the graph, and cells that run again.

`block` opens and closes, `new_contents` makes the graph's contents, `size_letters` keeps the letters of sizes.
"""
