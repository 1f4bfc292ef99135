"""Names of converted code without a value."""

from __future__ import annotations

from typing import Any

from tfnb.errors import InvalidArgument

MISSING = object()


class Undefined:
    """Stands for the value of a name that was not assigned, or, with ``why``, that only some runs assign."""

    def __init__(self, symbol_name: str, why: str | None = None) -> None:
        self.symbol_name, self.why = symbol_name, why

    def read(self) -> Any:
        """Raises as Python does; InvalidArgument where a staged statement is why."""
        if self.why is not None:
            raise InvalidArgument(f"`{self.symbol_name}` has no value here: {self.why}; give it one before")
        raise UnboundLocalError(
            f"cannot access local variable {self.symbol_name!r} where it is not associated with a value"
        )

    def __repr__(self) -> str:
        return f"<{self.symbol_name} has no value>"


class UndefinedReturnValue(Undefined):
    """Stands for the result of a function that has not returned."""

    def __init__(self) -> None:
        super().__init__("the value that is returned")
