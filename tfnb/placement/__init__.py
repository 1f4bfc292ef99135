"""Which task computes what and holds what.

`partition` cuts a pruned step into a part for the compute tasks and one for each server; `shards` says which server
holds a Variable; `requests` whether nodes can run where they ask to.
"""
