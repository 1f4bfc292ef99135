"""Live drawings and progress panels, the script and style of pages, and names that are escaped for HTML.

Loads a widget library only when a class is first used, so that a page can read the files here without one.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "BudgetSlider": "budget_slider",
    "GraphWidget": "graph_widget",
    "LivePlot": "live_plot",
    "ProgressPanel": "progress",
    "StepSlider": "step_slider",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
