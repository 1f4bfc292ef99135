"""A slider over memory budgets: the plan of the chosen one stands below. Knows no plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets


class BudgetSlider:
    """A slider of labels with a picture below it, as a function of the place makes it; the chosen one is redrawn.

    A front end without widgets, and a saved notebook, show the picture that it began with.
    """

    def __init__(self, labels: Sequence[str], picture: Callable[[int], str], at: int = 0) -> None:
        self._picture, self._at = picture, at
        options = [(label, place) for place, label in enumerate(labels)]  # labels may be equal
        self.slider = ipywidgets.SelectionSlider(
            options=options, value=at, description="budget", continuous_update=False,
            layout=ipywidgets.Layout(width="640px"),
        )  # fmt: skip
        self.html = ipywidgets.HTML(picture(at))
        self._box = ipywidgets.VBox([self.slider, self.html])
        self.slider.observe(self._moved, "value")

    def _moved(self, change: Any) -> None:
        self.html.value = self._picture(change["new"])

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = self._box._repr_mimebundle_(**kwargs)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        return {**data, "text/html": self._picture(self._at), "text/plain": "<BudgetSlider>"}
