"""The param groups of torch optimizers, and the states of their schedulers, as JSON and back in place. No pickle."""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tfnb.errors import CheckpointCorrupt, CheckpointIncompatible, InvalidArgument

Groups = list[dict[str, Any]]

_OF_THE_MACHINE = {"params", "foreach", "fused", "capturable", "differentiable"}  # how a step is computed, not which
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda p: Counter(dict(p)),
}


def labelled(objects: Iterable[Any]) -> dict[str, Any]:
    """Objects by the name of their class, with a number where that is taken.

    >>> list(labelled([1, 2, "a"]))
    ['int', 'int_1', 'str']
    """
    seen: Counter[str] = Counter()
    found = {}
    for one in objects:
        name = type(one).__name__
        found[f"{name}_{seen[name]}" if seen[name] else name] = one
        seen[name] += 1
    return found


# -- param groups -------------------------------------------------------------------------------------------------


def groups_of(optimizer: Optimizer) -> Groups:
    """The hyperparameters of each param group: numbers, texts, None, and pairs of them.

    >>> groups_of(torch.optim.SGD([torch.zeros(1)], lr=0.1))[0]["lr"]
    0.1
    """
    return [
        {name: _plain(value) for name, value in group.items() if name not in _OF_THE_MACHINE and _is_plain(value)}
        for group in optimizer.param_groups
    ]


def _is_plain(value: object, *, nested: bool = False) -> bool:
    if isinstance(value, list | tuple) and not nested:
        return all(_is_plain(one, nested=True) and not isinstance(one, str) for one in value)
    return value is None or isinstance(value, str | int | float) or _is_number(value)


def _is_number(value: Any) -> bool:
    """Whether this is a tensor of one element, or a number of NumPy."""
    is_one = value.numel() == 1 if isinstance(value, torch.Tensor) else getattr(value, "shape", None) == ()
    return is_one and isinstance(value.item(), int | float)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.item() if _is_number(value) else value


def write_back(optimizer: Optimizer, groups: Groups) -> list[str]:
    """Write saved hyperparameters into the param groups, in place; returns each change, in words.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> write_back(optimizer, [{"lr": 0.05}]), optimizer.param_groups[0]["lr"]
    (['lr 0.1 -> 0.05'], 0.05)
    """
    changes = []
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for name, new in saved.items():
            old = group.get(name)
            before = (_plain(old) if _is_plain(old) else old) if name in group else "none"
            if before == new:
                continue
            if isinstance(old, torch.Tensor) and isinstance(new, int | float):
                with torch.no_grad():
                    old.fill_(new)  # a captured step reads this very tensor
            else:
                group[name] = tuple(new) if isinstance(new, list) and not isinstance(old, list) else new
            of = f" (group {number})" if len(groups) > 1 else ""
            changes.append(f"{name}{of} {before} -> {new}")
    return changes


def ensure_alike(label: str, optimizer: Optimizer, groups: Groups | None) -> None:
    """Raise CheckpointIncompatible where an optimizer has more or fewer groups than were saved."""
    if groups is not None and (here := len(optimizer.param_groups)) != len(groups):
        raise CheckpointIncompatible(
            f"the checkpoint holds {len(groups)} param groups of {label}, which has {here} here; nothing was assigned. "
            "Make the groups as they were, or restore with strict=False, which leaves their numbers as they are"
        )


def of_older_files(tensors: Mapping[str, torch.Tensor], optimizers: Mapping[str, Optimizer]) -> dict[str, Groups]:
    """Learning rates that a file holds as tensors, by the label of the optimizer: files had no groups once."""
    found = {}
    for label, optimizer in optimizers.items():
        keys = [f"{label}/lr{f'_{number}' if number else ''}" for number in range(len(optimizer.param_groups))]
        is_only = f"{label}_1" not in optimizers  # else the numbers may be of another one
        if is_only and all(key in tensors and tensors[key].numel() == 1 for key in keys):
            found[label] = [{"lr": float(tensors[key])} for key in keys]
    return found


# -- schedulers ---------------------------------------------------------------------------------------------------


def is_scheduler(value: object) -> bool:
    """Whether this is a scheduler of a torch optimizer, of torch or another package."""
    parts = ("state_dict", "load_state_dict", "optimizer")
    return isinstance(value, LRScheduler) or (
        not isinstance(value, torch.nn.Module) and all(hasattr(value, p) for p in parts)
    )


def state_of(scheduler: torch.optim.lr_scheduler.LRScheduler) -> dict[str, Any]:
    """The state of a scheduler and the param groups of its optimizer, as JSON.

    Raises InvalidArgument for a state with functions or objects.
    """
    kind = type(scheduler).__name__
    return {"state": _written(scheduler.state_dict(), kind), "groups": groups_of(scheduler.optimizer)}


def load_state(scheduler: torch.optim.lr_scheduler.LRScheduler, saved: Mapping[str, Any]) -> list[str]:
    """Give a scheduler its state, and its optimizer the numbers that the scheduler had set; returns their changes.

    The constructor of a scheduler sets learning rates: one that is made after a restore has set them anew.
    """
    changes = write_back(scheduler.optimizer, saved["groups"])
    scheduler.load_state_dict(_read(saved["state"]))
    return changes


def at_work(optimizer: Optimizer) -> list[LRScheduler]:
    """The live schedulers of an optimizer, except schedulers that another scheduler steps."""
    found = [one for one in gc.get_objects() if issubclass(type(one), LRScheduler)]
    mine = [one for one in found if getattr(one, "optimizer", None) is optimizer]
    inner = {id(part) for one in mine for part in getattr(one, "_schedulers", ())}
    return [one for one in mine if id(one) not in inner]


def _written(value: Any, where: str) -> Any:
    """A value as JSON; a type that JSON lacks becomes an object whose one key is the type's name."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, torch.Tensor):
        return {"tensor": [str(value.dtype).removeprefix("torch."), value.tolist()]}
    if _is_number(value):
        return value.item()
    if type(value) is list:
        return [_written(one, f"{where}[{at}]") for at, one in enumerate(value)]
    kind = type(value).__name__
    if isinstance(value, Mapping):
        pairs = [[_written(key, where), _written(one, f"{where}[{key!r}]")] for key, one in value.items()]
        return {kind if kind in _MAPPINGS else "dict": pairs}
    if kind in _SEQUENCES:
        return {kind: [_written(one, where) for one in value]}
    raise InvalidArgument(
        f"{where} is a {kind}, which a file of tensors and JSON cannot hold: save scheduler.state_dict() beside it, "
        "torch.save(scheduler.state_dict(), path), and load it after the restore, scheduler.load_state_dict(...)"
    )


def _read(value: object) -> Any:
    """The inverse of `_written`."""
    if isinstance(value, list):
        return [_read(one) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "tensor":
        return torch.tensor(held[1], dtype=getattr(torch, held[0]))
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]([(_read(key), _read(one)) for key, one in held])
    return _SEQUENCES[kind](map(_read, held))


# -- files --------------------------------------------------------------------------------------------------------


def ensure_told(about: Mapping[str, Any]) -> None:
    """Raise CheckpointCorrupt for facts of a file that are not as `groups_of` and `state_of` give them."""
    try:
        groups = list(about.get("optimizers", {}).values())
        for saved in about.get("schedulers", {}).values():
            groups.append(saved["groups"])
            if not isinstance(_read(saved["state"]), dict):
                raise TypeError
        if not all(_is_plain(value) for some in groups for group in some for value in group.values()):
            raise TypeError
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, IndexError):
        raise CheckpointCorrupt("the checkpoint has damaged facts about optimizers or schedulers") from None
