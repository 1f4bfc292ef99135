"""Queues on servers, as seen by the processes that use them.

`queues_there` is the client's end of a queue, `contents_there` copies and replaces the contents of queues and Variables
at one moment, `journal` restores a queue whose server is lost, `deadlocks` finds steps that wait for each other.
"""
