"""fit: validation after each epoch, and functions of the user's that hear of steps and epochs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tfnb
from tfnb.errors import InvalidArgument
from tfnb.train.callbacks import Callbacks


class Told:
    """Keeps what it is told."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.steps: list[tuple[int, int, dict[str, float]]] = []
        self.epochs: list[tuple[int, int, dict[str, float]]] = []
        self.stop_at = stop_at

    def on_step(self, progress: tfnb.train.Progress) -> None:
        self.steps.append((progress.step, progress.epoch, {k: float(v) for k, v in progress.values.items()}))
        if progress.step == self.stop_at:
            progress.stop("enough")

    def on_epoch(self, progress: tfnb.train.Progress) -> None:
        self.epochs.append((progress.step, progress.epoch, dict(progress.values)))


def line(rate: float = 0.1) -> tuple[Any, ...]:
    layer = torch.nn.Linear(1, 1)
    with torch.no_grad():
        layer.weight.fill_(0.0), layer.bias.fill_(0.0)
    with tfnb.record():
        x, y = tfnb.placeholder(torch.ones(4, 1), name="x"), tfnb.placeholder(torch.ones(4), name="y")
        loss = (layer(x)[:, 0] - y).square().mean()
        train = tfnb.train.SGD(rate).minimize(loss)
    return layer, x, y, loss, train


def test_callbacks_hear_of_each_step_and_of_each_epoch_before_the_next_one_begins() -> None:
    layer, x, y, loss, train = line()
    told, weights = Told(), []
    data = {x: torch.ones(10, 1), y: torch.arange(10.0)}
    done = tfnb.fit(
        train, data, batch_size=4, epochs=2, watch={"loss": loss},
        callbacks=[told, lambda progress: weights.append((progress.step, layer.weight.item()))],
    )  # fmt: skip
    assert [(step, epoch) for step, epoch, _ in told.steps] == [(s, 1 + s // 4) for s in (1, 2, 3)] + [
        (4, 2), (5, 2), (6, 2),
    ]  # fmt: skip
    assert [(step, epoch) for step, epoch, _ in told.epochs] == [(3, 1), (6, 2)]
    assert [values for *_, values in told.epochs] == [{"loss": entry["loss"]} for entry in done.history]
    other, x, y, loss, train = line()
    tfnb.fit(train, {x: torch.ones(10, 1), y: torch.arange(10.0)}, batch_size=4, epochs=2, steps=3)
    assert weights[0] == (3, other.weight.item()), "no step of the second epoch was taken"
    assert done.stopped == "" and done.steps == 6


class Pairs(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Rows without a length."""

    def __init__(self, *columns: torch.Tensor) -> None:
        self.columns = columns

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return zip(*self.columns, strict=True)


@pytest.mark.parametrize("form", ["arrays", "feeds", "loader", "stream"])
def test_validation_computes_the_watched_values_over_other_data_without_updates(form: str) -> None:
    layer, x, y, loss, train = line()
    others, labels = torch.linspace(0, 1, 7)[:, None], torch.linspace(1, 2, 7)
    if form == "arrays":
        validation: Any = {x: others, y: labels}
    elif form == "feeds":
        validation = [{x: others[:3], y: labels[:3]}, {x: others[3:], y: labels[3:]}]
    else:
        dataset = (Pairs if form == "stream" else torch.utils.data.TensorDataset)(others, labels)
        validation = torch.utils.data.DataLoader(dataset, batch_size=3)
    want = []

    def expected(progress: tfnb.train.Progress) -> None:
        with torch.no_grad():
            want.append(float((layer(others)[:, 0] - labels).square().mean()))

    rows, targets = torch.rand(8, 1), torch.rand(8)
    if form in ("loader", "stream"):
        dataset = (Pairs if form == "stream" else torch.utils.data.TensorDataset)(rows, targets)
        data: Any = torch.utils.data.DataLoader(dataset, batch_size=4)
        options: dict[str, Any] = {"feeds": (x, y)}
    else:
        data, options = {x: rows, y: targets}, {"batch_size": 4}
    done = tfnb.fit(
        train, data, epochs=3, watch={"loss": loss}, validation=validation, callbacks=expected, **options
    )  # fmt: skip
    assert [entry["val_loss"] for entry in done.history] == pytest.approx(want, rel=1e-5)
    assert "val_loss" in repr(done) and "val_loss" in done._repr_html_() and want[0] != want[1]


def test_early_stopping_ends_a_training_when_nothing_improves() -> None:
    _, x, y, loss, train = line(rate=0.5)
    stopping = tfnb.train.EarlyStopping("val_loss", patience=2, min_delta=1e-3)
    data = {x: torch.ones(4, 1), y: torch.ones(4)}
    done = tfnb.fit(
        train, data, batch_size=4, epochs=50, watch={"loss": loss}, validation=data, callbacks=[stopping]
    )  # fmt: skip
    assert len(done.history) == done.steps == stopping.best_epoch + 3 < 50
    assert "val_loss has not improved for 3 epochs: best" in done.stopped and done.stopped in done.summary
    losses = [entry["val_loss"] for entry in done.history]
    assert stopping.best == losses[stopping.best_epoch - 1] and stopping.best_step == stopping.best_epoch


def test_a_callback_ends_a_training_after_a_step() -> None:
    _, x, y, loss, train = line()
    told = Told(stop_at=5)
    done = tfnb.fit(train, {x: torch.ones(40, 1), y: torch.ones(40)}, batch_size=4, watch=loss, callbacks=told)
    assert done.steps == 5 and done.stopped == "enough" and len(told.steps) == 5 and not told.epochs


def test_an_error_in_a_callback_leaves_whole_steps_and_says_where() -> None:
    layer, x, y, _, train = line()

    def broken(progress: tfnb.train.Progress) -> None:
        raise RuntimeError("no disk")

    with pytest.raises(RuntimeError, match="no disk") as caught:
        tfnb.fit(train, {x: torch.ones(8, 1), y: torch.ones(8)}, batch_size=4, epochs=3, callbacks=[broken])
    assert caught.value.__notes__ == ["in a callback of fit after step 2; variables are at step 2"]
    other, x, y, _, train = line()
    tfnb.fit(train, {x: torch.ones(8, 1), y: torch.ones(8)}, batch_size=4)
    assert torch.equal(layer.weight, other.weight)


def test_a_coordinator_adds_its_own_note_to_an_error() -> None:
    def broken(progress: tfnb.train.Progress) -> None:
        raise RuntimeError("no disk")

    for is_noted in (True, False):
        with pytest.raises(RuntimeError, match="no disk") as caught:
            Callbacks([broken], is_noted=is_noted).on_epoch(tfnb.train.Progress(2, 1, {}))
        assert hasattr(caught.value, "__notes__") is is_noted


def test_bad_validation_and_callbacks_are_refused_before_anything_runs() -> None:
    layer, x, y, loss, train = line()
    data = {x: torch.ones(8, 1), y: torch.ones(8)}
    with pytest.raises(InvalidArgument, match="name them, watch=loss"):
        tfnb.fit(train, data, validation=data)
    with pytest.raises(InvalidArgument, match="can be only once"):
        tfnb.fit(train, data, watch=loss, validation=iter([data]))
    with pytest.raises(InvalidArgument, match="or an iterable, not int"):
        tfnb.fit(train, data, watch=loss, validation=5)
    with pytest.raises(InvalidArgument, match=r"functions of one argument.*got 3"):
        tfnb.fit(train, data, callbacks=[3])
    with pytest.raises(InvalidArgument, match="patience is a number of epochs"):
        tfnb.train.EarlyStopping("loss", patience=-1)
    assert layer.weight.item() == 0
    with pytest.raises(InvalidArgument, match=r"EarlyStopping\('lost'\): the values of an epoch are 'loss'"):
        tfnb.fit(train, data, watch={"loss": loss}, callbacks=tfnb.train.EarlyStopping("lost"))


def test_here_a_change_of_mode_changes_nothing_but_is_checked() -> None:
    """Steps are taken one at a time in this process, whatever the mode."""
    data = {"x": torch.ones(8, 1), "y": torch.ones(8)}
    trained = []
    for change in (None, "async"):
        layer, x, y, _, train = line()

        def changes(progress: tfnb.train.Progress, mode: str | None = change) -> None:
            if mode is not None:
                progress.change(mode)

        tfnb.fit(train, {x: data["x"], y: data["y"]}, epochs=3, batch_size=4, callbacks=changes)
        trained.append(layer.weight)
    assert torch.equal(*trained)
    layer, x, y, _, train = line()
    with pytest.raises(InvalidArgument, match="mode='bounded' takes staleness"):
        tfnb.fit(train, {x: data["x"], y: data["y"]}, callbacks=lambda progress: progress.change("bounded"))
