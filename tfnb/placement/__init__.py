"""Which task computes what and holds what: partition, shards, what a step needs of the state."""
