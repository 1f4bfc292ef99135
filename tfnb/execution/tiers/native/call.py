"""Calls of a package: operands are checked each time, and Python's lock is released during the call.

A package itself checks nothing: a tensor of another size would be read beyond its end, one with other strides written
outside of its view, and memory that is given twice changed while it is read. What does not fit is not run.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from operator import is_
from pathlib import Path
from typing import Any

import torch
from torch._C import _aoti

from tfnb.execution.tiers.interface import Unfit
from tfnb.execution.tiers.native.direct import Direct, direct_call, watched
from tfnb.execution.tiers.native.exportable import ExtraOperands
from tfnb.execution.tiers.native.manifest import About
from tfnb.execution.tiers.native.request import Operand
from tfnb.execution.tiers.native.step_arguments import CONSTANTS, load_arguments
from tfnb.execution.tiers.operand_checks import OperandRefused
from tfnb.graph import Variable
from tfnb.graph.held import CHANGES
from tfnb.graph.variable_locks import Access

_REFUSED, _UNFIT = 1, 2
_pointer, _int = ctypes.c_void_p, ctypes.c_int64
_address = ctypes.pythonapi.PyCapsule_GetPointer
_address.argtypes, _address.restype = (ctypes.py_object, ctypes.c_char_p), _pointer
_taken, _handles = _aoti.alloc_tensors_by_stealing_from_void_ptrs, _aoti.unsafe_alloc_void_ptrs_from_tensors
"""From handles to tensors, and back. What torch has for a single handle never frees its tensor."""


class _Operand(ctypes.Structure):
    _fields_ = (("dtype", ctypes.c_int32), ("writes", ctypes.c_int32), ("dim", _int), ("bytes", _int),
                ("sizes", _pointer), ("strides", _pointer))  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = (("torch", _pointer), ("constants", _pointer), ("inputs", _int), ("outputs", _int), ("flag", _int),
                ("count", _int), ("operands", _pointer))  # fmt: skip


_ABI = (
    "new_tensor_handle", "delete_tensor_object", "get_data_ptr", "get_dim", "get_sizes", "get_strides", "get_dtype",
    "get_device_type",
)  # fmt: skip
"""What `call.c` takes of torch's C ABI, after the function that runs a package."""


class _KeptTensors:
    """Tensors that calls take as they are, as handles; gone with the object."""

    def __init__(self, storages: Sequence[torch.Tensor], more: Sequence[torch.Tensor], feeds: int, count: int,
                 drop: Callable[..., Any]) -> None:  # fmt: skip
        self.storages = storages
        made = [_address(capsule, None) for capsule in _handles([*storages, *more])]
        self.handles = (_pointer * (count + 1))(*(None,) * feeds, *made)
        self.where = ctypes.addressof(self.handles)
        self.is_plain = not any(tensor.is_neg() or tensor.is_conj() for tensor in storages)
        weakref.finalize(self, _dropped, made, drop)


def _dropped(handles: list[int], drop: Callable[..., Any]) -> None:
    for handle in handles:
        drop(_pointer(handle))


class PackageFailed(RuntimeError):
    """A package gave no result: memory was lacking, or a library refused."""


class Package:
    """A loaded package: ``outputs = package(feeds, storages, run)``, with the run's number.

    Raises Unfit or OperandRefused, and then wrote nothing. lasts: calls take the same storages, whose handles are kept.
    """

    def __init__(self, folder: Path, about: About, given: ExtraOperands, *, lasts: bool = True) -> None:
        self.about, self.given, self._lasts = about, given, lasts
        library, caller = ctypes.CDLL(str(folder / "step.so")), ctypes.PyDLL(str(folder / "call.so"))
        abi = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        functions = [library.tfnb_run, *(getattr(abi, f"aoti_torch_{name}") for name in _ABI)]
        self._drop = functions[2]
        torch_functions = (_pointer * len(functions))(*(ctypes.cast(function, _pointer) for function in functions))
        constants = load_arguments(folder / CONSTANTS)[:-1] if (folder / CONSTANTS).exists() else []
        lent = _KeptTensors([], constants, 0, len(constants), self._drop)
        self._held: list[Any] = [torch_functions, lent, constants]
        wanted = [self._operand(abi, x, at in about.written) for at, x in enumerate(about.operands)]
        operands = (_Operand * len(wanted))(*wanted)
        step = _Step(ctypes.addressof(torch_functions), lent.where, len(wanted), about.outputs, about.flag,
                     len(constants), ctypes.addressof(operands))  # fmt: skip
        self._held += [operands, step]
        self._step, self._call = ctypes.addressof(step), caller.tfnb_step
        self._call.argtypes, self._call.restype = (_pointer, _pointer, ctypes.py_object), ctypes.py_object
        self._direct = caller.tfnb_direct
        self._direct.argtypes, self._direct.restype = (ctypes.py_object,), ctypes.py_object
        self._kept: _KeptTensors | None = None

    def _operand(self, abi: object, operand: Operand, writes: bool) -> _Operand:
        arrays = [(_int * (len(numbers) + 1))(*numbers) for numbers in (operand.shape, operand.stride)]
        self._held += arrays
        size = torch.empty_strided(operand.shape, operand.stride, dtype=operand.torch_dtype, device="meta")
        dtype = getattr(abi, f"aoti_torch_dtype_{operand.dtype}")()
        return _Operand(dtype, writes, size.dim(), size.untyped_storage().nbytes() if size.numel() else 0,
                        *map(ctypes.addressof, arrays))  # fmt: skip

    def __call__(self, feeds: Sequence[torch.Tensor], storages: Sequence[torch.Tensor], run: int) -> list[torch.Tensor]:
        kept = self._kept
        if kept is None or not all(map(is_, kept.storages, storages)):
            kept = _KeptTensors([*storages], self.given.constants, len(feeds), len(self.about.operands), self._drop)
            self._kept = kept if self._lasts else None
        taken = [*feeds, *(draw(run, (*feeds, *storages)) for draw in self.given.draws)] if self.given.draws else feeds
        if not kept.is_plain or any([feed.is_neg() or feed.is_conj() for feed in feeds]):
            raise Unfit
        found = self._call(self._step, kept.where, _handles([*taken]))
        if type(found) is list:
            return _taken(found)  # type: ignore[no-any-return]
        raise {_REFUSED: OperandRefused, _UNFIT: Unfit}.get(found, PackageFailed)("the compiled step failed")

    def direct(
        self, variables: Sequence[Variable], access: Access, written: Sequence[Variable],
        fetched: Sequence[int | None], known: Direct | None,
    ) -> Direct | None:  # fmt: skip
        """The same step in one call, for the storages of the last call, which are the Variables' own.

        None where the operands have to be looked at one by one. known: what this gave before.
        """
        kept = self._kept
        if kept is None or self.given.draws or not kept.is_plain:
            return None
        changes, watches = CHANGES.value, watched(variables)
        if watches is None or (known is not None and known.is_of(kept, watches)):
            return known
        call = direct_call(
            self._direct, self, self._step, kept, watches, access, written, (*fetched,)
        )  # fmt: skip
        return None if call is None else Direct(call, kept, watches, changes)
