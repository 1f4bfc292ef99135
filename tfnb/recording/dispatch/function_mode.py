"""The torch functions that a recording calls: each by its row of the table of overrides, the outermost names nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from tfnb.graph import current
from tfnb.recording.dispatch.recorder import Recorder
from tfnb.recording.marks.scopes import clean
from tfnb.recording.overrides.override_table import OVERRIDES, Stage

_ROWS = OVERRIDES[Stage.FUNCTION]


class Functions(TorchFunctionMode):
    """The function mode of one recording. A nested recording enters its own mode, which comes first."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        __tracebackhide__ = True
        scopes, kwargs = self._recorder.scopes, kwargs or {}
        call = self._with_row(func) if func in _ROWS else func
        if scopes.function is not None:
            return call(*args, **kwargs)
        scopes.function = _name(func)
        try:
            return call(*args, **kwargs)
        finally:
            scopes.function = None

    def _with_row(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """``func``, or its row where that applies."""
        row, recorder = _ROWS[func], self._recorder
        if current.recording() is not recorder:
            return func

        def call(*args: object, **kwargs: object) -> Any:
            __tracebackhide__ = True
            found = row(recorder, *args, **kwargs)
            return func(*args, **kwargs) if found is NotImplemented else found

        return call


def _name(func: Callable[..., Any]) -> str:
    name = (getattr(func, "__name__", "") or "op").partition(".")[0]
    if name == "__get__":  # a property such as x.T or x.shape
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return clean(name.strip("_"))
