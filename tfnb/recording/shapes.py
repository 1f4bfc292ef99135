"""Shape rules remembered: torch's fake kernels, asked once for arguments of the same metadata.

Models repeat their blocks, so the same question comes again and again, and with symbolic sizes each answer takes
milliseconds. Fake tensors are never written here: equal ones are one object, and its identity stands for it in keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tfnb.graph import Spec
from tfnb.recording.examples import Examples, Fresh
from tfnb.recording.ops import Op, facts
from tfnb.recording.symbols import Symbols

_PURE = frozenset({"aten", "prims", "tfnb"})  # a fake kernel of a user's op may do anything
_BY_DATA = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Shapes:
    """Fake results of ops in one graph."""

    def __init__(self, symbols: Symbols) -> None:
        self.symbols = symbols
        self._results: dict[Any, Any] = {}
        self._dense: dict[Any, torch.Tensor] = {}  # metadata of fresh memory -> the one fake tensor that has it
        self._kept: dict[int, torch.Tensor] = {}  # every fake tensor whose identity stands in a key
        self._specs: dict[int, Spec] = {}
        self._contiguous: dict[Any, torch.Tensor] = {}  # dtype, device and sizes -> the same
        self._examples = Examples()
        self._relations = 0

    def call(self, func: Op, args: Any, kwargs: Any, rule: Callable[..., Any]) -> Any:
        """What ``rule``, the shape rule of ``func``, returns on these fake tensors. Raises what it raises."""
        __tracebackhide__ = True
        key = self._key(func, args, kwargs)
        found = None if key is None else self._results.get(key)
        if found is not None:
            return found
        if key is not None and not facts(func).is_view:
            found = self._by_example(args, kwargs, rule)
            if found is not None:
                self._results[key] = found
                return found
        with self.symbols.kernel():
            out = rule(*args, **kwargs)
        if key is None or not self._lasting(out):
            return out
        if not facts(func).is_view:
            out = type(out)(map(self._one, out)) if isinstance(out, (list, tuple)) else self._one(out)
        self._forget_on_new_relation()  # the kernel may have made one, and then the key is of another time
        self._results[self._key(func, args, kwargs)] = out
        return out

    def _by_example(self, args: Any, kwargs: Any, rule: Callable[..., Any]) -> Any:
        with self.symbols.unlogged():
            found = self._examples.ask(args, kwargs, rule)
        if found is None:
            return None
        return self._fresh(found) if isinstance(found, Fresh) else type(found)(map(self._fresh, found))

    def _fresh(self, wanted: Fresh | None) -> torch.Tensor | None:
        """The fake tensor of contiguous memory with these sizes."""
        if wanted is None:
            return None
        key = (wanted.dtype, wanted.device, *map(_expr, wanted.shape))
        found = self._contiguous.get(key)
        if found is None:
            with self.symbols.kernel():
                made = torch.empty(wanted.shape, dtype=wanted.dtype, device=wanted.device)
            found = self._contiguous[key] = self._one(made)
        return found

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor with the static shape and strides of a plain tensor."""
        plain = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
        if not plain or tensor.untyped_storage().nbytes() != tensor.nbytes:
            return self.symbols.fake_like(tensor)
        found = self._dense.get(_metadata(tensor))
        return self._one(self.symbols.fake_like(tensor)) if found is None else found

    def spec(self, fake: torch.Tensor) -> Spec:
        """The Spec of a fake tensor."""
        self._forget_on_new_relation()
        found = self._specs.get(id(fake))
        if found is None:
            found = self.symbols.spec(fake)
            if id(fake) in self._kept:
                self._specs[id(fake)] = found
        return found

    def _forget_on_new_relation(self) -> None:
        """Sizes that became equal or fixed change what the metadata says."""
        relations = len(self.symbols.env.replacements)
        if relations != self._relations:
            self._relations = relations
            self._results.clear()
            self._dense.clear()
            self._contiguous.clear()
            self._examples.forget()
            self._specs.clear()

    def _key(self, func: Op, args: Any, kwargs: Any) -> Any:
        """What the result depends on; None if it may be another one for the same arguments."""
        if not _repeats(func):
            return None
        self._forget_on_new_relation()
        try:
            key = (func, torch.get_default_dtype(), self.symbols.env.scope, self._part(args), self._part(kwargs))
            hash(key)
        except TypeError:
            return None
        return key

    def _part(self, tree: Any) -> Any:
        if isinstance(tree, FakeTensor):
            self._kept[id(tree)] = tree
            return id(tree)
        if isinstance(tree, (list, tuple)):
            return tuple(map(self._part, tree))
        if isinstance(tree, Mapping):
            return tuple((name, self._part(item)) for name, item in tree.items())
        if isinstance(tree, torch.Tensor):
            raise TypeError("only fake tensors stand for themselves")
        if isinstance(tree, _SYMBOLIC):
            return (_SYMBOLIC, tree.node.expr)
        return (type(tree), tree)  # True, 1 and 1.0 promote differently

    @staticmethod
    def _lasting(out: Any) -> bool:
        """Whether these are fake tensors that would be the same again: plain memory, no size that data decide."""
        flat = out if isinstance(out, (list, tuple)) else (out,)
        return all(
            item is None
            or (
                type(item) is FakeTensor and item.layout is torch.strided and item.constant is None
                and all(not isinstance(s, torch.SymInt) or s.node.hint is not None for s in item.shape)
            )
            for item in flat
        )  # fmt: skip

    def _one(self, fake: Any) -> Any:
        """The fake tensor that stands for all with this metadata and memory of their own."""
        if fake is None:
            return None
        found = self._dense.setdefault(_metadata(fake), fake)
        self._kept[id(found)] = found
        return found


def _metadata(tensor: torch.Tensor) -> Any:
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return (tensor.dtype, tensor.device, *map(_expr, sizes))


def _expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


@cache
def sized_by_data(func: Op) -> bool:
    """Whether the sizes of the result are known from the data alone."""
    return not _BY_DATA.isdisjoint(func.tags)


@cache
def _repeats(func: Op) -> bool:
    """Whether the fake kernel gives the same for the same metadata."""
    return func.namespace in _PURE and not sized_by_data(func)
