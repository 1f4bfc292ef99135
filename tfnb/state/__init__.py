"""The store of values on a server, and variable files."""
