"""Queues on servers, as seen by the processes that use them.

`queues_there` is the other end of a queue, `contents_there` copies and changes what queues and Variables hold at one
moment, `journal` knows what a queue held whose server is lost, `deadlocks` tells steps that wait for each other.
"""
