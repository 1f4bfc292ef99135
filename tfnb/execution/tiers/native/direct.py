"""A whole step as one call from Python: feeds in, fetched values out, everything between in C (`direct.c`).

It goes where nothing is in the way, and gives None elsewhere. A feed is looked at where torch keeps its facts in
memory: the places are found with tensors whose facts are known, and where they are not plain to see there is no such
call. A Variable is what it was if its modules hold the same tensor, and that lies where it lay.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tfnb.graph import Variable
from tfnb.graph.held import CHANGES, TensorWatch
from tfnb.graph.variable_locks import LOCKS, Access

_WORDS = 24  # of what is behind a tensor, which has more
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.argtypes, _capsule.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object
_NAMES, _CONSTANTS = ("token", "locked", "thread", "requires_grad"), (None, False)
_WRAP = "_Z16THPVariable_WrapRKN2at10TensorBaseE"  # torch's function that makes the Python object of a tensor


@dataclass(frozen=True, slots=True)
class Direct:
    """``call(*feeds)`` gives the fetched values in a list; None where the step has to go another way: nothing was done.

    kept: the storages that it was made for; watches: what tells that the Variables are those.
    """

    call: Callable[..., list[Any] | None]
    kept: object
    watches: tuple[TensorWatch, ...]
    changes: int

    def is_of(self, kept: object, watches: Sequence[TensorWatch]) -> bool:
        """Whether the call was made for these operands and watches."""
        return (
            self.kept is kept
            and self.changes == CHANGES.value
            and all(a.is_as(b) for a, b in zip(self.watches, watches, strict=True))
        )


def watched(variables: Iterable[Variable]) -> tuple[TensorWatch, ...] | None:
    """Conditions under which Variables keep their storages; None if some Variable has none."""
    found = tuple(variable.watched() for variable in variables)
    return None if None in found else found  # type: ignore[return-value]


def direct_call(
    make: Callable[[Any], Any], package: object, step: int, kept: Any, watches: Sequence[TensorWatch], access: Access,
    written: Iterable[Variable], fetched: tuple[int | None, ...],
) -> Callable[..., list[Any] | None] | None:  # fmt: skip
    """The function `Direct.call`; None if the layout of torch's objects is not as expected.

    make: ``tfnb_direct`` of a package, whose C says what it is given here; the rest lives as long as the call.
    """
    memory = _memory()
    if memory is None:
        return None
    now = _DirectMemory(*(getattr(memory, name) for name, _ in memory._fields_))
    now.known = CHANGES.value
    hold = LOCKS.reusable(access)
    lock = LOCKS.holds, hold, hold.token.acquire, hold.token.release, hold.waiters, hold.wake
    counters = [variable.writes for variable in written]
    addresses = (ctypes.c_void_p * (len(counters) + 1))(*map(ctypes.addressof, counters))
    pointers = [
        _capsule(at, None, None) for at in (step, kept.where, ctypes.addressof(now), ctypes.addressof(addresses))
    ]
    watching = tuple((*watch, storage) for watch, storage in zip(watches, kept.storages, strict=True))
    lives = package, kept, now, counters, addresses
    return make((*pointers, torch.Tensor, watching, lock, fetched, _NAMES, _CONSTANTS, lives))  # type: ignore[no-any-return]


class _DirectMemory(ctypes.Structure):
    _fields_ = (("tensor", ctypes.c_int64), ("keys", ctypes.c_int64), ("gradient", ctypes.c_int64),
                ("plain", ctypes.c_uint64), ("wrap", ctypes.c_void_p), ("changes", ctypes.c_void_p),
                ("known", ctypes.c_int64))  # fmt: skip


@cache
def _memory() -> _DirectMemory | None:
    """Where torch keeps the facts about a tensor; None where that is not plain to see.

    Tried with torch 2.13: a Python object has a pointer to what is behind it, and that has the keys of the dispatcher,
    which differ for all that is not a plain tensor on the CPU, and a pointer that is null without autograd.
    """
    wrap = getattr(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_python.so")), _WRAP, None)
    plain = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(0), torch.ones(4)[1:3].clone()]
    with torch.inference_mode():
        others = [torch.zeros(2)]
    others += [torch._neg_view(plain[0]), torch.zeros(2, dtype=torch.complex64).conj(), plain[0].to("meta"),
               torch.eye(2).to_sparse()]  # fmt: skip
    every = [*plain, *others]
    keys = {_keys(x) for x in plain}
    words = torch._C.TensorBase.__basicsize__ // 8
    tensor = _places([_words(id(x), words) for x in every], [x._cdata for x in every])
    if wrap is None or len(tensor) != 1 or len(keys) != 1 or not keys.isdisjoint(map(_keys, others)):
        return None
    key = _places([_words(x._cdata, _WORDS) for x in every], [*map(_keys, every)])
    if len(key) != 1:
        return None
    # Some words were never written, so they are no sign: the pointer is the one word that autograd changes.
    before = _words(plain[0]._cdata, _WORDS)
    after = _words(plain[0].requires_grad_()._cdata, _WORDS)
    gradient = [at for at in range(_WORDS) if before[at] != after[at]]
    where = gradient[0] if len(gradient) == 1 and not before[gradient[0]] else -1
    return _DirectMemory(
        tensor[0], key[0], where, keys.pop(), ctypes.cast(wrap, ctypes.c_void_p), ctypes.addressof(CHANGES)
    )


def _keys(x: torch.Tensor) -> int:
    return int(torch._C._dispatch_keys(x).raw_repr())


def _words(at: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(at))


def _places(memory: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[int]:
    """Offsets at which each memory block has its expected word."""
    pairs = list(zip(memory, wanted, strict=True))
    return [at for at in range(len(memory[0])) if all(words[at] == word for words, word in pairs)]
