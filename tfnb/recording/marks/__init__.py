"""Where a node stands and what the user is told: scopes, notes, what torch changes while a recording goes on.

`scopes` names module paths and torch functions, `notes` words what a user is
told. `while_recording` changes things of torch for as long as any thread records. `held_interrupts` keeps Ctrl-C out
of half-made nodes.
"""
