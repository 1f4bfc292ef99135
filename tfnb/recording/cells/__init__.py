"""A recording from its opening to new contents of the graph, and cells that run again.

`block` opens and closes, `statements` gives writes without a handle to steps, `new_contents` makes the graph's
contents, `size_letters` keeps the letters of sizes, `feed_keys` lets names bound anew feed their
placeholders, `draw_flow` finds the random numbers of Python that reached the graph, `stored_names` names that a branch
of Python may give away, `type_questions` questions for the types of sizes.
"""
