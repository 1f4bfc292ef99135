"""Shape rules remembered: torch's fake kernels, asked once for arguments of the same metadata.

Models repeat their blocks, so the same question comes again and again, and with symbolic sizes each answer takes
milliseconds. Fake tensors are never written here: equal ones are one object, and its identity stands for it in keys.
Where in their memory they begin counts for views, and for no op that was seen to begin its results anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.graph import Spec
from tfnb.graph.node import leaves
from tfnb.graph.op_facts import Op, facts
from tfnb.recording.shapes.symbols import Symbols

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
        self._later: dict[int, Any] = {}  # what stands in keys for a fake tensor that begins later in its memory
        self._alike: dict[Any, int] = {}  # metadata of such, but for where they begin -> the first one
        self._relations = 0

    def call(self, func: Op, args: Any, kwargs: Any, rule: Callable[..., Any]) -> Any:
        """Results of ``rule``, the shape rule of ``func``, on fake tensors, from the cache if possible. Raises the
        rule's errors.
        """
        __tracebackhide__ = True
        key = self._key(func, args, kwargs)
        found = None if key is None else self._results.get(key)
        if found is not None:
            return found
        is_view = facts(func).is_view
        if key is not None and is_view and func.namespace == "aten" and all(map(_is_plain, leaves((args, kwargs)))):
            out = self._view(func, args, kwargs)
        else:
            with self.symbols.kernel():
                out = rule(*args, **kwargs)
        if key is None or not self._lasting(out):
            return out
        if not is_view:
            out = type(out)(map(self._one, out)) if isinstance(out, (list, tuple)) else self._one(out)
        self._forget_on_new_relation()  # the kernel may have made one, and then the key is of another time
        if is_view or _begin_anew(out):
            self._results[self._key(func, args, kwargs)] = out
        return out

    def _view(self, func: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A view with static sizes: torch's kernel without the slower path through the fake mode."""
        device = next(leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, FakeTensor)).fake_device
        mode = self.symbols.fake_mode
        with _disable_current_modes(), in_kernel_invocation_manager(mode):
            out = func(*args, **kwargs)
        return (
            [FakeTensor(mode, each, device) for each in out] if isinstance(out, list) else FakeTensor(mode, out, device)
        )

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor with the static shape and strides of a plain tensor."""
        plain = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
        if not plain or tensor.untyped_storage().nbytes() != tensor.nbytes:
            return self.symbols.fake_like(tensor)
        found = self._dense.get(_metadata(tensor))
        return self._one(self.symbols.fake_dense(tensor)) if found is None else found

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
        """Clear the cache after sizes became equal or fixed, since the metadata changed."""
        relations = len(self.symbols.env.replacements)
        if relations != self._relations:
            self._relations = relations
            self._results.clear()
            self._dense.clear()
            self._later.clear()
            self._alike.clear()
            self._specs.clear()

    def _key(self, func: Op, args: object, kwargs: object) -> Any:
        """Everything that the result depends on; None if equal arguments may give another result."""
        if not _repeats(func):
            return None
        self._forget_on_new_relation()
        name = self._itself if facts(func).is_view else self._wherever
        try:
            parts = self._part(args, name), self._part(kwargs, name)
            key = (func, torch.get_default_dtype(), *parts)
            hash(key)
        except TypeError:
            return None
        return key

    def _part(self, tree: object, name: Callable[[FakeTensor], Any]) -> Any:
        if isinstance(tree, FakeTensor):
            return name(tree)
        if isinstance(tree, (list, tuple)):
            return tuple([self._part(item, name) for item in tree])
        if isinstance(tree, Mapping):
            return tuple([(key, self._part(item, name)) for key, item in tree.items()])
        if isinstance(tree, torch.Tensor):
            raise TypeError("only fake tensors stand for themselves")
        if isinstance(tree, _SYMBOLIC):
            return (_SYMBOLIC, tree.node.expr)
        return (type(tree), tree)  # True, 1 and 1.0 promote differently

    def _itself(self, fake: FakeTensor) -> int:
        self._kept[id(fake)] = fake
        return id(fake)

    def _wherever(self, fake: FakeTensor) -> Any:
        """A cache key shared by fake tensors that differ only in a nonzero storage offset."""
        at = self._itself(fake)
        if _begins(fake) or fake.constant is not None:
            return at
        found = self._later.get(at)
        if found is None:
            whole = (fake.dtype, fake.device, fake.is_conj(), fake.is_neg(), *_sizes(fake))
            found = self._later[at] = ("later", self._alike.setdefault(whole, at))
        return found

    @staticmethod
    def _lasting(out: object) -> bool:
        """Whether results may be cached: fake tensors of plain memory, without data-dependent sizes."""
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


def _is_plain(leaf: object) -> bool:
    """Whether this argument of a view says all by itself: numbers, memory of real numbers with such sizes."""
    if isinstance(leaf, FakeTensor):
        is_real = leaf.layout is torch.strided and not leaf.dtype.is_complex and leaf.constant is None
        return is_real and not leaf._has_symbolic_sizes_strides
    return not isinstance(leaf, (torch.Tensor, *_SYMBOLIC))


def _begins(fake: torch.Tensor) -> bool:
    """Whether a tensor lies at the start of its memory, or where only sizes tell."""
    at = fake.storage_offset() if fake.layout is torch.strided else 0
    return isinstance(at, torch.SymInt) or at == 0


def _begin_anew(out: object) -> bool:
    """Whether results lie at the start of their memory, and so not where an argument lies that begins later."""
    return all(item is None or _begins(item) for item in (out if isinstance(out, (list, tuple)) else (out,)))


def _sizes(tensor: torch.Tensor) -> Any:
    return (*map(_expr, tensor.shape), *map(_expr, tensor.stride()))


def _metadata(tensor: torch.Tensor) -> Any:
    return (tensor.dtype, tensor.device, *_sizes(tensor), _expr(tensor.storage_offset()))


def _expr(size: object) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


@cache
def sized_by_data(func: Op) -> bool:
    """Whether the sizes of the result are known from the data alone."""
    return not _BY_DATA.isdisjoint(func.tags)


@cache
def _repeats(func: Op) -> bool:
    """Whether the fake kernel gives the same for the same metadata."""
    return func.namespace in _PURE and not sized_by_data(func)
