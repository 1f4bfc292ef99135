"""Buffers of modules that a recording gives other tensors: `m.h = m.h + x` is an assignment of the buffer's Variable.

Until the block ends the module holds a recorded tensor, the `Binding` of that buffer, so that Python's aliases are
torch's: names taken before keep the old value, and a write in place into the new tensor writes the Variable. Then the
module holds its own tensor again. torch's hooks on registration tell of most assignments, `compare` finds the others.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tfnb.errors import Unsupported
from tfnb.graph import Value, Variable
from tfnb.recording.values.recording import Recording
from tfnb.recording.values.tape import TapeState
from tfnb.recording.values.tensor import Base, Tensor
from tfnb.recording.values.variables import known
from tfnb.recording.writes.aliases import family, may_share
from tfnb.recording.writes.in_place_calls import become

aten = torch.ops.aten
_WHOLE = (aten.detach.default, aten.alias.default)  # views of all of a tensor, in its shape
Held = list[tuple[torch.nn.Module, dict[str, torch.Tensor | None]]]  # modules, and buffers that they held at a time


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """The tensor that a recording gave one buffer of one module, beside the one that the module had before."""

    module: torch.nn.Module
    name: str
    original: torch.Tensor
    variable: Variable
    given: Tensor
    base: Base  # of ``given``

    def hold(self, tensor: torch.Tensor) -> None:
        """Let the module hold this tensor, unless the program has taken the buffer away."""
        if self.name in self.module._buffers:
            self.module._buffers[self.name] = tensor


class Rebound(NamedTuple):
    """A buffer rebound to another tensor by a loop or branch, and whether the earlier tensor was written as well."""

    binding: Binding
    is_mixed: bool


class _KnownModule(NamedTuple):
    """A module as first met by this recording."""

    module: torch.nn.Module
    buffers: dict[str, torch.Tensor | None]
    is_earlier: bool  # whether it was found before the block began

    def changed(self) -> list[tuple[str, torch.Tensor | None]]:
        """The buffers that are other tensors now, or are new."""
        table, before = self.module._buffers, self.buffers
        if len(table) == len(before) and all(map(operator.is_, table.values(), before.values())):
            return []  # as nearly always
        return [(name, now) for name, now in table.items() if now is not before.get(name)]

    def restore(self, name: str) -> None:
        """Restore the module's earlier buffer, or remove the buffer if there was none."""
        if name in self.buffers:
            self.module._buffers[name] = self.buffers[name]
        else:
            del self.module._buffers[name]


class Buffers:
    """The buffers and parameters of the modules that one recording knows."""

    def __init__(self, recording: Recording) -> None:
        self._rec = recording
        self._known: dict[int, _KnownModule] = {}  # modules that have buffers, by their ids
        self._without: dict[int, torch.nn.Module] = {}  # those that have none
        self._given = WeakIdKeyDictionary()  # the tensors that buffers were given

    def meet(self, roots: Iterable[torch.nn.Module], *, is_earlier: bool = False) -> None:
        """Remember the buffers of these modules and their submodules."""
        stack, known_before, without = list(roots), self._known, self._without
        while stack:
            module = stack.pop()
            key = id(module)
            if module is None or key in known_before or key in without:
                continue
            own = module.__dict__
            if own.get("_buffers") and not isinstance(module, torch.jit.ScriptModule):  # which makes its tensors anew
                known_before[key] = _KnownModule(module, own["_buffers"].copy(), is_earlier)
            else:
                without[key] = module
            if inner := own.get("_modules"):
                stack += inner.values()

    # -- what torch's hooks tell ----------------------------------------------------------------------------------

    def register(self, module: torch.nn.Module, name: str, new: torch.Tensor | None) -> torch.Tensor | None:
        """A buffer is about to be set; returns the tensor that the module shall hold in place of ``new``, if any."""
        old = module._buffers.get(name)
        if old is new:
            return None
        found = self._found(module, has_any=old is not None)
        if found is None:  # it is being made
            return None
        is_recorded = isinstance(new, Tensor)
        if old is None and is_recorded:
            raise self._refused(module, name, None, new)
        if not is_recorded and (old is None or self._rec.is_unused(old)):
            found.buffers[name] = new
            return None
        return self._assign(found, name, old, new) if self._is_own(found, name, old) else None

    def _found(self, module: torch.nn.Module, *, has_any: bool) -> _KnownModule | None:
        """The module as first met by this recording; None if unknown and without buffers so far."""
        if has_any:
            self.meet([module])
        elif self._without.pop(id(module), None) is not None:
            self._known[id(module)] = _KnownModule(module, {}, is_earlier=True)
        return self._known.get(id(module))

    def replace_parameter(self, module: torch.nn.Module, name: str, new: torch.nn.Parameter | None) -> None:
        """Raises Unsupported where a Parameter takes the place of one whose Variable the graph has."""
        old = module._parameters.get(name)
        if old is None or old is new or not isinstance(old, torch.nn.Parameter):
            return
        var = known(old)
        is_recorded = var is not None and any(node.attrs.get("variable") is var for node in self._rec.nodes)
        is_computed = new is not None and not self._rec.born.get(new, True)
        if not is_recorded and not is_computed:
            return
        which = "one that is recorded" if is_recorded else "its own, computed of recorded values"
        raise Unsupported(
            f"{type(module).__name__} is given a new Parameter {name} in the place of {which}: "
            "write into it, as in `with torch.no_grad(): p.copy_(...)`, or make the new Parameter before the "
            f"cell{self._rec.tape.at()}"
        )

    def follows(self, owner: object, name: str) -> bool:
        """Whether an attribute is a buffer whose rebinding is an assignment."""
        if not isinstance(owner, torch.nn.Module) or name not in vars(owner).get("_buffers", ()):
            return False
        self.meet([owner])
        found = self._known.get(id(owner))
        old = owner._buffers[name]
        return found is not None and old is not None and self._is_own(found, name, old)

    # -- comparison -----------------------------------------------------------------------------------------------

    def held(self, root: torch.nn.Module, *, deep: bool) -> Held:
        """The buffers of a module and of its submodules; modules without buffers are left out."""
        modules = root.modules() if deep else (root,)
        return [(module, dict(module._buffers)) for module in modules if module._buffers]

    def compare_held(self, held: Held) -> None:
        """Record the rebindings by ``_buffers[...] = `` since: of own buffers, to recorded tensors."""
        for module, before in held:
            for name, now in list(module._buffers.items()):
                if now is not before.get(name) and isinstance(now, Tensor) and now not in self._given:
                    found = self._known.get(id(module))
                    if found is not None and before.get(name) is None:
                        found.restore(name)
                        raise self._refused(module, name, None, now)
                    if found is not None and self._is_own(found, name, before[name], earlier=True):
                        self._assign_late(found, name, now)

    def compare(self) -> None:
        """Record rebindings by ``_buffers[...] = `` in known modules, and refuse their new Parameters."""
        if self._rec.scopes.module is not None:  # a call of functional_call gives them others for a while
            return
        for found in list(self._known.values()):
            for name, now in found.changed():
                if now is not self._expected(found, name):
                    self._compare(found, name, now)
        for tensor, handle in list(self._rec.tape.memory.values()):
            if isinstance(tensor, torch.nn.Parameter) and handle._family.variable is not None:
                self._compare_parameter(tensor)

    def _compare(self, found: _KnownModule, name: str, now: torch.Tensor | None) -> None:
        expected = self._expected(found, name)
        if isinstance(now, Tensor) and expected is None:
            found.restore(name)
            raise self._refused(found.module, name, None, now)
        is_counted = isinstance(now, Tensor) or (found.is_earlier and now is not None)
        if is_counted and expected is not None and self._is_own(found, name, expected):
            if self._rec.is_unused(expected) and not isinstance(now, Tensor):
                return
            self._assign_late(found, name, now)

    def _compare_parameter(self, parameter: torch.nn.Parameter) -> None:
        """Refuse another Parameter in a place of a recorded one; the module has its own again."""
        for module, name in self._rec.scopes.places(parameter):
            if isinstance(module, torch.jit.ScriptModule):
                continue
            now = module._parameters.get(name, parameter)
            if now is not parameter:
                module._parameters[name] = parameter
                self.replace_parameter(module, name, now)

    # -- assignments ----------------------------------------------------------------------------------------------

    def _expected(self, found: _KnownModule, name: str) -> torch.Tensor | None:
        """The tensor of a buffer unless somebody rebound it by ``_buffers[...] = ``."""
        binding = self._rec.tape.bindings.get((id(found.module), name))
        return found.buffers.get(name) if binding is None else binding.given

    def _is_own(self, found: _KnownModule, name: str, old: torch.Tensor | None, *, earlier: bool = False) -> bool:
        """Whether a module holds its own tensor, not one lent by functional_call; ``earlier``: or held before."""
        if old is not self._expected(found, name):
            return earlier and (old is found.buffers.get(name) or old in self._given)
        return isinstance(found.buffers.get(name), torch.Tensor) and not isinstance(found.buffers[name], Tensor)

    def _assign_late(self, found: _KnownModule, name: str, now: torch.Tensor | None) -> None:
        """An assignment that comparison found: recorded where the new value was computed."""
        table = found.module._buffers
        table[name] = self._expected(found, name)
        start = len(self._rec.new)
        value = now._family.entry.value if isinstance(now, Tensor) else None
        table[name] = self._assign(found, name, table[name], now)
        if value is not None and not self._rec.inside:
            self._move(value, start)

    def _move(self, value: Value, start: int) -> None:
        """Move the last recorded assignment next to its value's node, so that consumers of the value run the
        assignment.
        """
        tape = self._rec.tape
        made = tape.new[start:]
        if len(made) != 1 or made[0].op != "tfnb.assign" or made[0].inputs != (value,):
            return
        at = next((i for i, node in enumerate(tape.new) if node.id == value.node), None)
        later = () if at is None else tape.new[at + 1 : -1]
        variable = made[0].attrs["variable"]
        if at is None or any(n.op == "tfnb.assign" and n.attrs["variable"] is variable for n in later):
            return
        first, to = tape.new[at], made[0].value()
        assign = replace(made[0], control=first.control, source=first.source)
        moved = [
            replace(node, inputs=tuple(to if v == value else v for v in node.inputs)) if value in node.inputs else node
            for node in later
        ]
        tape.new[at + 1 :] = [assign, *moved]
        tape.by_id.update((node.id, node) for node in tape.new[at + 1 :])

    def _assign(
        self, found: _KnownModule, name: str, old: torch.Tensor | None, new: torch.Tensor | None
    ) -> torch.Tensor | None:  # fmt: skip
        """Record an assignment of a buffer's Variable; returns the recorded tensor that the module is to hold."""
        module, original, rec = found.module, found.buffers[name], self._rec
        assert old is not None and original is not None
        if new is None or old.shape != new.shape or old.dtype != new.dtype:
            raise self._refused(module, name, old, new)
        var = self._variable(module, name, original)
        handle, base = rec.handle(new), rec._read_base(var)
        is_whole = all(view.op in _WHOLE for view in handle._chain)
        if old is original and handle._family is base and is_whole and not var.trainable:
            return old  # m.h = m.h.detach()
        given = self._memory(handle, new, original, is_whole=is_whole)
        return self._give(Binding(module, name, original, var, given, given._family))

    def _give(self, binding: Binding) -> Tensor:
        """Record the assignment of a binding's tensor."""
        self._part(binding)
        self._rec.tape.reads[binding.variable] = binding.base
        become(self._rec, binding.base, binding.base.entry)
        return self._bind(binding)

    def _bind(self, binding: Binding) -> Tensor:
        """The module holds the binding's tensor until the end of the block, loop or branch."""
        self._rec.tape.bindings[id(binding.module), binding.name] = binding
        self._given[binding.given] = True
        return binding.given

    def _part(self, binding: Binding) -> None:
        """Detach a buffer's old tensor from the Variable; the tensor keeps its value."""
        rec, var, original = self._rec, binding.variable, binding.original
        before = rec._read_base(var)
        if id(original) not in rec.tape.handles:
            rec.tape.handles[id(original)] = original, rec._wrap(before.entry, before)
        before.variable = before.written = None
        rec.stand(binding.base, var)

    def _memory(self, handle: Tensor, new: torch.Tensor | None, original: torch.Tensor, *, is_whole: bool) -> Tensor:
        """The tensor itself where its memory may become the Variable's, else another of the same value.

        While somebody holds the first one, which would be the same memory in torch, neither may be written in place.
        """
        rec, base = self._rec, handle._family
        tied = base.frozen or base.twins or base.copies or base.shares or base.variable is not None
        plain = (known_handle for tensor, known_handle in rec.tape.handles.values() if tensor is not original)
        if (
            is_whole and not tied and not rec.inside and handle in rec.live and not _is_leaf(handle)
            and not rec.tape.is_of_another_cell(base.entry.value) and all(each._family is not base for each in plain)
        ):  # fmt: skip
            return handle
        other = rec.fresh(handle)
        may_share(other, family(base), "a buffer of a module was given it")
        return other

    def _variable(self, module: torch.nn.Module, name: str, original: torch.Tensor) -> Variable:
        """The Variable of a buffer. Raises Unsupported if other modules hold the same tensor, since they would
        diverge.
        """
        rec = self._rec
        binding = rec.tape.bindings.get((id(module), name))
        if binding is not None:
            return binding.variable
        rec.scopes.know(module, name, original)
        for other, attribute in self._places(original):
            if (other is not module or attribute != name) and other._buffers.get(attribute) is original:
                raise Unsupported(
                    f"{type(module).__name__} gives its buffer {name} another tensor, and {type(other).__name__} holds "
                    f"the old one as {attribute}: write into it, as in `m.{name}.copy_(...)`{rec.tape.at()}"
                )
        met = rec.tape.handles.get(id(original))
        if met is not None:
            raise Unsupported(
                f"{type(module).__name__} gives its buffer {name} another tensor, and what it held was read before, "
                f"where nothing said that it is a buffer: give the module a name of its own{rec.tape.at()}"
            )
        var = rec.variable_of(original)
        assert var is not None
        return var

    def _places(self, tensor: torch.Tensor) -> Iterator[tuple[torch.nn.Module, str]]:
        for found in self._known.values():
            yield from ((found.module, name) for name, each in found.buffers.items() if each is tensor)

    def _refused(
        self, module: torch.nn.Module, name: str, old: torch.Tensor | None, new: torch.Tensor | None
    ) -> Unsupported:  # fmt: skip
        """The error for a value that a buffer cannot take."""
        at = self._rec.tape.at()
        if new is None:
            return Unsupported(f"{type(module).__name__} loses its buffer {name} while recording: do so before{at}")
        held = "nothing" if old is None else f"{old.dtype}{list(old.shape)}"
        return Unsupported(
            f"{type(module).__name__} gives its buffer {name}, which held {held}, a value of {new.dtype}"
            f"{list(new.shape)} while recording: make it so in the constructor, or, if it is kept from call to call, "
            f"by a call of the model before the recording{at}"
        )

    # -- loops and branches -----------------------------------------------------------------------------------------

    def release(self, before: TapeState, versions: dict[Base, int]) -> dict[Base, Rebound]:
        """At the end of a loop's or branch's function: turn its rebindings into writes of the Variables' earlier
        memory.

        versions: of what it found when it was called. The caller repeats them behind the loop or branch by `rebind`.
        """
        tape, rebound = self._rec.tape, {}
        self.compare()
        for key, binding in tape.bindings.items():
            if before.bindings.get(key) is binding:
                continue
            var, met = binding.variable, tape.handles.get(id(binding.original))
            current = tape.reads[var]
            first = before.reads.get(var) or (current if met is None else met[1]._family)
            if current is not first:
                rebound[first] = Rebound(binding, first in versions and versions[first] != first.version)
                first.become(current.entry)
                tape.reads[var] = first
        self.put_back(dict(tape.bindings), before)
        return rebound

    def put_back(self, bindings: dict[tuple[int, str], Binding], before: TapeState) -> None:
        """Restore the modules to an earlier state. ``bindings`` were made since; reads are as of then."""
        tape = self._rec.tape
        for key in {**bindings, **before.bindings}:
            now, earlier = bindings.get(key), before.bindings.get(key)
            if now is earlier:
                continue
            any_of_them = earlier or now
            assert any_of_them is not None
            any_of_them.hold(any_of_them.original if earlier is None else earlier.given)
            self._forget_handle(any_of_them.original, before)
            if now is not None:
                now.base.variable = now.base.written = None
            base = tape.reads.get(any_of_them.variable)
            if base is not None:
                self._rec.stand(base, any_of_them.variable)
        tape.bindings = dict(before.bindings)

    def _forget_handle(self, original: torch.Tensor, before: TapeState) -> None:
        handles = self._rec.tape.handles
        handles.pop(id(original), None)
        if id(original) in before.handles:
            handles[id(original)] = before.handles[id(original)]

    def rebind(self, rebound: Rebound, tensor: Tensor) -> None:
        """A loop or branch gave a buffer this tensor."""
        binding, rec = rebound.binding, self._rec
        before = rec._read_base(binding.variable)
        given = rec.fresh(tensor)
        binding.hold(self._give(replace(binding, given=given, base=given._family)))
        if rebound.is_mixed:
            self._lose(before, binding)

    def set_apart(self, binding: Binding) -> Base:
        """Before a loop that rebinds a buffer: invalidate other holders of the earlier tensor.

        Inside, only the first iteration would find it equal to the buffer. Returns the memory of the buffer.
        """
        rec = self._rec
        before = rec._read_base(binding.variable)
        given = rec._wrap(before.entry)
        apart = replace(binding, given=given, base=given._family)
        self._part(apart)
        rec.tape.reads[binding.variable] = apart.base
        binding.hold(self._bind(apart))
        self._lose(before, binding)
        return apart.base

    def _lose(self, base: Base, binding: Binding) -> None:
        entry = base.entry.light()
        entry.lost = (
            f"the tensor that the buffer {binding.name} of {type(binding.module).__name__} held before a loop or "
            "branch gave it another one is read: clone() it there"
        )
        base.become(entry)

    # -- the end ----------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """At the end of the block, also by an error: no module holds a recorded tensor in place of its own."""
        for binding in self._rec.tape.bindings.values():
            binding.hold(binding.original)
        for found in self._known.values():
            for name, now in found.changed():
                if isinstance(now, Tensor) and not isinstance(found.buffers.get(name), Tensor):
                    found.restore(name)
        self._known.clear()
        self._without.clear()


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Whether the program set ``requires_grad_`` on the tensor."""
    with torch._C.DisableTorchFunction():
        return tensor.requires_grad


__all__ = ["Binding", "Buffers", "Rebound"]
