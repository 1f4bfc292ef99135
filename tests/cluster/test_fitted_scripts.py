"""Training scripts whose step takes a batch: `fit` on two tasks has the losses and weights of the plain scripts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tfnb
from tests.magics.conftest import Notebook, ipython, notebook
from tests.models.further_scripts import FURTHER
from tests.models.script import IMPORTS
from tests.models.scripts import SCRIPTS

__all__ = ["ipython", "notebook"]  # fixtures
DIGITS = "train_loader, feeds=(data, target), epochs=3, callbacks=after, exact=True"
FITTED = {
    "digits, with a test set and a scheduler": DIGITS,
    "digits row by row, through an LSTM": DIGITS,
    "larger images from small ones": "training_data_loader, feeds=(input, target), epochs=3, callbacks=[told]",
    "patches of images, by attention": "trainloader, feeds=(inputs, targets), epochs=2, callbacks=[told]",
    "the style of a picture": "[{x: images} for images, _ in train_loader], epochs=2, callbacks=[told]",
}
"""The arguments of `fit` beside the step. Batch norm wants all rows of a batch."""

FIT = """
class Told:
    def on_step(self, progress):
        losses.append(progress.values["loss"])

losses, told = [], Told()
after = [told, lambda progress: scheduler.step()]
tfnb.fit(step, {given}, watch={{"loss": {loss}}}, mode="sync")
"""


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def plain_losses(script: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses that the plain script differentiates, and the weights that it ends with."""
    losses: list[float] = []
    backward = torch.Tensor.backward

    def heard(loss: torch.Tensor) -> None:
        losses.append(loss.item())
        backward(loss)

    space: dict[str, Any] = {"__name__": "__main__"}
    with monkeypatch.context() as patches:
        patches.setattr(torch.Tensor, "backward", heard)
        exec(IMPORTS + script.shared + script.plain, space)
    return losses, space["model"].state_dict()


@pytest.mark.slow
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", FITTED)
def test_fit_on_two_tasks_trains_as_the_script(
    notebook: Notebook, connect: Callable[..., tfnb.Cluster], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    script = (SCRIPTS | FURTHER)[name]
    want, weights = plain_losses(script, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cell in script.cells[:-1]:
            notebook.ok(cell)
        cluster = connect(2)
        notebook.ok(FIT.format(given=FITTED[name], loss="total_loss" if "total_loss" in notebook.names else "loss"))
        cluster.close()
    torch.testing.assert_close([float(loss) for loss in notebook.names["losses"]], want, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(notebook.names["model"].state_dict(), weights, rtol=1e-6, atol=1e-8)
