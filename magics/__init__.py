"""The IPython magics and display hooks: a few lines each over the public functions. Imports no torch when loaded."""

from tfnb.magics.extension import load, unload

__all__ = ["load", "unload"]
