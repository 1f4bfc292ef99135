"""Sharded embeddings, and losses over many classes.

`embeddings` looks rows up in tables whose shards may lie on several tasks. `sharded_softmax` multiplies by such a
table, each shard where it lies; `samplers` draws classes, and `sampled_losses` uses them in the place of all. Ordinary
torch code over ops of ours, as a user might write it: what crosses between tasks follows from where the shards lie. May
import gradients.
"""

from tfnb.nn.embeddings import embedding_lookup
from tfnb.nn.sampled_losses import nce_loss, sampled_softmax_loss
from tfnb.nn.samplers import SampledClasses, log_uniform_sampler
from tfnb.nn.sharded_softmax import sharded_softmax_loss

__all__ = [
    "SampledClasses", "embedding_lookup", "log_uniform_sampler", "nce_loss", "sampled_softmax_loss",
    "sharded_softmax_loss",
]  # fmt: skip
