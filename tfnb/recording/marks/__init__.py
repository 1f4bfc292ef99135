"""Scopes of nodes, notes for the user, and changes to torch while a recording is open.

`open_block` is the protocol of an open recording. `scopes` names module paths and torch functions, `notes` words what a
user is told, `user_code` tells whose code a file holds. `while_recording` changes things of torch for as long as any
thread records. `held_interrupts` keeps Ctrl-C out of half-made nodes. `python_state` collects the attributes, hooks,
flags and settings that a recording reads, and `python_guards` compares them before runs; `attribute_reads` and
`block_names` find them in the code of classes and cells, `source_trees` gives syntax trees, and `settings` compares
numbers, texts, functions and objects. `lasting_state` is the journal of modes, hooks and flags, which a branch or loop
must leave as they were.
`carried_gradients` notes where plain PyTorch would add to the ``.grad`` of another block or turn.
"""
