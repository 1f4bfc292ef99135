"""What every node carries, and where nodes are kept while a recording goes on: the tape, scopes, notes for the user.

`tape` owns the nodes of one recording, `scopes` names module paths and torch functions, `notes` words what a user is
told. `while_recording` changes things of torch for as long as any thread records. `held_interrupts` keeps Ctrl-C out
of half-made nodes.
"""
