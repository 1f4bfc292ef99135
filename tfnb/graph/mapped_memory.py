"""`mapped_memory`: a block in which modules are made with their Parameters and buffers in a file.

The initialisation is the modules' own, with the same random numbers: `torch.empty`, `zeros` and their like give
memory of the file at once, and what a module registers from elsewhere moves there, one tensor at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from os import PathLike
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode

from tfnb.errors import FailedPrecondition
from tfnb.graph import current, mapped_files
from tfnb.graph.mapped_files import MappedFile

_UNFILLED = frozenset({torch.empty, torch.empty_like, torch.Tensor.new_empty})
_FACTORIES = _UNFILLED | {torch.zeros, torch.zeros_like, torch.Tensor.new_zeros}
_SETTINGS = frozenset({"size", "dtype", "device", "requires_grad"})  # arguments of factories that are heeded
_TOUCHED = 64 << 20  # bytes written through mappings, after which the process lets go of their pages
_FILE: ContextVar[MappedFile | None] = ContextVar("mapped memory", default=None)


def mapped_memory(folder: str | PathLike[str] | None = None) -> AbstractContextManager[None]:
    """A block in which modules are made whose weights lie in a file, for training that is larger than the RAM.

    folder: where the file is, by default the system's temp folder; it should be on a disk, not in memory (a tmpfs). The
    file has no name, and its bytes are free again when the tensors are gone or the process ends, however it ends.
    Parameters, buffers and other tensors of at least 64 KiB that modules register, or `torch.empty` and `torch.zeros`
    make, are plain tensors of the CPU in it, with the values that they would have anywhere; slots of optimizers lie
    beside their Parameters. Steps over microbatches with a ``memory_budget`` (`tfnb.Session`, `tfnb.fit`) bring in what
    a pack of layers needs and write it back, so that the process holds no more than the budget beside what it held.
    Record such a model with ``tfnb.record(lazy=True)``, which reads no weight. Save and restore read and write the
    file piece by piece. A step in packs writes the next values of Variables beside the old ones and commits by
    exchanging the two, so that the file takes twice the bytes of weights and slots. Linux only.

    Raises InvalidArgument for a folder in which no file can be made, FailedPrecondition in a recording, and
    ResourceExhausted inside where the disk has no room.

    >>> with mapped_memory():
    ...     layer = torch.nn.Linear(256, 256)
    >>> layer(torch.ones(2, 256)).shape
    torch.Size([2, 256])
    """
    if current.recording() is not None:
        raise FailedPrecondition(
            "mapped_memory makes modules, and inside of a recording they would be part of the graph: make the model "
            "above the cell, or above `with tfnb.record():`"
        )
    file = MappedFile(folder)
    if file.is_in_memory:
        warnings.warn(
            f"{file.folder} lies in memory (tmpfs): tensors there take as much RAM as anywhere; name a folder on a "
            "disk, tfnb.mapped_memory(FOLDER)",
            stacklevel=2,
        )
    return _mapped(file)


@contextmanager
def _mapped(file: MappedFile) -> Iterator[None]:
    moving = _Registration(file)
    hooks = (
        modules.register_module_parameter_registration_hook(moving),
        modules.register_module_buffer_registration_hook(moving),
    )
    token = _FILE.set(file)
    try:
        with _Factories(file):
            yield
    finally:
        _FILE.reset(token)
        for hook in hooks:
            hook.remove()
        file.drop_pages()


class _Factories(TorchFunctionMode):
    """Makes empty tensors and zeros in a file, and lets go of pages that were written in place."""

    def __init__(self, file: MappedFile) -> None:
        super().__init__()
        self.file = file

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        if current.recording() is not None:
            return func(*args, **kwargs)
        if func in _FACTORIES and (made := self._made(func, args, kwargs)) is not None:
            return made
        result = func(*args, **kwargs)
        if getattr(func, "__name__", "").endswith("_"):
            self._wrote(next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None))
        return result

    def _made(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """What a factory makes, if that is plain memory of the CPU and large enough."""
        like = next((each for each in args[:1] if isinstance(each, torch.Tensor)), kwargs.get("input"))
        device = kwargs.get("device") or (torch.device("cpu") if like is None else like.device)
        is_plain = all(name in _SETTINGS or value in (None, False) for name, value in kwargs.items() if name != "input")
        if torch.device(device).type != "cpu" or not is_plain:
            return None
        spec = func(*args, **{**kwargs, "device": "meta"})
        if spec.nbytes < mapped_files.LEAST or not spec.is_contiguous():
            return None
        made = mapped_files.zeros(spec.shape, spec.dtype, self.file, zero=func not in _UNFILLED)
        return made.requires_grad_(bool(kwargs.get("requires_grad")))

    def _wrote(self, tensor: torch.Tensor | None) -> None:
        if tensor is not None and mapped_files.span_of(tensor) is not None:
            self.file.touched += tensor.nbytes
            if self.file.touched > _TOUCHED:
                self.file.drop_pages()


class _Registration:
    """Moves what a module registers to a file; tensors that share memory elsewhere share it there."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self._moved: dict[int, tuple[StorageWeakRef, torch.Tensor]] = {}  # a storage that lives, and its copy

    def __call__(self, module: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is None or _FILE.get() is not self.file or not _is_plain(tensor) or mapped_files.span_of(tensor):
            return
        storage = tensor.untyped_storage()
        self._moved = {key: one for key, one in self._moved.items() if not one[0].expired()}
        known = StorageWeakRef(storage)
        if known.cdata not in self._moved:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            self._moved[known.cdata] = known, mapped_files.copied(whole, self.file)
        made = self._moved[known.cdata][1].view(tensor.dtype)
        with torch.no_grad():
            tensor.data = made.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is large enough, and plain memory of the CPU that is not shared with another process."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and tensor.device.type == "cpu"
        and tensor.layout is torch.strided and tensor.untyped_storage().nbytes() >= mapped_files.LEAST
        and not tensor.is_shared()
    )  # fmt: skip
