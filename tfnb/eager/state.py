"""The autograd state of one recording: gradients by holder, retained gradients, hooks by value.

A recording starts with every ``.grad`` None. The real ``.grad`` of a Parameter is neither read nor written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from tfnb.errors import FailedPrecondition, InvalidArgument, ShapeError, Unsupported
from tfnb.gradients.presence import Presence, chosen, either
from tfnb.gradients.walker import Walk
from tfnb.graph import Value, Variable
from tfnb.recording import Recorder, Tensor
from tfnb.recording.marks.lasting_state import FLAG, Facet, flag, set_flag
from tfnb.recording.subgraphs.capture import LeftGradient
from tfnb.recording.values.tape import FROZEN
from tfnb.recording.values.variables import known
from tfnb.recording.writes.in_place_calls import rebind

Holder = torch.Tensor | Variable  # of a gradient


@dataclass(frozen=True, slots=True)
class SavedGradients:
    """The gradients of a recording at one place, and their presence."""

    grads: WeakIdKeyDictionary
    present: WeakIdKeyDictionary
    asked: dict[Value, tuple[Holder, torch.Tensor]]


class AutogradState:
    """The autograd state of the tensors of one recording, equivalent to torch's engine."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.hooks: dict[Value, OrderedDict[int, Callable[..., Any]]] = {}
        self._grads = WeakIdKeyDictionary()  # Variable, recorded tensor or plain tensor -> its gradient
        self._retained = WeakIdKeyDictionary()
        self._retaining = Facet(
            self._retained.__contains__, self._forget, "retain_grad() of {names} is called", "call it outside"
        )
        self._present = WeakIdKeyDictionary()  # of gradients that only some runs have: a recorded truth value
        self._asked: dict[Value, tuple[Holder, torch.Tensor]] = {}  # those that the program took, with their presence

    # -- in regions: what one leaves, and what is there below -----------------------------------------------------

    def saved(self) -> SavedGradients:
        """A copy of the gradients, for `put_back`."""
        return SavedGradients(copy(self._grads), copy(self._present), copy(self._asked))

    def put_back(self, saved: SavedGradients) -> None:
        """Restore the saved gradients. Hooks of values of a region stay: its gradient is recorded later."""
        self._grads, self._present, self._asked = copy(saved.grads), copy(saved.present), copy(saved.asked)

    def holders(self) -> list[Holder]:
        """The Variables and tensors that have a gradient."""
        return list(self._grads.keys())

    def changed_since(self, saved: SavedGradients) -> list[Holder]:
        """The holders with another gradient than the saved one."""
        both = _union(saved.grads, self._grads)
        return [
            holder for holder in both
            if saved.grads.get(holder) is not self.held(holder) or saved.present.get(holder) is not self.present(holder)
        ]  # fmt: skip

    def left(self) -> dict[Holder, LeftGradient]:
        """The gradients, as values of the region that ends here."""
        return {holder: self._left(holder, grad) for holder, grad in self._grads.items()}

    def _left(self, holder: Holder, grad: torch.Tensor) -> LeftGradient:
        recorder, present = self.recorder, self.present(holder)
        told = None if present is None else recorder._entry(present).value
        return LeftGradient(grad, recorder._entry(recorder._as_tensor(grad)).value, present, told)

    def differs(self, holder: Holder, left: LeftGradient | None) -> bool:
        """Whether a region left another gradient than there was before."""
        if left is None:
            return self.held(holder) is not None
        return left.tensor is not self.held(holder) or left.present is not self.present(holder)

    def join(
        self, holder: Holder, grad: torch.Tensor | None, taken: torch.Tensor, sides: tuple[Presence, Presence]
    ) -> None:
        """From here on the gradient is the one that either branch left. taken: which; sides: presence in each."""
        present = chosen(taken, *sides)
        self._grads.pop(holder, None)
        self._present.pop(holder, None)
        if grad is not None:
            self._grads[holder] = grad
            self.recorder.carried.keep(holder)
        if isinstance(present, torch.Tensor):
            self._present[holder] = present

    # -- gradients and their holders ----------------------------------------------------------------------------

    def holder(self, tensor: Holder) -> Holder:
        """The holder of a gradient: the Variable of a Parameter, else the tensor object."""
        if isinstance(tensor, Tensor | Variable):
            return tensor
        var = self.recorder.variable_of(tensor)
        return tensor if var is None else var  # a Variable has a length, which decides its truth

    def grad(self, tensor: Holder) -> torch.Tensor | None:
        """The gradient so far of a Variable or tensor."""
        var = None if isinstance(tensor, Tensor | Variable) else known(tensor)
        holder = tensor if var is None else var
        found, present = self.held(holder), self.present(holder)
        self.recorder.carried.read(holder, found)
        if isinstance(found, Tensor) and present is not None:
            self._asked[self.recorder.look(found).value] = holder, present
        return found

    def held(self, holder: Holder) -> torch.Tensor | None:
        """The gradient so far of its holder."""
        return self._grads.get(holder)

    def set_grad(self, tensor: Holder, grad: torch.Tensor | None = None) -> None:
        """Replace the gradient; raises ShapeError or InvalidArgument for one that does not fit."""
        holder, at = self.holder(tensor), self.recorder.tape.at
        (self.recorder.carried.clear if grad is None else self.recorder.carried.set)(holder)
        self._present.pop(holder, None)
        if grad is None:
            self._grads.pop(holder, None)
            return
        if not isinstance(grad, torch.Tensor):
            raise InvalidArgument(f"a .grad is a tensor or None, not {type(grad).__name__}{at()}")
        if tuple(grad.shape) != tuple(holder.shape):
            found, wanted = getattr(grad, "spec", list(grad.shape)), getattr(holder, "spec", list(holder.shape))
            raise ShapeError(f"a .grad of shape {found} was assigned to a tensor of {wanted}{at()}")
        if grad.dtype != holder.dtype:
            raise InvalidArgument(f"a .grad of {grad.dtype} was assigned to a tensor of {holder.dtype}{at()}")
        self._grads[holder] = grad
        if isinstance(grad, Tensor) and (present := self._presence_of(holder, grad)) is not None:
            self._present[holder] = present

    def _presence_of(self, holder: Holder, grad: Tensor) -> torch.Tensor | None:
        """Whether a run has a gradient that the program computed from the holder's own one: plain PyTorch has either
        both or none.
        """
        asked = {value: present for value, (of, present) in self._asked.items() if of is holder}
        first = min((value.node for value in asked), default=0)
        ahead, seen = [self.recorder.look(grad).value] if asked else [], set[int]()
        while ahead:
            value = ahead.pop()
            if value in asked:
                return asked[value]
            if value.node >= first and value.node not in seen:
                seen.add(value.node)
                ahead += self.recorder.node(value.node).inputs
        return None

    def present(self, holder: Holder) -> torch.Tensor | None:
        """Whether a run has the gradient, which is zeros otherwise; None for one that each run has."""
        return self._present.get(holder)

    def accumulate(self, holder: Holder, grad: torch.Tensor, presence: Presence, *, keep_graph: bool) -> None:
        """Add to the gradient as torch does: in place, unless the sum is to be differentiated again."""
        self.recorder.carried.fill(holder)
        before = self.held(holder)
        total = presence if before is None else either([self._present.get(holder, True), presence])
        self._present.pop(holder, None)
        if isinstance(total, torch.Tensor):
            self._present[holder] = total
        if before is None:
            self._grads[holder] = grad
        elif keep_graph:
            self._grads[holder] = before + grad
        else:
            with torch.no_grad():
                before.add_(grad)

    def leaves(self) -> list[tuple[Any, Any]]:
        """(holder, Variable or recorded tensor) of everything whose ``.grad`` a backward pass may fill."""
        read = (node.attrs["variable"] for node in self.recorder.nodes if node.op == "tfnb.read")
        found: list[tuple[Any, Any]] = [(v, v) for v in dict.fromkeys(read) if v.trainable]
        marked = (t for t in list(self.recorder.live) if flag(t) or t in self._retained)
        return found + [(tensor, self.source(tensor)) for tensor in marked]

    def source(self, holder: Any) -> Any:
        """The Variable or recorded tensor whose gradient a holder's ``.grad`` is."""
        if isinstance(holder, Variable):
            return holder
        return self.recorder.tensor(self._born(holder.value) if flag(holder) else holder.value)

    def _born(self, value: Value) -> Value:
        """The value of a leaf before writes with grad mode off."""
        node = self.recorder.node(value.node)
        while {"no_grad", "in_place"} <= node.tags:
            value = node.inputs[0]
            node = self.recorder.node(value.node)
        return value

    # -- what autograd would know of a recorded tensor ------------------------------------------------------------

    def requires_grad(self, tensor: Tensor) -> bool:
        """Whether a leaf (trainable Variable, recorded tensor that requires a gradient) has a path to ``tensor``."""
        if flag(tensor):
            return True
        if tensor.graph is not self.recorder.graph:
            return False
        leaves = [x for _, x in self.leaves() if x is not tensor]
        reads = {id(x) for x in leaves if isinstance(x, Variable)}
        nodes = self.recorder.nodes
        live = (n for n in nodes if n.op == "tfnb.read" and FROZEN not in n.tags)
        targets = {x.value for x in leaves if isinstance(x, Tensor)}
        walk = Walk(self.recorder, targets | {n.value() for n in live if id(n.attrs["variable"]) in reads})
        walk.reach(nodes)
        return tensor.value in walk.reached

    def is_leaf(self, tensor: Tensor) -> bool:
        """Whether nothing that requires a gradient was computed into this tensor."""
        return flag(tensor) or not self.requires_grad(tensor)

    def mark(self, tensor: Tensor, requires_grad: bool = True) -> Tensor:
        """``requires_grad_`` of a recorded tensor: a leaf from here on."""
        self.recorder.lasting.keep(FLAG, tensor)
        if not requires_grad:
            set_flag(tensor, False)
        elif not self.requires_grad(tensor):
            if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
                raise InvalidArgument(
                    f"only floating-point and complex tensors can require gradients: {tensor.name} is {tensor.spec}"
                    f"{self.recorder.tape.at()}"
                )
            if any(tensor.value in node.inputs for node in self.recorder.nodes):  # earlier uses are no part of it
                rebind(self.recorder, tensor, torch.ops.aten.alias(tensor))
            set_flag(tensor, True)
        return tensor

    def reread(self, var: Variable, *, thawed: bool) -> None:
        """Freeze or train a variable from here on: later nodes depend on it separately from earlier ones.

        What was computed while it was frozen has no path to it.
        """
        rec = self.recorder
        base = rec.tape.reads.get(var)
        if base is None or rec.tape.is_earlier(base.entry.value):
            return
        if base.version:  # written here: one value for all that follows
            used = (node for node in rec.new if base.entry.value in node.inputs and "no_grad" not in node.tags)
            if thawed and any(used):
                raise Unsupported(
                    f"requires_grad of {var.name} is set after it was written and used in this recording: set it before"
                    f"{rec.tape.at()}"
                )
            return
        if thawed:
            rec.tape.tag(base.entry.value.node, FROZEN)
        del rec.tape.reads[var]

    def retain(self, tensor: Tensor) -> None:
        """``retain_grad``: the gradient of an inner value is kept in its ``.grad``."""
        self._wanted(tensor, "retain_grad()")
        if not flag(tensor):
            self.recorder.lasting.keep(self._retaining, tensor)
            self._retained[tensor] = True

    def _forget(self, tensor: Tensor, _: bool) -> None:
        """Take back the first `retain`."""
        self._retained.pop(tensor, None)

    def is_retained(self, tensor: Tensor) -> bool:
        """Whether ``retain_grad`` was called."""
        return tensor in self._retained

    def register_hook(self, tensor: Tensor, hook: Callable[..., Any]) -> RemovableHandle:
        """``hook`` is called with the gradient of this value by every backward pass recorded later."""
        inside = self.recorder.inside
        if inside and tensor.value.node not in {node.id for node in self.recorder.new[inside[-1].at :]}:
            raise self.hooked_outside(tensor.name)
        if not inside:  # a value that a loop carries says nothing of its paths while the loop is recorded
            self._wanted(tensor, "a gradient hook")
        hooks = self.hooks.setdefault(tensor.value, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def hooked_outside(self, name: str) -> Unsupported:
        """The error of a hook that only some runs would register."""
        return Unsupported(
            f"register_hook of {name} inside of a branch, loop or function of the graph in which it is not computed: "
            "register it where the tensor is computed, with a hook that asks the tensor, as in "
            f"`lambda g: torch.where(test, 2 * g, g)`{self.recorder.tape.at()}"
        )

    def _wanted(self, tensor: Tensor, what: str) -> None:
        if not self.requires_grad(tensor):
            raise FailedPrecondition(
                f"{what} of {tensor.name}, which does not depend on anything that requires a gradient"
                f"{self.recorder.tape.at()}"
            )


def _union(*holders: WeakIdKeyDictionary) -> list[Holder]:
    """Every holder once; Variables have a length, and tensors no truth, so nothing but identity compares them."""
    found = WeakIdKeyDictionary()
    for each in holders:
        found.update(each)
    return list(found.keys())
