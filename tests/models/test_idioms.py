"""Programs as people write them, recorded as they stand, train like plain torch at batches of other sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tfnb
from tests.models.idioms import IDIOMS

SLOW = {
    "alibi", "dcgan", "deep_supervision_with_state", "diffusion", "kalman", "segmentation", "seq2seq_teacher_forcing",
    "siren", "small_gpt", "spectral_audio", "super_resolution", "word_language_model", "scripted_and_compiled",
    "info_nce", "imbalanced", "dirichlet_mixture", "rotary_complex", "wgan_gp", "nt_xent_fill_diagonal",
    "unfolded_convolution",
}  # fmt: skip
NAMES = [  # quickly every second of those that are not long
    pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW or n % 2))
    for n, name in enumerate(sorted(IDIOMS, key=SLOW.__contains__))
]
ROWS = (6, 6, 4, 7)  # recorded at the first, run at the rest


class SameDraws(TorchDispatchMode):
    """Gives eager code the random values that a run of the graph drew, in program order."""

    def __init__(self, draws: list[torch.Tensor]) -> None:
        super().__init__()
        self.draws: Iterator[torch.Tensor] = iter(draws)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return out
        drawn = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        for tensor in drawn:
            tensor.copy_(next(self.draws))
        return out


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def tensors(state: Any) -> list[torch.Tensor]:
    parts = state if isinstance(state, list) else [state]
    each = [list(p.state_dict(keep_vars=True).values()) if isinstance(p, torch.nn.Module) else [p] for p in parts]
    return [tensor.detach() for part in each for tensor in part]


def plain(result: Any) -> list[torch.Tensor]:
    return [leaf.detach().clone() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def close(got: list[torch.Tensor], want: list[torch.Tensor], what: str) -> None:
    for i, (here, there) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(here, there, rtol=1e-7, atol=1e-9, msg=lambda text, i=i: f"{what} {i}: {text}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("double")
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*Python took the")
def test_a_recorded_program_trains_as_it_does_in_torch(name: str) -> None:
    if name == "kmeans_and_sinkhorn" and torch.__version__ < (2, 12):
        pytest.skip("quantile of torch 2.11 wants a number of elements, and says so")
    torch.manual_seed(1)
    state, step, draws = IDIOMS[name]()
    torch.manual_seed(1)
    twin, twin_step, _ = IDIOMS[name]()
    batches = [[draw(rows) for draw in draws] for rows in ROWS]
    with tfnb.record() as graph:
        fed = [tfnb.placeholder(sample) for sample in batches[0]]
        result = step(*fed)
    randoms = [f"{n.name}:{i}" for n in graph.nodes if n.stream is not None for i in [len(n.outputs) - 1]]
    session = tfnb.Session(graph)
    for rows, batch in zip(ROWS[1:], batches[1:], strict=True):
        found, drawn = session.run([result, randoms], dict(zip(fed, batch, strict=True)))
        with SameDraws(drawn):
            expected = twin_step(*(tensor.clone() for tensor in batch))
        got, want = plain(found), plain(expected)
        assert len(got) == len(want)
        close(got, want, f"{rows} rows, result")
        close(tensors(state), tensors(twin), f"{rows} rows, state")
