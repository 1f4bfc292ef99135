"""Kinds of tensors: complex ones are recorded with their conjugates done, sparse ones are refused with the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tfnb.errors import Unsupported


def _replayed(function: Callable[..., torch.Tensor], *xs: torch.Tensor) -> None:
    """Recorded on the tensors and run on others: torch's values both times."""
    with tfnb.record():
        held = [tfnb.placeholder(x, shape=tuple(x.shape)) for x in xs]
        y = function(*held)
    torch.testing.assert_close(y.sample, function(*xs))
    others = [x * 0.75 if x.is_floating_point() or x.is_complex() else x for x in xs]
    torch.testing.assert_close(tfnb.run(y, dict(zip(held, others, strict=True))), function(*others))


COMPLEX = {
    "a kernel that reads the bits": torch.fft.hfft,
    "a kernel that conjugates inside": torch.linalg.pinv,
    "parts of a conjugate": lambda x: x.conj().imag - x.conj().real,
    "adjoint": lambda x: x.mH @ x,
    "a conjugate's conjugate": lambda x: x.conj().conj() * x,
}


@pytest.mark.parametrize("name", COMPLEX)
def test_conjugates_are_done_when_recorded(name: str) -> None:
    _replayed(COMPLEX[name], torch.randn(3, 4, dtype=torch.complex128))


def test_a_conjugated_sample_and_feed() -> None:
    _replayed(lambda x: x.imag - x.real, torch.randn(3, 4, dtype=torch.complex128).conj())


def test_rrelu_draws_its_slopes_in_each_run() -> None:
    x = torch.full((1000,), -1.0)
    with tfnb.record():
        p = tfnb.placeholder(x)
        y = F.rrelu(p, 0.1, 0.3, training=True)
        (dx,) = tfnb.gradients(y, [p])
    slopes, again = tfnb.run([y, dx], {p: x}), tfnb.run(y, {p: x})
    assert torch.equal(slopes[1], -slopes[0]) and not torch.equal(slopes[0], again)
    assert 0.1 <= -slopes[0].max() <= 0.11 and 0.29 <= -slopes[0].min() <= 0.3


def test_ctc_loss_with_lengths_that_are_fed() -> None:
    def loss(x: torch.Tensor, steps: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(x.log_softmax(2), torch.arange(1, 9).reshape(2, 4), steps, lengths)

    x, steps = torch.randn(9, 2, 10), torch.tensor([9, 8])
    with tfnb.record():
        held = [tfnb.placeholder(v, shape=tuple(v.shape)) for v in (x, steps, torch.tensor([4, 2]))]
        y = loss(*held)
    for lengths in ([4, 2], [1, 3], [2, 2]):
        fed = (x, torch.tensor([7, 9]), torch.tensor(lengths))
        torch.testing.assert_close(tfnb.run(y, dict(zip(held, fed, strict=True))), loss(*fed))


@pytest.mark.parametrize("kind", [list, tuple])
def test_ctc_loss_with_lengths_that_python_knows(kind: Callable[..., Any]) -> None:
    steps, lengths = kind([9, 8]), kind([4, 2])
    targets = torch.arange(1, 9).reshape(2, 4)
    _replayed(lambda x: F.ctc_loss(x.log_softmax(2), targets, steps, lengths), torch.randn(9, 2, 10))


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4), (2, 3, 0)])
def test_batch_norm_without_elements(shape: tuple[int, ...]) -> None:
    for training in (True, False):
        norm = nn.BatchNorm1d(3).train(training)
        _replayed(norm, torch.zeros(shape))
        x = torch.zeros(shape)
        with tfnb.record():
            grads = tfnb.gradients(norm(tfnb.placeholder(x, shape=shape)).sum(), [norm.weight, norm.bias])
        expected = torch.autograd.grad(norm(x).sum(), [norm.weight, norm.bias])
        assert [g.sample.tolist() for g in grads] == [g.tolist() for g in expected]


def test_matrix_products_without_elements() -> None:
    _replayed(torch.matmul, torch.zeros(2, 3, 0), torch.zeros(0, 4))
    _replayed(F.linear, torch.zeros(2, 0, 4), torch.randn(5, 4))


EYE = torch.eye(4)
SPARSE = {
    "a COO sample": lambda x: tfnb.placeholder(EYE.to_sparse()),
    "a CSR sample": lambda x: tfnb.placeholder(EYE.to_sparse_csr()),
    "a COO constant": lambda x: torch.sparse.mm(EYE.to_sparse(), x),
    "a CSR constant": lambda x: EYE.to_sparse_csr() @ x,
    "conversion to COO": lambda x: x.to_sparse(),
    "conversion to CSR": lambda x: x.to_sparse_csr(),
    "conversion to mkldnn": lambda x: x.to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize("name", SPARSE)
def test_other_layouts_are_refused_with_the_line(name: str) -> None:
    with pytest.raises(Unsupported, match=r"test_kinds\.py line \d+"), tfnb.record():
        SPARSE[name](tfnb.placeholder(torch.randn(4, 3)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize("program", [
    lambda x, *_: torch.nested.nested_tensor([x, x[:1]]),
    lambda x, *_: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged),
    lambda x, *_: torch.nested.as_nested_tensor([x, x[:1]], layout=torch.jagged),
    lambda x, *_: torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 3])),
    lambda x, strided, jagged: x * strided,
    lambda x, strided, jagged: x * jagged,
    lambda x, strided, jagged: tfnb.placeholder(strided),
    lambda x, strided, jagged: tfnb.placeholder(jagged),
])  # fmt: skip
def test_a_nested_tensor_is_refused_with_what_serves_instead(program: Any) -> None:
    parts = [torch.ones(2, 3), torch.ones(1, 3)]
    nested = [torch.nested.nested_tensor(parts, layout=layout) for layout in (torch.strided, torch.jagged)]
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3, 3))
        with pytest.raises(Unsupported, match=r"nested tensor.*pad_sequence.*\n  at test_kinds.py line"):
            program(x, *nested)


class Named(torch.Tensor):
    pass


def test_a_recorded_tensor_becomes_no_other_class() -> None:
    sample, ones = torch.ones(3, 3).as_subclass(Named), torch.ones(3)
    with tfnb.record() as graph:
        x = tfnb.placeholder(sample)
        y = x.as_subclass(torch.Tensor) * torch.ones(3)
        with pytest.raises(Unsupported, match=r"as_subclass\(Named\).*\n  at test_kinds.py line"):
            x.as_subclass(Named)
        z = x * ones.as_subclass(Named)
    assert type(y.as_subclass(Named)) is Named, "outside of the recording it is the sample's"
    assert type(torch.ones(2).as_subclass(Named)) is Named and "as_subclass" not in vars(torch.Tensor)
    for fed in (torch.ones(2, 3).as_subclass(Named), nn.Parameter(torch.ones(2, 3))):
        for result in tfnb.Session(graph).run([y, z], {x: fed}):
            assert type(result) is torch.Tensor and torch.equal(result, torch.ones(2, 3))
