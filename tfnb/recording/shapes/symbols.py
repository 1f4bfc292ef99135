"""Symbolic sizes of one graph: a ShapeEnv, the letters users see, and the relations assumed by the recording.

torch's fake tensors give every op's shape rule. A relation between sizes that the user's line (or a decomposition)
asks for chose which ops were recorded, so it becomes a Guard. Inside the fake kernel of one op only equalities count:
its inequalities (a convolution picking an algorithm by batch < 16) would refuse a short last batch.
Private torch names used here were tried with torch 2.11 and 2.13.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from types import FrameType
from typing import Any, Protocol

import sympy
import torch
from torch._guards import GuardSource, SLoc, Source
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from tfnb.errors import ShapeError
from tfnb.graph import Dim, Spec
from tfnb.graph.contents import unique
from tfnb.graph.setting import setting
from tfnb.graph.spec import Size
from tfnb.recording.shapes.fakes import imported

_LOG = logging.getLogger("torch._subclasses.fake_tensor")
# The modules between Python's question and its answer.
_ASKING = frozenset({
    __name__, "tfnb.recording.values.tensor", "torch", "torch.fx.experimental.sym_node",
    "torch.fx.experimental.symbolic_shapes", "torch.fx.experimental.recording", "torch._utils_internal",
    "torch.utils._stats", "functools",
})  # fmt: skip
# Who asks for its own sake: torch's private modules, and those that compile.
_PLUMBING = ("torch._", "torch.fx.", "torch.utils.")
_LONG = ValueRanges(2, int_oo)  # what torch's shape rules take a varying size for
_PIECES = (ValueRanges(0, 0), ValueRanges(1, 1), _LONG)
_PIECEWISE = 3  # at most so many sizes are looked at piece by piece
_HINTS = (37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83)  # distinct, never 0 or 1, rarely a layer's width


@dataclass(frozen=True)
class _NamedSource(Source):
    """The source of a symbol. A substitute for torch._dynamo's ConstantSource, which takes seconds to import."""

    label: str

    @property
    def guard_source(self) -> GuardSource:
        return GuardSource.CONSTANT

    @property
    def _name_template(self) -> str:
        return self.label

    if not hasattr(Source, "_name_template"):  # torch before 2.12

        def name(self) -> str:  # type: ignore[override]
            return self.label


class _Env(ShapeEnv):
    """A ShapeEnv that reports each new relation to its owner, asks the owner for unknown answers, and forgets kernels'
    inequalities.

    torch answers as if no varying size were ever 0 or 1. Where Python asks, the user's or that of `torch.nn`, an answer
    that would be another one there is a relation too; what torch asks inside its ops is right at every size.
    """

    def __init__(self, heard: Callable[..., None], settled: Callable[[Any], Any]) -> None:
        super().__init__(duck_shape=False)
        self._heard, self._settled = heard, settled
        self.kernel = False
        self.depth = 0  # of ops that are being recorded
        self.laying = False  # whether torch lays a tensor out: its answers are properties of that object alone
        self.deferred: list[Any] = []  # equalities of sizes that only data tell, on which a kernel's rule relies

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: Any = None) -> tuple[SLoc, str]:
        """No stack for a relation: torch would import its exporter to find one, and our nodes have their lines."""
        return SLoc(framework_loc or "", None), ""

    def _log_create_unbacked_symbol(self, *args: object, **kwargs: object) -> None:
        """No log of a size that only data tell, for the same reason."""

    def evaluate_sym_node(self, sym_node: Any, size_oblivious: bool = False, fallback_value: Any = None) -> Any:
        """Inside a kernel a question with a default gets that, unless one answer holds at every size."""
        if self.kernel and fallback_value is not None:
            found = self._maybe_evaluate_static(sym_node.expr)
            return fallback_value if found is None else found
        return super().evaluate_sym_node(sym_node, size_oblivious, fallback_value)

    def guard_or_defer_runtime_assert(  # type: ignore[override]  # torch's has a cache around it
        self, orig_expr: object, msg: str, fx_node: object = None
    ) -> bool:
        """Defer a data-dependent equality to a guard as well; the kernel alone might broadcast a single row."""
        found = super().guard_or_defer_runtime_assert(orig_expr, msg, fx_node)
        if self.kernel and isinstance(orig_expr, sympy.Eq):
            self.deferred.append(orig_expr)
        return found

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        if self.laying:
            with self.suppress_guards():
                return super().evaluate_expr(orig_expr, *args, **kwargs)
        if self.kernel:
            with self.suppress_guards():
                result = super().evaluate_expr(orig_expr, *args, **kwargs)
            if not _is_equality(orig_expr, result):
                return result
        before = len(self.guards)
        try:
            result = super().evaluate_expr(orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            if self.kernel:
                raise
            return self._settled(orig_expr)
        for guard in self.guards[before:]:
            self._heard(guard.expr)
        asked = not self.kernel and not self.depth and len(self.guards) == before
        if asked and not _holds_when_short(orig_expr) and (asker := _asker()):
            self._heard(orig_expr if result else sympy.Not(orig_expr), by_torch=asker.startswith("torch."))
        return result


def _is_equality(expr: object, outcome: object) -> bool:
    """Whether evaluating ``expr`` to ``outcome`` states an equality (or fixes a number)."""
    if isinstance(expr, sympy.Eq):
        return bool(outcome)
    if isinstance(expr, sympy.Ne):
        return not bool(outcome)
    return not isinstance(outcome, (bool, sympy.logic.boolalg.BooleanAtom))  # a bare symbol is a Boolean to sympy


def _asker() -> str:
    """The module whose Python code takes the truth of a relation; none where torch does for its own sake."""
    frame: FrameType | None = sys._getframe(1)
    truth = False
    while frame is not None and _module(frame) in _ASKING:
        truth = truth or frame.f_code is torch.SymBool.__bool__.__code__
        frame = frame.f_back
    asker = "" if frame is None or not truth else _module(frame)
    return "" if asker.startswith(_PLUMBING) else asker


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def is_relation(expr: object) -> bool:
    """Whether an expression is true or false; to sympy a bare symbol is a Boolean."""
    return isinstance(expr, sympy.logic.boolalg.Boolean) and isinstance(expr, sympy.Basic) and not expr.is_Symbol


@lru_cache(maxsize=4096)
def _holds_when_short(expr: sympy.Expr) -> bool:
    """Whether the truth of ``expr`` is the same for all sizes, including 0 and 1."""
    if not is_relation(expr):
        return True
    sizes = sorted(expr.free_symbols, key=str)
    if len(sizes) > _PIECEWISE:
        return bound_sympy(expr, dict.fromkeys(sizes, ValueRanges(0, int_oo))).is_singleton()
    truths = {bound_sympy(expr, dict(zip(sizes, piece, strict=True))) for piece in product(_PIECES, repeat=len(sizes))}
    return len(truths) == 1 and truths.pop().is_singleton()


class Listener(Protocol):
    """Receives the relations that a recording assumes, and answers questions that only samples can decide."""

    def heard(self, text: str, expr: object, *, by_torch: bool) -> None:
        """A new relation between sizes."""

    def settled(self, expr: object) -> Any:
        """The truth or number of an expression over sizes that data tell."""


class Symbols:
    """The symbols of one graph in this process."""

    def __init__(self) -> None:
        self.listener: Listener | None = None
        imported()
        self.env = _Env(self._heard, self._settled)
        self.fake_mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.fake_mode.cache_enabled = False  # `tfnb.recording.shapes.shape_cache` remembers, at less cost
        self._letters: dict[sympy.Symbol, str] = {}
        self._values: dict[str, Any] = {}  # letter -> SymInt
        self._texts: dict[Any, str] = {}
        self._observed: dict[sympy.Symbol, sympy.Integer] = {}  # symbol -> its size in the samples

    def _heard(self, expr: object, *, by_torch: bool = False) -> None:
        if self.listener is not None:
            self.listener.heard(self.text(expr), expr, by_torch=by_torch)

    def _settled(self, expr: object) -> Any:
        if self.listener is None:
            raise ShapeError(f"only the data of a run tell {self.text(expr)}")
        return self.listener.settled(expr)

    # -- making symbols ------------------------------------------------------------------------------------

    def fresh(self, letter: str | None, hint: int | None, taken: Any = ()) -> torch.SymInt:
        """A new symbol under ``letter`` (default ``B``, ``B1`` ...), with the sample's size as hint."""
        if letter is None:
            letter = "B"
            number = 0
            while letter in taken:
                number += 1
                letter = f"B{number}"
        if hint is None:
            used = {self.hint(s) for s in self._values.values()}
            hint = next((h for h in _HINTS if h not in used), 97 + 2 * len(used))
        source = _NamedSource(f"{letter}_{len(self._letters)}")
        symbol = self.env.create_symbol(
            hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None, positive=None
        )
        self.env.var_to_range[symbol] = _LONG  # not a property of the symbol: its expressions hold for no rows as well
        size: Any = self.env.create_symintnode(symbol, hint=hint, source=source)
        self._letters[symbol] = letter
        self._values[letter] = size
        self._observed[symbol] = sympy.Integer(hint)
        return size

    def unused(self, letter: str) -> str:
        """The letter, with a number appended if already used."""
        return unique(letter, self._values)

    def get(self, letter: str) -> torch.SymInt:
        """The SymInt now under this letter; made with a generated hint if there is none."""
        if letter not in self._values:
            return self.fresh(letter, None)
        return self._values[letter]

    def hint(self, size: Any) -> int:
        """The size that the samples have."""
        return size.node.hint if isinstance(size, torch.SymInt) else int(size)

    def relabel(
        self, own: Container[str], sizes: Mapping[str, int | str], block: Mapping[str, str], below: Mapping[str, str]
    ) -> None:  # fmt: skip
        """Give the symbols of a recording that is over their letters in the graph.

        own: letters of the recording. sizes: those letters -> what they are. block: those letters -> what they are
        called now. below: letters of other cells -> what they are called now.
        """
        if not (sizes or block or below):
            return
        letters = {one: other for one, other in sizes.items() if isinstance(other, str)}
        letters = {**block, **{one: block.get(other, other) for one, other in letters.items()}}
        values = {other: self._values[one] for one, other in letters.items()}
        for symbol, letter in self._letters.items():
            if letter not in own or self._values[letter].node._expr != symbol:
                self._letters[symbol] = below.get(letter, letter)
        for letter, value in values.items():
            if value.node.expr.is_symbol:
                self._letters[value.node.expr] = letter
        self._values.update(values)
        self._texts.clear()

    # -- translating ---------------------------------------------------------------------------------------

    def text(self, expr: object) -> str:
        """The expression over the letters; a symbol not met before (a data-dependent size) gets one."""
        found = self._texts.get(expr)
        if found is None:
            found = self._texts[expr] = self._text(expr)
        return found

    def _text(self, expr: sympy.Expr) -> str:
        for symbol in sorted(expr.free_symbols, key=str):
            if symbol not in self._letters:
                letter = unique("N", self._values)
                self._letters[symbol] = letter
                self._values[letter] = self.env.create_symintnode(symbol, hint=None)
        named = {s: sympy.Symbol(self._letters[s], integer=True, nonnegative=True) for s in expr.free_symbols}
        plain = PythonPrinter().doprint(expr.xreplace(named))
        text = re.sub(r"\b(?:math|torch)\.(?:sym_)?", "", plain)
        Dim(text).symbols  # noqa: B018  raises GraphFormatError here, and not at the end, for what a file cannot hold
        return text

    def readable(self, text: str) -> str:
        """A text of torch's with the letters in place of its names of symbols."""
        letters = {str(symbol): letter for symbol, letter in self._letters.items()}
        return re.sub(r"\b[su]\d+(?=\b|x\d)", lambda found: letters.get(found[0], found[0]), text)

    def size(self, size: Any) -> Size:
        """An int, or the Dim of a SymInt."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        expr = size.node.expr
        return int(expr) if expr.is_number else Dim(self.text(expr))

    def leaf(self, leaf: object) -> Any:
        """An op argument in the form stored in ``attrs``."""
        if isinstance(leaf, torch.SymInt):
            return self.size(leaf)
        if isinstance(leaf, (torch.SymFloat, torch.SymBool)):
            expr = leaf.node.expr
            return leaf.node.pytype(expr) if expr.is_number else Dim(self.text(expr))
        return leaf

    def concrete(self, leaf: object) -> Any:
        """An op argument for computing the sample."""
        if not isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return leaf
        hint = leaf.node.hint
        if hint is not None:
            return hint
        return self.seen(leaf.node.expr, leaf.node.pytype)

    def seen(self, expr: sympy.Expr, kind: type) -> Any:
        """An expression evaluated at the sizes of the samples; None if those are unknown."""
        value = expr.xreplace(self._observed)
        return None if value.free_symbols else kind(value)

    def number(self, dim: Dim) -> Any:
        """The number that an expression is for the samples."""
        return self.concrete(dim.evaluate(self.bindings([dim])))

    def observe(self, fake: torch.Tensor, sample: torch.Tensor) -> None:
        """Remember the sizes of a sample that only its data tells."""
        for size, seen in zip(fake.shape, sample.shape, strict=False):  # ranks differ where an output was not asked for
            if isinstance(size, torch.SymInt) and size.node.hint is None and size.node.expr.is_symbol:
                self._observed[size.node.expr] = sympy.Integer(seen)

    def spec(self, fake: torch.Tensor) -> Spec:
        """The Spec of a fake (or plain) tensor."""
        return Spec(fake.dtype, tuple(self.size(s) for s in fake.shape), str(fake.device))

    def bindings(self, dims: Any) -> dict[str, torch.SymInt]:
        """SymInts for the symbols of the Dims."""
        return {s: self.get(s) for dim in dims if isinstance(dim, Dim) for s in dim.symbols}

    # -- who asks ------------------------------------------------------------------------------------------

    def truth(self, relation: torch.SymBool) -> bool | None:
        """Whether a relation holds for the sizes of the samples; None if unknown."""
        return self.seen(relation.node.expr, bool)

    def inside(self) -> AbstractContextManager[None]:
        """Inside an op that is being recorded: the user's line does not ask."""
        return setting(self.env, depth=self.env.depth + 1)

    def laying(self) -> AbstractContextManager[None]:
        """Inside, a tensor is allocated: torch's question for gaps in its memory is no relation to keep."""
        return setting(self.env, laying=True)

    def decided(self, relation: object) -> bool:
        """The outcome of a relation, guarded as if the user's line had asked."""
        before, self.env.depth = self.env.depth, 0
        try:
            return bool(relation)
        finally:
            self.env.depth = before

    def deferred(self) -> list[Any]:
        """Equalities of sizes assumed by the last kernel's rule, removed from the list when read.

        A size without a letter is of a value that exists inside of the kernel only.
        """
        found, self.env.deferred = self.env.deferred, []
        return [expr for expr in found if expr.free_symbols and expr.free_symbols <= self._letters.keys()]

    # -- fake tensors --------------------------------------------------------------------------------------

    def fake(self, spec: Spec) -> torch.Tensor:
        """A fake tensor of this spec."""
        sizes = spec.sizes(self.bindings(spec.shape))
        with _disable_current_modes(), self.fake_mode:
            return torch.empty(sizes, dtype=spec.dtype, device=spec.device)

    def fake_dense(self, tensor: torch.Tensor) -> torch.Tensor:
        """`fake_like` for a tensor that is all of its memory, and nothing but numbers."""
        with _disable_current_modes(), self.fake_mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def renewed(self, leaf: object) -> Any:
        """A size, or a fake tensor, over the symbols that stand under its letters now; anything else unchanged."""
        if isinstance(leaf, torch.SymInt):
            size = self.size(leaf)
            return size if isinstance(size, int) else size.evaluate(self.bindings([size]))
        if not isinstance(leaf, torch.Tensor) or all(map(self._is_current, (*leaf.shape, *leaf.stride()))):
            return leaf
        sizes, strides = ([self.renewed(n) for n in ns] for ns in (leaf.shape, leaf.stride()))
        with _disable_current_modes(), self.fake_mode:
            return torch.empty_strided(sizes, strides, dtype=leaf.dtype, device=leaf.device)

    def _is_current(self, size: object) -> bool:
        symbols = size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ()
        return all(self._values[self._letters[s]].node.expr == s for s in symbols if s in self._letters)

    def fake_like(self, tensor: torch.Tensor) -> FakeTensor:
        """A fake tensor with the static shape and strides of ``tensor``."""
        with _disable_current_modes():
            return self.fake_mode.from_tensor(tensor.detach(), static_shapes=True)

    def quiet(self) -> AbstractContextManager[None]:
        """Inside, inequalities are forgotten: no decision depends on them."""
        return setting(self.env, kernel=True)

    @contextmanager
    def kernel(self) -> Iterator[None]:
        """Inside the fake kernel of one recorded op."""
        with self.unlogged(), self.quiet(), self.fake_mode:
            yield

    @staticmethod
    def unlogged() -> AbstractContextManager[None]:
        """Inside, failing fake kernels raise without logging."""
        return setting(_LOG, disabled=True)
