"""The store of values on a server, queues, accumulators and tokens, and variable files."""
