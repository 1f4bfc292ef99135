"""The order of axes in memory that the graph tells is that of the values of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tfnb.passes.flow.axis_orders import FEW, axis_orders


def _images(x: Any) -> Any:
    """Channels last, as a view."""
    return (x[:, :, None] + x.new_zeros(4, 1)).permute(0, 3, 1, 2)


def _heads(x: Any) -> Any:
    return x.reshape(x.shape[0], 5, 2, 2).transpose(1, 2)


def _last(layer: nn.Module) -> nn.Module:
    volumes = isinstance(layer, nn.Conv3d)
    return layer.to(memory_format=torch.channels_last_3d if volumes else torch.channels_last)


LAYOUTS: dict[str, Callable[[Any, Any], Sequence[Any]]] = {  # of x [B, 5, 4] and its transposed view
    "views": lambda x, t: [
        x, t, t[:, ::2], t[:, 1], t[..., None], t.unsqueeze(1), x[:, None].transpose(1, 3).squeeze(3),
        x.unfold(1, 2, 1), t.unflatten(1, (2, 2)), x.movedim(0, 2), x.diagonal(dim1=1, dim2=2),
        x[:, None].expand(-1, 3, 5, 4), t.reshape(x.shape[0], -1), *t.split(2, 1), *t.unbind(1), x.permute(1, 2, 0),
        t.flatten(0, 1), t[:, None, 1:],
    ],
    "copies": lambda x, t: [
        t.contiguous(), t.clone(), t.float(), torch.cat([t, t], 1), torch.stack([t, t]), t.flip(1), t.roll(1, 1),
        t[:, [0, 2, 1]], t.index_select(1, torch.tensor([0, 2])), F.pad(t, (1, 1)), t.repeat(1, 2, 1), t.tril(),
        t.repeat_interleave(2, 1), t.sort(1)[0], torch.zeros_like(t), x[:, None].expand(-1, 3, 5, 4).clone(),
        _images(x).contiguous(memory_format=torch.channels_last), t.gather(1, torch.zeros_like(t, dtype=torch.long)),
    ],
    "each number": lambda x, t: [
        t * 2, t + x.mean(1)[:, :, None], t + t.contiguous(), t.contiguous() + t, t[:, :4, :4] + x[:, :4, :4],
        x[:, :4, :4] + t[:, :4, :4], torch.where(t > 0, t, 0.0), t.masked_fill(t > 1, 0), F.gelu(t), t.clamp(-1, 1),
        F.prelu(t, torch.tensor([0.1])), F.glu(t, 1), torch.ones(4, 5).T * x, x + torch.ones(4, 5).T,
        torch.lerp(t, t * 2, 0.5), t + torch.ones(4, 5), x[:, 0][:, None] + t[:, :, 0][:, :, None],
        x[:, None].expand(-1, 3, 5, 4).relu(),
    ],
    "sums": lambda x, t: [
        t.cumsum(1), t.sum(1, keepdim=True), (x[..., None] * torch.ones(3)).permute(3, 2, 0, 1).mean(3), t.softmax(1),
        t.log_softmax(-1), (x[..., None] * torch.ones(3)).permute(2, 0, 1, 3).amax(3), F.normalize(t, dim=1),
        F.layer_norm(x.transpose(0, 1), (4,)), F.layer_norm(t, (5,)), F.group_norm(t, 2), nn.BatchNorm1d(4)(t),
        nn.BatchNorm1d(4).eval()(t), nn.BatchNorm2d(4)(_images(x)), torch.fft.rfft(x, dim=1).real,
    ],
    "products": lambda x, t: [
        t @ x, x @ t, *(torch.einsum(rule, x, torch.ones(4, 4)) for rule in ("bij,jk->bik", "bij,kj->bki")),
        F.linear(x.transpose(0, 1), torch.ones(3, 4)), nn.Linear(4, 3)(x), torch.baddbmm(t, t, torch.ones(6, 5, 5)),
        _heads(x) @ _heads(x).transpose(-2, -1), torch.cdist(x, x).transpose(1, 2), nn.Bilinear(4, 4, 3)(x, x),
    ],
    "images": lambda x, t: [
        nn.Conv1d(4, 6, 3)(t), nn.Conv2d(4, 3, 1)(_images(x)), _last(nn.Conv2d(4, 3, 1))(_images(x).contiguous()),
        nn.Conv2d(4, 3, 1)(_images(x).contiguous()), F.conv_transpose1d(t, torch.ones(4, 2, 2)), F.max_pool1d(t, 2),
        *(pool(images, 2) for images in (_images(x), _images(x).contiguous()) for pool in (
            F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d, F.interpolate,
        )), F.interpolate(_images(x), scale_factor=2, mode="bilinear"), F.pixel_shuffle(_images(x), 2),
        _last(nn.Conv3d(2, 3, 1, dtype=torch.float64))(torch.stack([x, x], 1)[:, :, None].double()),
    ],
    "attention": lambda x, t: [
        F.scaled_dot_product_attention(q := _heads(x), q, q), F.scaled_dot_product_attention(q.contiguous(), q, q),
        F.scaled_dot_product_attention(q, q, q, torch.ones(5, 5).tril().bool()),
        F.scaled_dot_product_attention(x, x, x), F.scaled_dot_product_attention(q, q, torch.cat([q, q], -1)),
        F.scaled_dot_product_attention(q.mT, q.mT, q.mT),
        nn.MultiheadAttention(4, 2, batch_first=True)(x, x, x, need_weights=False)[0],
    ],
    "nets": lambda x, t: [
        *(out for net in (nn.LSTM, nn.GRU, nn.RNN) for first in (True, False)
          for out in tensors(net(4, 3, 2, batch_first=first)(x))),
        nn.LSTM(4, 3)(x[0])[0], nn.Embedding(9, 4)(torch.zeros_like(t, dtype=torch.long)),
    ],
    "draws": lambda x, t: [
        F.dropout(t, 0.5), torch.randn_like(t), torch.bernoulli(t.sigmoid()), torch.empty_like(t).normal_(),
        F.rrelu(t, training=True), F.dropout1d(t, 0.5),
    ],
}  # fmt: skip


def tensors(found: Any) -> list[Any]:
    return [found] if isinstance(found, torch.Tensor) else [each for part in found for each in tensors(part)]


def order(tensor: torch.Tensor) -> list[int]:
    """The axes of more than one place, by their strides in new memory."""
    strides = torch.empty_like(tensor).stride()
    return sorted((axis for axis, size in enumerate(tensor.shape) if size > 1), key=lambda axis: -strides[axis])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYOUTS)
def test_orders_are_those_of_a_run(name: str) -> None:
    """Ops are done on a few zeros, or without memory."""
    torch.manual_seed(0)
    with tfnb.record("laid") as graph:
        x = tfnb.placeholder(torch.randn(6, 5, 4), name="x", shape=(6 if name == "products" else None, 5, 4))
        outs = LAYOUTS[name](x, x.transpose(1, 2))
    found = tfnb.Session(graph, compile="off").run(outs, {x: torch.randn(6, 5, 4)})
    expected = [order(out) for out in found]
    fed = {x.value: graph.contents.by_id[x.value.node].outputs[0]}
    for few in (FEW, 0):
        told = axis_orders(graph.nodes, fed, [out.value for out in outs], few)
        assert [
            [axis for axis in told[out.value] if tensor.shape[axis] > 1]
            for out, tensor in zip(outs, found, strict=True)
        ] == expected, few  # fmt: skip


def test_a_step_without_draws_is_not_looked_at() -> None:
    with tfnb.record("plain") as graph:
        x = tfnb.placeholder(torch.ones(3), name="x")
        x.exp()
    assert not axis_orders(graph.nodes, {x.value: graph.nodes[0].outputs[0]}, [])
