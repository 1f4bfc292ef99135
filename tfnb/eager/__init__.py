"""The eager autograd facade: torch's autograd and optimizer calls inside a recording.

`state` is the autograd state of one recording: gradients, hooks, what requires a gradient. `autograd_calls` sees
torch's functions (``.grad``, ``requires_grad_``, ``register_hook``, ``backward``) and answers them from that state.
`backward` is ``torch.autograd.backward`` and ``grad`` over symbolic gradients. `steps` records ``optimizer.step()``.
`outside` is the error of a ``backward()`` outside of the recording.

Recording knows only the name of this room, which it imports when a block opens: that registers `autograd_calls.facade`
with `tfnb.graph.current.extensions`, which holds what every recording opens with.
"""

from tfnb.eager.autograd_calls import facade
from tfnb.graph import current

current.extensions.append(facade)

__all__ = ["facade"]
