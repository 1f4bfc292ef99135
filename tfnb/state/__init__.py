"""The store of values on a server, queues, accumulators and tokens, variable files and optimizers in them."""
