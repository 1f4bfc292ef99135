"""Sequence models as plain torch modules: recurrent classifiers, translation with attention, transformers, GPT, ViT.

Nothing of tfnb. Token inputs are [B, T] of ids, images [B, C, H, W].
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

# -- recurrent -----------------------------------------------------------------------------------------------------


class RecurrentClassifier(nn.Module):
    """Embedded tokens through a recurrent layer; the last state of each direction gives the logits."""

    def __init__(
        self, layer: type[nn.RNNBase], *, vocabulary: int = 20, width: int = 8, hidden: int = 6, classes: int = 3,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.layer = layer(width, hidden, batch_first=True, **kwargs)
        self.out = nn.Linear(hidden * (2 if kwargs.get("bidirectional") else 1), classes)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, last = self.layer(self.embedding(ids))
        hidden = last[0] if isinstance(last, tuple) else last
        top = torch.cat([hidden[-2], hidden[-1]], -1) if self.layer.bidirectional else hidden[-1]
        return self.out(top) + self.out(states.mean(1))


class PackedClassifier(nn.Module):
    """A recurrent layer over packed sequences of the lengths that are given."""

    def __init__(
        self, layer: type[nn.RNNBase] = nn.LSTM, *, vocabulary: int = 20, width: int = 8, hidden: int = 6,
        classes: int = 3, is_sorted: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding, self.is_sorted = nn.Embedding(vocabulary, width), is_sorted
        self.layer = layer(width, hidden, **kwargs)
        self.out = nn.Linear(hidden * (2 if kwargs.get("bidirectional") else 1), classes)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x, first = self.embedding(ids), self.layer.batch_first
        x = x if first else x.transpose(0, 1)
        packed = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=self.is_sorted)
        states, last = self.layer(packed)
        padded, counts = pad_packed_sequence(states, batch_first=first)
        last = last[0] + last[1] if isinstance(last, tuple) else last
        top = last[-2:].transpose(0, 1).flatten(1) if self.layer.bidirectional else last[-1]
        steps = padded if first else padded.transpose(0, 1)
        return self.out(top) + self.out(steps.mean(1)) * counts.unsqueeze(1)


class CellLoop(nn.Module):
    """An LSTM cell called in a Python loop over time."""

    def __init__(self, *, width: int = 5, hidden: int = 6) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(width, hidden), nn.Linear(hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[0], self.cell.hidden_size)
        c = torch.zeros_like(h)
        outs = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            outs.append(self.out(h))
        return torch.stack(outs, 1).squeeze(-1)


class Translator(nn.Module):
    """Sequence to sequence: a bidirectional GRU reads, a GRU cell writes, looking back by additive attention."""

    def __init__(self, *, source: int = 20, target: int = 15, width: int = 8, hidden: int = 6) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(source, width, padding_idx=0), nn.Embedding(target, width)
        self.reader = nn.GRU(width, hidden, batch_first=True, bidirectional=True)
        self.start = nn.Linear(2 * hidden, hidden)
        self.query, self.key = nn.Linear(hidden, hidden, bias=False), nn.Linear(2 * hidden, hidden)
        self.score = nn.Linear(hidden, 1, bias=False)
        self.cell, self.out = nn.GRUCell(width + 2 * hidden, hidden), nn.Linear(3 * hidden, target)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        states, last = self.reader(self.source(source))
        keys, hidden = self.key(states), torch.tanh(self.start(torch.cat([last[0], last[1]], 1)))
        padding = (source == 0) & (torch.arange(source.shape[1]) > 0)
        logits = []
        for token in self.target(target).unbind(1):
            scores = self.score(torch.tanh(keys + self.query(hidden)[:, None])).squeeze(-1)
            weights = scores.masked_fill(padding, float("-inf")).softmax(1)
            seen = torch.bmm(weights.unsqueeze(1), states).squeeze(1)
            hidden = self.cell(torch.cat([token, seen], 1), hidden)
            logits.append(self.out(torch.cat([hidden, seen], 1)))
        return torch.stack(logits, 1)


# -- torch's transformers ------------------------------------------------------------------------------------------


class Places(nn.Module):
    """Sines and cosines added to a sequence [B, T, D], as a buffer."""

    table: torch.Tensor

    def __init__(self, width: int, longest: int = 64) -> None:
        super().__init__()
        angle = torch.arange(longest)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
        table = torch.zeros(longest, width)
        table[:, 0::2], table[:, 1::2] = angle.sin(), angle.cos()
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.size(1)]


class Encoder(nn.Module):
    """`nn.TransformerEncoder` over tokens, with a causal mask and a padding mask."""

    def __init__(
        self, *, vocabulary: int = 20, width: int = 8, heads: int = 2, layers: int = 2, causal: bool = True,
        dropout: float = 0.0, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding, self.places, self.causal = nn.Embedding(vocabulary, width), Places(width), causal
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=dropout, batch_first=True, **kwargs)
        self.layers = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1]) if self.causal else None
        if padding is not None and mask is not None:
            mask = mask < 0  # masks of one kind
        x = self.places(self.embedding(ids) * math.sqrt(self.embedding.embedding_dim))
        return self.out(self.layers(x, mask=mask, src_key_padding_mask=padding))


class Decoder(nn.Module):
    """`nn.TransformerDecoder` reading a memory."""

    def __init__(self, *, width: int = 8, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerDecoder(layer, layers)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.layers(x, memory, tgt_mask=mask, memory_key_padding_mask=padding)


class Transformer(nn.Module):
    """`nn.Transformer` from tokens to tokens."""

    def __init__(self, *, vocabulary: int = 20, width: int = 8, heads: int = 2, layers: int = 1) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(vocabulary, width), Places(width)
        self.layers = nn.Transformer(width, heads, layers, layers, 2 * width, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = self.layers.generate_square_subsequent_mask(target.size(1))
        x, y = self.places(self.embedding(source)), self.places(self.embedding(target))
        return self.out(self.layers(x, y, tgt_mask=mask, tgt_is_causal=True))


class CrossAttention(nn.Module):
    """`nn.MultiheadAttention` with keys and values of other widths, with or without the weights."""

    def __init__(self, *, width: int = 8, keys: int = 6, values: int = 5, weights: bool = True, **kwargs: Any) -> None:
        super().__init__()
        self.weights = weights
        self.attention = nn.MultiheadAttention(width, 2, kdim=keys, vdim=values, batch_first=True, **kwargs)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, weights = self.attention(q, k, v, need_weights=self.weights, average_attn_weights=False)
        return out if weights is None else out + weights.square().sum((1, 3)).unsqueeze(-1)


class MaskedAttention(nn.Module):
    """`nn.MultiheadAttention` with a padding mask and an attention mask: one of booleans, or one of floats a head."""

    def __init__(self, *, width: int = 8, weights: bool = True, per_head: bool = False) -> None:
        super().__init__()
        self.weights, self.per_head = weights, per_head
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        rows, time, _ = x.shape
        mask = torch.ones(time, time, dtype=torch.bool).triu(1)
        if self.per_head:
            mask = (mask * -2.0).expand(rows * 2, time, time)
            padding = torch.zeros(rows, time).masked_fill(padding, float("-inf"))
        out, weights = self.attention(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=self.weights)
        return out if weights is None else out + weights.square().sum(1).unsqueeze(-1)


class MaskedTransformer(nn.Module):
    """`nn.Transformer` with a causal mask and padding on both sides."""

    def __init__(self, *, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Transformer(width, 2, 1, 1, 2 * width, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor, ended: torch.Tensor, done: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(y.shape[1], y.shape[1], dtype=torch.bool).triu(1)
        return self.layers(
            x, y, tgt_mask=mask, src_key_padding_mask=ended, tgt_key_padding_mask=done, memory_key_padding_mask=ended
        )


# -- written out ---------------------------------------------------------------------------------------------------


class CausalAttention(nn.Module):
    """Causal self-attention by torch's kernel, or by hand with a mask buffer."""

    mask: torch.Tensor

    def __init__(self, width: int, heads: int, time: int, dropout: float, by_hand: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.by_hand = heads, dropout, by_hand
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("mask", torch.tril(torch.ones(time, time)).view(1, 1, time, time))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.size()
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        if self.by_hand:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.mask[:, :, :time, :time] == 0, float("-inf"))
            y = self.drop(F.softmax(scores, dim=-1)) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout * self.training, is_causal=True)
        return self.drop(self.proj(y.transpose(1, 2).contiguous().view(batch, time, width)))


class GPTBlock(nn.Module):
    """Attention and a gelu layer, each behind a layer norm and added to its input."""

    def __init__(self, width: int, heads: int, time: int, dropout: float, by_hand: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, time, dropout, by_hand)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Learned places, pre-norm blocks, the head tied to the token embedding. Defaults are GPT-2's smallest."""

    def __init__(
        self, *, layers: int = 12, vocabulary: int = 50257, width: int = 768, heads: int = 12, time: int = 1024,
        dropout: float = 0.0, by_hand: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(time, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, time, dropout, by_hand) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, 0.0, 0.02 / math.sqrt(2 * layers) if "proj" in name else 0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(0, ids.size(1), dtype=torch.long, device=ids.device)
        x = self.drop(self.tokens(ids) + self.places(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ViT(nn.Module):
    """Patches as tokens, a class token in front, `nn.TransformerEncoder`. Defaults are ViT-B/16."""

    def __init__(
        self, *, image: int = 224, patch: int = 16, width: int = 768, heads: int = 12, layers: int = 12,
        classes: int = 1000, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.places
        return self.head(self.norm(self.encoder(x)[:, 0]))
