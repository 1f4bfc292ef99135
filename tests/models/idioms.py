"""Training steps in the idioms of tutorials and repositories, each runnable as it is with and without a recording.

A program is a function that builds its state and returns ``(state, step, draws)``: what it trains, one step that
returns whatever shall be compared, and how its inputs are drawn for a number of rows.
"""

# ruff: noqa: B905, E731, RUF007, RUF059  (the programs stand as people write them)
from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import distributions, nn

Draws = tuple[Callable[[int], torch.Tensor], ...]
Program = Callable[[], tuple[Any, Callable[..., Any], Draws]]
IDIOMS: dict[str, Program] = {}


def idiom(program: Program) -> Program:
    IDIOMS[program.__name__] = program
    return program


def floats(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda rows: torch.randn(rows, *shape)


def ids(count: int, *shape: int, low: int = 0) -> Callable[[int], torch.Tensor]:
    return lambda rows: torch.randint(low, count, (rows, *shape))


def bools(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda rows: torch.rand(rows, *shape) > 0.4


# -- language -------------------------------------------------------------------------------------------------------


@idiom
def character_mlp():
    """Loose tensors as parameters, a hand-written batch norm with running statistics, manual updates."""
    table = torch.randn(27, 4, requires_grad=True)
    w1 = torch.randn(12, 16, requires_grad=True)
    b1 = torch.zeros(16, requires_grad=True)
    w2 = (torch.randn(16, 27) * 0.1).requires_grad_()
    mean, var = nn.Buffer(torch.zeros(16)), nn.Buffer(torch.ones(16))
    kept = nn.Module()
    kept.mean, kept.var = mean, var
    parameters = [table, w1, b1, w2]

    def step(x, y):
        h = table[x].view(x.shape[0], -1) @ w1 + b1
        m, v = h.mean(0), h.var(0)
        with torch.no_grad():
            mean.mul_(0.9).add_(0.1 * m)
            var.mul_(0.9).add_(0.1 * v)
        logits = torch.tanh((h - m) / (v + 1e-5).sqrt()) @ w2
        loss = F.cross_entropy(logits, y)
        for p in parameters:
            p.grad = None
        loss.backward()
        for p in parameters:
            p.data += -0.1 * p.grad
        return loss, *parameters, mean, var

    return [kept, *parameters], step, (ids(27, 3), ids(27))


@idiom
def bigram_counts():
    """Counts by index_put with accumulation, log probabilities, a manual step under no_grad."""
    w = nn.Parameter(torch.randn(9, 9))

    def step(x, y):
        logits = F.one_hot(x, num_classes=9).to(w.dtype) @ w
        counts = logits.exp()
        probs = counts / counts.sum(1, keepdim=True)
        loss = -probs[torch.arange(x.shape[0]), y].log().mean() + 0.01 * (w**2).mean()
        n = torch.zeros(9, 9).index_put((x, y), torch.tensor(1.0), accumulate=True)
        loss.backward()
        with torch.no_grad():
            w.sub_(0.5 * w.grad)
        w.grad = None
        return loss, n, w

    return [w], step, (ids(9), ids(9))


class Head(nn.Module):
    def __init__(self, width, heads, block):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.register_buffer("bias", torch.tril(torch.ones(block, block)).view(1, 1, block, block))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.qkv(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.proj(y.transpose(1, 2).contiguous().view(B, T, C))


@idiom
def small_gpt():
    """Tied embeddings, two groups of weight decay, clipping, ignored targets."""

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.transformer = nn.ModuleDict(dict(
                wte=nn.Embedding(20, 12), wpe=nn.Embedding(8, 12), drop=nn.Dropout(0.0),
                h=nn.ModuleList([nn.ModuleDict(dict(ln=nn.LayerNorm(12), attn=Head(12, 3, 8))) for _ in range(2)]),
                ln_f=nn.LayerNorm(12),
            ))  # fmt: skip
            self.lm_head = nn.Linear(12, 20, bias=False)
            self.transformer.wte.weight = self.lm_head.weight

        def forward(self, idx, targets=None):
            device = idx.device
            b, t = idx.size()
            assert t <= 8
            pos = torch.arange(0, t, dtype=torch.long, device=device)
            x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
            for block in self.transformer.h:
                x = x + block.attn(block.ln(x))
            logits = self.lm_head(self.transformer.ln_f(x))
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
            return logits, loss

    model = GPT()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
                                  lr=1e-3, betas=(0.9, 0.95))  # fmt: skip

    def step(x, y):
        logits, loss = model(x, torch.where(y == 3, -1, y))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return logits, loss, norm, optimizer.step()

    return model, step, (ids(20, 6), ids(20, 6))


@idiom
def word_language_model():
    """Hidden state carried and detached, init_hidden from a parameter, manual SGD with alpha."""

    class RNNModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Embedding(15, 6), nn.Linear(6, 15)
            self.rnn = nn.LSTM(6, 6, 2, dropout=0.0)
            self.decoder.weight = self.encoder.weight

        def forward(self, input, hidden):
            output, hidden = self.rnn(self.encoder(input), hidden)
            return F.log_softmax(self.decoder(output).view(-1, 15), dim=1), hidden

        def init_hidden(self, bsz):
            weight = next(self.parameters())
            return weight.new_zeros(2, bsz, 6), weight.new_zeros(2, bsz, 6)

    model = RNNModel()

    def step(x, y):
        model.zero_grad()
        hidden = tuple(h.detach() for h in model.init_hidden(x.size(0)))
        output, hidden = model(x.t(), hidden)
        loss = F.nll_loss(output, y.t().reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.5)
        return loss, hidden, list(model.parameters())

    return model, step, (ids(15, 5), ids(15, 5))


@idiom
def rotary_complex():
    """Rotary embeddings by complex numbers, KV repetition, RMS norm, SwiGLU."""
    wq, wk, wv, wo = (nn.Linear(8, n, bias=False) for n in (8, 4, 4, 8))
    w1, w2, w3 = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False), nn.Linear(8, 12, bias=False)
    gain = nn.Parameter(torch.ones(8))
    freqs = 1.0 / (10000.0 ** (torch.arange(0, 4, 2)[:2].float() / 4))
    cis = torch.polar(torch.ones(16, 2), torch.outer(torch.arange(16).float(), freqs.float()).to(torch.float64))
    layers = nn.ModuleList([wq, wk, wv, wo, w1, w2, w3])
    optimizer = torch.optim.Adam([*layers.parameters(), gain], lr=1e-2)

    def rotate(x, cis):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * cis[None, :, None, :]).flatten(3).type_as(x)

    def norm(x):
        return gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def step(x):
        b, t, _ = x.shape
        h = norm(x)
        q, k, v = wq(h).view(b, t, 2, 4), wk(h).view(b, t, 1, 4), wv(h).view(b, t, 1, 4)
        q, k = rotate(q, cis[:t]), rotate(k, cis[:t])
        k, v = (s[:, :, :, None, :].expand(b, t, 1, 2, 4).reshape(b, t, 2, 4) for s in (k, v))
        mask = torch.full((t, t), float("-inf")).triu(diagonal=1)
        scores = torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1)) / math.sqrt(4) + mask
        out = (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2).reshape(b, t, -1)
        h = x + wo(out)
        h = h + w2(F.silu(w1(norm(h))) * w3(norm(h)))
        loss = (h[:, :-1] - x[:, 1:]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        return h, loss, optimizer.step()

    return [layers, gain], step, (floats(5, 8),)


@idiom
def alibi():
    """Linear biases, a cache grown by cat token by token."""
    q, k, v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    slopes = torch.tensor([2 ** (-8 / 2 * (i + 1)) for i in range(2)]).view(2, 1, 1)

    def step(x):
        cache = None
        outs = []
        for i in range(x.size(1)):
            token = x[:, i : i + 1]
            kk, vv = (f(token).unflatten(-1, (2, 4)).transpose(1, 2) for f in (k, v))
            cache = (kk, vv) if cache is None else tuple(torch.cat(c, dim=2) for c in zip(cache, (kk, vv)))
            n = cache[0].shape[2]
            bias = slopes * (torch.arange(n) - (n - 1))[None, None, :]
            qq = q(token).unflatten(-1, (2, 4)).transpose(1, 2)
            outs.append((((qq @ cache[0].mT) / 2 + bias).softmax(-1) @ cache[1]).transpose(1, 2).flatten(2))
        y = torch.cat(outs, 1)
        loss = F.mse_loss(y, x.roll(-1, 1))
        grads = torch.autograd.grad(loss, [q.weight, k.weight, v.weight, v.bias])
        with torch.no_grad():
            for p, g in zip([q.weight, k.weight, v.weight, v.bias], grads, strict=True):
                p -= 0.1 * g
        return y, loss, q.weight, k.weight, v.weight, v.bias

    return nn.ModuleList([q, k, v]), step, (floats(4, 8),)


@idiom
def seq2seq_teacher_forcing():
    """Cells in a loop, preallocated outputs filled by index, a coin for teacher forcing, argmax fed back."""
    embed, enc, dec, out = nn.Embedding(10, 6), nn.GRU(6, 6), nn.GRUCell(6, 6), nn.Linear(6, 10)
    attn = nn.Linear(12, 1)
    model = nn.ModuleList([embed, enc, dec, out, attn])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(src, trg):
        memory, hidden = enc(embed(src).transpose(0, 1))
        hidden = hidden.squeeze(0)
        outputs = torch.zeros(trg.shape[1], trg.shape[0], 10)
        token = trg[:, 0]
        for t in range(1, trg.shape[1]):
            e = attn(torch.cat([hidden.unsqueeze(0).repeat(memory.shape[0], 1, 1), memory], 2)).squeeze(2)
            context = torch.bmm(F.softmax(e, 0).t().unsqueeze(1), memory.transpose(0, 1)).squeeze(1)
            hidden = dec(embed(token) + context, hidden)
            outputs[t] = out(hidden)
            top1 = outputs[t].argmax(1)
            token = trg[:, t] if t % 2 else top1
        loss = F.cross_entropy(outputs[1:].view(-1, 10), trg.t()[1:].reshape(-1), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        return loss, outputs, optimizer.step()

    return model, step, (ids(10, 4), ids(10, 5))


@idiom
def crf():
    """Partition function by a loop of logsumexp, a mask, the score of the gold path by gather."""
    emit, trans = nn.Linear(5, 4), nn.Parameter(torch.randn(4, 4))
    start = nn.Parameter(torch.randn(4))
    optimizer = torch.optim.Adam([*emit.parameters(), trans, start], lr=0.05)

    def step(x, tags, mask):
        mask = mask.clone()
        mask[:, 0] = True
        e = emit(x)
        alpha = start + e[:, 0]
        score = start[tags[:, 0]] + e[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, x.shape[1]):
            new = torch.logsumexp(alpha.unsqueeze(2) + trans + e[:, t].unsqueeze(1), dim=1)
            alpha = torch.where(mask[:, t].unsqueeze(1), new, alpha)
            gain = trans[tags[:, t - 1], tags[:, t]] + e[:, t].gather(1, tags[:, t, None])[:, 0]
            score = score + gain * mask[:, t]
        nll = (alpha.logsumexp(1) - score).mean()
        optimizer.zero_grad()
        nll.backward()
        return nll, alpha, optimizer.step()

    return [emit, trans, start], step, (floats(4, 5), ids(4, 4), bools(4))


@idiom
def ctc():
    conv = nn.Conv1d(3, 6, 3, padding=1)
    optimizer = torch.optim.Adam(conv.parameters(), lr=1e-2)

    def step(x, y):
        logp = conv(x).permute(2, 0, 1).log_softmax(2)
        n = x.shape[0]
        lengths = torch.full((n,), x.shape[2], dtype=torch.long)
        targets = torch.full((n,), 3, dtype=torch.long)
        loss = F.ctc_loss(logp, y, lengths, targets, blank=0, zero_infinity=True)
        optimizer.zero_grad()
        loss.backward()
        return loss, optimizer.step()

    return conv, step, (floats(3, 9), ids(6, 3, low=1))


# -- generative -----------------------------------------------------------------------------------------------------


@idiom
def dcgan():
    """Two networks, two optimizers, labels filled, detach between them."""

    def init(m):
        if m.__class__.__name__.find("Conv") != -1:
            nn.init.normal_(m.weight.data, 0.0, 0.02)
        elif m.__class__.__name__.find("BatchNorm") != -1:
            nn.init.normal_(m.weight.data, 1.0, 0.02)
            nn.init.constant_(m.bias.data, 0)

    G = nn.Sequential(nn.ConvTranspose2d(4, 8, 4, 1, 0, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
                      nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh()).apply(init)  # fmt: skip
    D = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
                      nn.Conv2d(8, 1, 4, 1, 0, bias=False), nn.Sigmoid()).apply(init)  # fmt: skip
    optD = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optG = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCELoss()

    def step(real, noise):
        D.zero_grad()
        b_size = real.size(0)
        label = torch.full((b_size,), 1.0, dtype=real.dtype, device=real.device)
        errD_real = criterion(D(real).view(-1), label)
        errD_real.backward()
        fake = G(noise.view(noise.size(0), -1, 1, 1))
        label.fill_(0.0)
        errD_fake = criterion(D(fake.detach()).view(-1), label)
        errD_fake.backward()
        first = optD.step()
        G.zero_grad()
        label.fill_(1.0)
        errG = criterion(D(fake).view(-1), label)
        errG.backward()
        return errD_real + errD_fake, errG, first, optG.step()

    return [G, D], step, (floats(1, 8, 8), floats(4))


@idiom
def wgan_gp():
    """A critic with a gradient penalty through autograd.grad(create_graph=True)."""
    critic = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 1))
    optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-3)

    def step(real, fake):
        alpha = torch.rand(real.size(0), 1)
        mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        score = critic(mixed)
        grad = torch.autograd.grad(outputs=score, inputs=mixed, grad_outputs=torch.ones_like(score),
                                   create_graph=True, retain_graph=True, only_inputs=True)[0]  # fmt: skip
        penalty = ((grad.view(grad.size(0), -1).norm(2, dim=1) - 1) ** 2).mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        optimizer.zero_grad()
        loss.backward()
        return penalty, loss, optimizer.step()

    return critic, step, (floats(6), floats(6))


@idiom
def vae():
    """exp, randn_like, binary cross entropy summed, KL by hand."""

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc21, self.fc22 = nn.Linear(12, 8), nn.Linear(8, 3), nn.Linear(8, 3)
            self.fc3, self.fc4 = nn.Linear(3, 8), nn.Linear(8, 12)

        def forward(self, x):
            h = F.relu(self.fc1(x))
            mu, logvar = self.fc21(h), self.fc22(h)
            std = torch.exp(0.5 * logvar)
            z = mu + torch.randn_like(std) * std
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(x):
        x = torch.sigmoid(x)
        recon, mu, logvar = model(x.view(-1, 12))
        bce = F.binary_cross_entropy(recon, x.view(-1, 12), reduction="sum")
        loss = bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        optimizer.zero_grad()
        loss.backward()
        return loss, optimizer.step()

    return model, step, (floats(3, 4),)


@idiom
def vq_vae():
    """Nearest codes, a straight-through estimator, moving averages of the codes in buffers."""

    class Quantizer(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("embed", torch.randn(4, 6))
            self.register_buffer("cluster_size", torch.ones(6))
            self.register_buffer("embed_avg", self.embed.clone())

        def forward(self, input):
            flatten = input.reshape(-1, 4)
            dist = flatten.pow(2).sum(1, keepdim=True) - 2 * flatten @ self.embed + self.embed.pow(2).sum(0, True)
            _, ind = (-dist).max(1)
            onehot = F.one_hot(ind, 6).type(flatten.dtype)
            quantize = F.embedding(ind.view(*input.shape[:-1]), self.embed.transpose(0, 1))
            if self.training:
                self.cluster_size.data.mul_(0.9).add_(onehot.sum(0), alpha=0.1)
                self.embed_avg.data.mul_(0.9).add_((flatten.transpose(0, 1) @ onehot).detach(), alpha=0.1)
                n = self.cluster_size.sum()
                size = (self.cluster_size + 1e-5) / (n + 6 * 1e-5) * n
                self.embed.data.copy_(self.embed_avg / size.unsqueeze(0))
            diff = (quantize.detach() - input).pow(2).mean()
            return input + (quantize - input).detach(), diff, ind

    enc, quant, dec = nn.Linear(5, 8), Quantizer(), nn.Linear(8, 5)
    model = nn.ModuleList([enc, quant, dec])
    optimizer = torch.optim.Adam([*enc.parameters(), *dec.parameters()], lr=1e-2)

    def step(x):
        q, diff, ind = quant(enc(x).view(-1, 2, 4))
        loss = F.mse_loss(dec(q.flatten(1)), x) + 0.25 * diff
        optimizer.zero_grad()
        loss.backward()
        return loss, ind, optimizer.step()

    return model, step, (floats(5),)


@idiom
def diffusion():
    """Schedules in buffers, extract by gather, sinusoidal times, a moving average of the weights."""

    def extract(a, t, shape):
        b, *_ = t.shape
        return a.gather(-1, t).reshape(b, *((1,) * (len(shape) - 1)))

    class Times(nn.Module):
        def forward(self, t):
            half = 4
            emb = torch.exp(torch.arange(half, device=t.device) * -(math.log(10000) / (half - 1)))
            emb = t[:, None] * emb[None, :]
            return torch.cat((emb.sin(), emb.cos()), dim=-1)

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.time = nn.Sequential(Times(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
            self.init, self.norm, self.out = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 1)
            betas = torch.linspace(1e-4, 0.02, 20)
            cumprod = torch.cumprod(1.0 - betas, dim=0)
            self.register_buffer("sqrt_cum", torch.sqrt(cumprod))
            self.register_buffer("sqrt_one_minus", torch.sqrt(1.0 - cumprod))

        def forward(self, x, t):
            scale, shift = self.time(t)[:, :, None, None].chunk(2, dim=1)
            return self.out(F.silu(self.norm(self.init(x)) * (scale + 1) + shift))

    model = Denoiser()
    ema = deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x):
        b, c, h, w = x.shape
        t = torch.randint(0, 20, (b,), device=x.device).long()
        noise = torch.randn_like(x)
        noisy = extract(model.sqrt_cum, t, x.shape) * x + extract(model.sqrt_one_minus, t, x.shape) * noise
        loss = F.smooth_l1_loss(model(noisy, t), noise)
        optimizer.zero_grad()
        loss.backward()
        done = optimizer.step()
        with torch.no_grad():
            for old, new in zip(ema.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1)
        return loss, done, list(ema.parameters())

    return [model, ema], step, (floats(2, 4, 4),)


@idiom
def coupling_flow():
    """Affine coupling with a checkerboard mask, log determinants accumulated in place, a Normal prior."""
    nets = nn.ModuleList([nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)])
    masks = torch.tensor([[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]).double()
    optimizer = torch.optim.Adam(nets.parameters(), lr=1e-2)

    def step(x):
        prior = distributions.MultivariateNormal(torch.zeros(4), torch.eye(4))
        log_det, z = x.new_zeros(x.shape[0]), x
        for i in reversed(range(len(nets))):
            z_ = masks[i] * z
            s, t = nets[i](z_).chunk(2, dim=1)
            s, t = torch.tanh(s) * (1 - masks[i]), t * (1 - masks[i])
            z = (1 - masks[i]) * (z - t) * torch.exp(-s) + z_
            log_det -= s.sum(dim=1)
        loss = -(prior.log_prob(z) + log_det).mean()
        optimizer.zero_grad()
        loss.backward()
        return loss, z, optimizer.step()

    return nets, step, (floats(4),)


# -- policies and distributions ---------------------------------------------------------------------------------------


@idiom
def reinforce():
    """Categorical sample, log_prob, entropy; discounted returns in a Python loop, normalised."""
    policy = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Softmax(dim=-1))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    def step(state, rewards):
        m = distributions.Categorical(policy(state))
        action = m.sample()
        R, returns = 0, []
        for r in rewards.unbind(1)[::-1]:
            R = r + 0.99 * R
            returns.insert(0, R)
        returns = torch.stack(returns, 1).sum(1)
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        loss = (-m.log_prob(action) * returns).mean() - 0.01 * m.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        return loss, action, optimizer.step()

    return policy, step, (floats(4), floats(3))


@idiom
def ppo():
    """Ratios clamped, torch.min, a value loss, a Normal policy with a state-independent log std."""
    actor, critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), nn.Linear(4, 1)
    logstd = nn.Parameter(torch.zeros(1, 2))
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters(), logstd], lr=1e-2, eps=1e-5)

    def step(obs, action, old, adv, ret):
        mean = actor(obs)
        probs = distributions.Normal(mean, logstd.expand_as(mean).exp())
        logratio = probs.log_prob(action).sum(1) - old
        ratio = logratio.exp()
        with torch.no_grad():
            kl = ((ratio - 1) - logratio).mean()
            clipfrac = ((ratio - 1.0).abs() > 0.2).double().mean()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        pg = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
        v = critic(obs).flatten()
        loss = pg - 0.01 * probs.entropy().sum(1).mean() + 0.5 * 0.5 * ((v - ret) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*actor.parameters(), logstd], 0.5)
        return loss, kl, clipfrac, optimizer.step()

    return [actor, critic, logstd], step, (floats(4), floats(2), floats(), floats(), floats())


@idiom
def soft_actor():
    """Squashed Gaussian by TransformedDistribution and Independent, a target network by polyak averaging."""
    net, q = nn.Linear(4, 4), nn.Linear(6, 1)
    target = deepcopy(q)
    for p in target.parameters():
        p.requires_grad = False
    opt = torch.optim.Adam([*net.parameters(), *q.parameters()], lr=1e-2)

    def step(obs, reward):
        mu, log_std = net(obs).chunk(2, -1)
        base = distributions.Normal(mu, torch.exp(torch.clamp(log_std, -20, 2)))
        pi = distributions.TransformedDistribution(base, [distributions.transforms.TanhTransform(cache_size=1)])
        a = pi.rsample()
        logp = pi.log_prob(a).sum(-1)
        with torch.no_grad():
            backup = reward + 0.99 * (target(torch.cat([obs, a], -1)).squeeze(-1) - 0.2 * logp)
        loss = ((q(torch.cat([obs, a.detach()], -1)).squeeze(-1) - backup) ** 2).mean()
        loss = loss + (0.2 * logp - q(torch.cat([obs, a], -1)).squeeze(-1)).mean()
        opt.zero_grad()
        loss.backward()
        done = opt.step()
        with torch.no_grad():
            for p, p_t in zip(q.parameters(), target.parameters(), strict=True):
                p_t.data.mul_(0.9)
                p_t.data.add_(0.1 * p.data)
        return loss, done, list(target.parameters())

    return [net, q, target], step, (floats(4), floats())


@idiom
def dqn():
    """Boolean index assignment of the values of states that end, smooth L1, gather, clip_grad_value_."""
    q, target = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(q.parameters(), lr=1e-2, amsgrad=True)

    def step(state, action, reward, following, going):
        value = q(state).gather(1, action)
        after = torch.zeros(state.shape[0])
        with torch.no_grad():
            after[going] = target(following[going]).max(1).values
        loss = nn.SmoothL1Loss()(value, (after * 0.99 + reward).unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(q.parameters(), 0.05)
        return loss, after, optimizer.step()

    return [q, target], step, (floats(4), ids(3, 1), floats(), floats(4), bools())


@idiom
def dirichlet_mixture():
    """Dirichlet, MultivariateNormal by scale_tril, kl_divergence, a mixture of the same family."""
    net = nn.Linear(5, 3)
    loc, raw = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(3, 2, 2) * 0.1)
    optimizer = torch.optim.Adam([*net.parameters(), loc, raw], lr=1e-2)

    def step(x, y):
        conc = F.softplus(net(x)) + 0.5
        weights = distributions.Dirichlet(conc)
        p = weights.rsample()
        tril = torch.tril(raw, -1) + torch.diag_embed(F.softplus(torch.diagonal(raw, dim1=-2, dim2=-1)))
        parts = distributions.MultivariateNormal(loc, scale_tril=tril)
        mix = distributions.MixtureSameFamily(distributions.Categorical(probs=p), parts)
        kl = distributions.kl_divergence(weights, distributions.Dirichlet(torch.ones_like(conc)))
        z = parts.rsample((4,))
        loss = -mix.log_prob(y).mean() + 0.1 * kl.mean() + 0.01 * z.square().mean()
        optimizer.zero_grad()
        loss.backward()
        return loss, p, optimizer.step()

    return [net, loc, raw], step, (floats(5), floats(2))


@idiom
def gumbel_and_poisson():
    """gumbel_softmax hard, Bernoulli, Gamma.rsample, Poisson, NegativeBinomial, Beta, StudentT."""
    net = nn.Linear(4, 6)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def step(x, n):
        h = net(x)
        hard = F.gumbel_softmax(h[:, :3], tau=0.7, hard=True)
        rate = F.softplus(h[:, 3]) + 0.1
        count = n.to(x.dtype)
        loss = -distributions.Poisson(rate).log_prob(count)
        loss = loss - distributions.NegativeBinomial(total_count=rate, logits=h[:, 4]).log_prob(count)
        loss = loss + distributions.Gamma(rate, 2.0).rsample() + distributions.Beta(rate, rate + 1).rsample()
        loss = loss - distributions.StudentT(rate + 2, h[:, 5]).log_prob(x[:, 0])
        loss = (loss + (hard * x[:, :3]).sum(1)).mean()
        loss = loss + distributions.Bernoulli(logits=h[:, 0]).log_prob((x[:, 1] > 0).double()).mean()
        optimizer.zero_grad()
        loss.backward()
        return loss, hard, optimizer.step()

    return net, step, (floats(4), ids(6))


# -- losses ---------------------------------------------------------------------------------------------------------


@idiom
def info_nce():
    """Both views stacked, the diagonal masked out, positives by index."""
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def step(a, b):
        n = a.shape[0]
        features = F.normalize(torch.cat([net(a), net(b)], dim=0), dim=1)
        labels = torch.cat([torch.arange(n) for _ in range(2)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).double()
        sim = features @ features.T
        mask = torch.eye(labels.shape[0], dtype=torch.bool)
        labels = labels[~mask].view(labels.shape[0], -1)
        sim = sim[~mask].view(sim.shape[0], -1)
        positives = sim[labels.bool()].view(labels.shape[0], -1)
        negatives = sim[~labels.bool()].view(sim.shape[0], -1)
        logits = torch.cat([positives, negatives], dim=1) / 0.5
        loss = F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        return loss, optimizer.step()

    return net, step, (floats(6), floats(6))


@idiom
def nt_xent_fill_diagonal():
    net = nn.Linear(6, 4)
    scale = nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.SGD([*net.parameters(), scale], lr=0.1)

    def step(a, b):
        z = torch.cat([net(a), net(b)])
        sim = F.cosine_similarity(z[:, None, :], z[None, :, :], dim=-1)
        sim.masked_fill_(torch.eye(sim.shape[0], dtype=torch.bool), -9e15)
        pos = torch.eye(sim.shape[0], dtype=torch.bool).roll(shifts=sim.shape[0] // 2, dims=0)
        nll = -sim[pos] + torch.logsumexp(sim, dim=-1)
        clip = scale.exp() * F.normalize(net(a), dim=-1) @ F.normalize(net(b), dim=-1).t()
        target = torch.arange(clip.size(0))
        loss = nll.mean() + (F.cross_entropy(clip, target) + F.cross_entropy(clip.t(), target)) / 2
        optimizer.zero_grad()
        loss.backward()
        return loss, optimizer.step()

    return [net, scale], step, (floats(6), floats(6))


@idiom
def hard_triplets():
    """Pairwise distances, hardest positive and negative by masks, and F.triplet_margin_loss."""
    net = nn.Linear(6, 4)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def step(x, y):
        e = net(x)
        dot = e @ e.t()
        square = torch.diag(dot)
        dist = (square.unsqueeze(0) - 2.0 * dot + square.unsqueeze(1)).clamp(min=0)
        zero = dist.eq(0).double()
        dist = (1.0 - zero) * torch.sqrt(dist + zero * 1e-16)
        same = y[None, :] == y[:, None]
        hardest = (dist * same).max(1, keepdim=True)[0]
        far = dist + dist.max(1, keepdim=True)[0] * same
        loss = F.relu(hardest - far.min(1, keepdim=True)[0] + 0.2).mean()
        loss = loss + F.triplet_margin_loss(e, e.roll(1, 0).detach(), e.flip(0), margin=0.3)
        optimizer.zero_grad()
        loss.backward()
        return loss, optimizer.step()

    return net, step, (floats(6), ids(3))


@idiom
def imbalanced():
    """Focal, dice, label smoothing, quantile, Huber, KL, margin and cosine embedding losses in one."""
    net = nn.Linear(6, 3)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def step(x, y):
        out = net(x)
        ce = F.cross_entropy(out, y, reduction="none")
        focal = (0.25 * (1 - torch.exp(-ce)) ** 2.0 * ce).mean()
        p, t = out.softmax(1), F.one_hot(y, 3).double()
        dice = 1 - ((2 * (p * t).sum(0) + 1) / (p.sum(0) + t.sum(0) + 1)).mean()
        smooth = nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([1.0, 2.0, 0.5]))(out, y)
        quantile = 0
        for i, q in enumerate([0.1, 0.5, 0.9]):
            err = x[:, 0] - out[:, i]
            quantile = quantile + torch.max((q - 1) * err, q * err).unsqueeze(1)
        kl = nn.KLDivLoss(reduction="batchmean")(out.log_softmax(1), x[:, :3].softmax(1))
        cosine = F.cosine_embedding_loss(out, x[:, 3:], torch.where(y > 0, 1, -1))
        margin = F.multi_margin_loss(out, y) + F.multilabel_soft_margin_loss(out, t) + F.gaussian_nll_loss(
            out[:, 0], x[:, 0], F.softplus(out[:, 1]))  # fmt: skip
        loss = focal + dice + smooth + quantile.mean() + F.huber_loss(out, x[:, :3], delta=0.5) + kl + cosine + margin
        optimizer.zero_grad()
        loss.backward()
        return loss, focal, dice, optimizer.step()

    return net, step, (floats(6), ids(3))


@idiom
def mixup():
    """A Beta draw by numpy, randperm over the batch, two targets; accuracy as a number of the batch."""
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=1e-3, nesterov=True, momentum=0.9)

    def step(x, y):
        lam = np.random.default_rng(0).beta(0.4, 0.4)
        index = torch.randperm(x.size(0))
        out = net(lam * x + (1 - lam) * x[index, :])
        loss = lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[index])
        _, predicted = out.max(1)
        correct = lam * predicted.eq(y).sum() + (1 - lam) * predicted.eq(y[index]).sum()
        top = [(out.topk(2, 1, True, True)[1].t() == y.view(1, -1))[:k].reshape(-1).float().sum(0) for k in (1, 2)]
        optimizer.zero_grad()
        loss.backward()
        return loss, 100.0 * correct / y.size(0), top, optimizer.step()

    return net, step, (floats(6), ids(3))


@idiom
def svd_and_cholesky():
    """PCA reconstruction by svd, a Gaussian process's marginal likelihood, logdet, solve, matrix_exp."""
    net = nn.Linear(5, 4)
    log_l, log_s = nn.Parameter(torch.zeros(())), nn.Parameter(torch.tensor(-1.0))
    optimizer = torch.optim.Adam([*net.parameters(), log_l, log_s], lr=1e-2)

    def step(x, y):
        h = net(x)
        centred = h - h.mean(0)
        U, S, Vh = torch.linalg.svd(centred.T @ centred + torch.diag(torch.arange(1.0, 5.0)), full_matrices=False)
        low = h @ Vh[:2].T @ Vh[:2]
        K = torch.exp(-0.5 * torch.cdist(h, h).pow(2) / log_l.exp() ** 2)
        K = K + log_s.exp() * torch.eye(x.shape[0])
        L = torch.linalg.cholesky(K)
        alpha = torch.cholesky_solve(y.unsqueeze(-1), L).squeeze(-1)
        nll = 0.5 * y @ alpha + L.diagonal().log().sum() + 0.5 * x.shape[0] * math.log(2 * math.pi)
        nll = nll + 0.1 * torch.logdet(K) + torch.linalg.solve(K, y).sum() * 0.01
        loss = nll + F.mse_loss(low, h) + S.sum() * 0.01 + torch.trace(torch.matrix_exp(0.01 * centred.T @ centred))
        optimizer.zero_grad()
        loss.backward()
        return loss, S, optimizer.step()

    return [net, log_l, log_s], step, (floats(5), floats())


@idiom
def kalman():
    """A filter in a loop, batched solves, slogdet, the last covariance symmetrised."""
    Fm, H = nn.Parameter(torch.eye(3) * 0.9), nn.Parameter(torch.randn(2, 3))
    q = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([Fm, H, q], lr=1e-2)

    def step(obs):
        b = obs.shape[0]
        mean, cov = torch.zeros(b, 3), torch.eye(3).expand(b, 3, 3)
        ll = torch.zeros(b)
        for z in obs.unbind(1):
            mean = mean @ Fm.T
            cov = Fm @ cov @ Fm.T + torch.diag(q.exp())
            S = H @ cov @ H.T + 0.1 * torch.eye(2)
            K = torch.linalg.solve(S, H @ cov).mT
            r = z - mean @ H.T
            ll += -0.5 * (torch.einsum("bi,bi->b", r, torch.linalg.solve(S, r)) + torch.linalg.slogdet(S)[1])
            mean = mean + (K @ r.unsqueeze(-1)).squeeze(-1)
            cov = (torch.eye(3) - K @ H) @ cov
            cov = (cov + cov.mT) / 2
        loss = -ll.mean()
        optimizer.zero_grad()
        loss.backward()
        return loss, mean, cov, optimizer.step()

    return [Fm, H, q], step, (floats(4, 2),)


# -- vision ---------------------------------------------------------------------------------------------------------


@idiom
def super_resolution():
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.PReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(2))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def step(image):
        image = image.to(torch.float64).div(255)
        low = F.interpolate(image, scale_factor=0.5, mode="bicubic", align_corners=False).clamp(0, 1)
        out = net(low)
        loss = torch.sqrt((out - image) ** 2 + 1e-6).mean()
        psnr = 10.0 * torch.log10(1.0 / F.mse_loss(out.detach(), image))
        tv = (out[:, :, 1:] - out[:, :, :-1]).abs().mean() + (out[..., 1:] - out[..., :-1]).abs().mean()
        optimizer.zero_grad()
        (loss + 0.1 * tv).backward()
        return loss, psnr, optimizer.step()

    return net, step, (lambda rows: torch.randint(0, 256, (rows, 1, 8, 8), dtype=torch.uint8),)


@idiom
def segmentation():
    """Interpolated skips, a pyramid of pooled contexts, a void label, intersections over unions by bincount."""
    down, mid, up = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=2, dilation=2), nn.Conv2d(7, 5, 1)
    norm = nn.BatchNorm2d(4)
    model = nn.ModuleList([down, mid, up, norm])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x, y):
        y = torch.where(y == 4, 255, y)
        h = F.relu(norm(down(x)))
        pooled = F.adaptive_avg_pool2d(mid(h), 2)
        h = h + F.interpolate(pooled, size=h.shape[-2:], mode="bilinear", align_corners=True)
        h = torch.cat([F.interpolate(h, size=x.shape[2:], mode="nearest"), x], 1)
        out = up(h)
        loss = F.cross_entropy(out, y, ignore_index=255)
        keep = y != 255
        hist = torch.bincount(5 * y[keep] + out.argmax(1)[keep], minlength=25)[:25].reshape(5, 5)
        iou = hist.diag() / (hist.sum(1) + hist.sum(0) - hist.diag()).clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        return loss, hist, iou, optimizer.step()

    return model, step, (floats(3, 8, 8), ids(5, 8, 8))


@idiom
def spatial_transformer():
    """affine_grid, grid_sample, a bias copied in, and a second warp by offsets."""
    loc, head = nn.Sequential(nn.Linear(64, 8), nn.ReLU(True), nn.Linear(8, 6)), nn.Conv2d(1, 2, 8)
    loc[2].weight.data.mul_(0.1)
    loc[2].bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))
    model = nn.ModuleList([loc, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x, y):
        theta = loc(x.view(-1, 64)).view(-1, 2, 3)
        grid = F.affine_grid(theta, x.size(), align_corners=False)
        warped = F.grid_sample(x, grid, align_corners=False, padding_mode="border")
        ys, xs = torch.meshgrid(torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 8), indexing="ij")
        flow = torch.stack([xs, ys], -1)[None] + 0.1 * torch.tanh(warped.permute(0, 2, 3, 1))
        warped = F.grid_sample(warped, flow, align_corners=True, mode="bilinear")
        loss = F.cross_entropy(head(warped).flatten(1), y)
        optimizer.zero_grad()
        loss.backward()
        return loss, warped, optimizer.step()

    return model, step, (floats(1, 8, 8), ids(2))


@idiom
def capsules():
    """Routing by agreement with detached votes, squash, a margin loss with one-hot by indexing eye."""
    W = nn.Parameter(0.1 * torch.randn(1, 6, 3, 4, 5))
    optimizer = torch.optim.Adam([W], lr=1e-2)

    def squash(s, dim=-1):
        n = (s**2).sum(dim=dim, keepdim=True)
        return n * s / ((1.0 + n) * torch.sqrt(n + 1e-9))

    def step(x, y):
        u_hat = (W @ x[:, :, None, :, None]).squeeze(-1)
        fixed = u_hat.detach()
        b = torch.zeros(x.size(0), 6, 3, 1)
        for i in range(3):
            c = F.softmax(b, dim=2)
            v = squash((c * (fixed if i < 2 else u_hat)).sum(dim=1))
            if i < 2:
                b = b + torch.matmul(fixed.unsqueeze(-2), v.unsqueeze(1).unsqueeze(-1)).squeeze(-1)
        norm = torch.sqrt((v**2).sum(2))
        T = torch.eye(3).index_select(dim=0, index=y)
        loss = (T * F.relu(0.9 - norm) ** 2 + 0.5 * (1 - T) * F.relu(norm - 0.1) ** 2).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        return loss, norm, optimizer.step()

    return [W], step, (floats(6, 5), ids(3))


@idiom
def unfolded_convolution():
    """Convolution by unfold, overlapping patches folded back and divided by their counts, windows rolled."""
    w = nn.Parameter(torch.randn(4, 2 * 9) * 0.1)
    optimizer = torch.optim.Adam([w], lr=1e-2)

    def step(x):
        n, c, hh, ww = x.shape
        cols = F.unfold(x, 3, padding=1)
        y = (w @ cols).view(n, 4, hh, ww)
        win = torch.roll(y, (-2, -2), (2, 3)).view(n, 4, hh // 4, 4, ww // 4, 4).permute(0, 2, 4, 3, 5, 1)
        win = win.reshape(-1, 16, 4)
        att = (win @ win.transpose(-2, -1)).softmax(-1) @ win
        back = att.view(n, hh // 4, ww // 4, 4, 4, 4).permute(0, 5, 1, 3, 2, 4).reshape(n, 4, hh, ww)
        patches = F.unfold(back, kernel_size=4, stride=2)
        mean = F.fold(patches, (hh, ww), 4, stride=2) / F.fold(torch.ones_like(patches), (hh, ww), 4, stride=2)
        loss = (mean - y).square().mean() + mean.std(dim=(2, 3), unbiased=False).mean()
        optimizer.zero_grad()
        loss.backward()
        return loss, mean, optimizer.step()

    return [w], step, (floats(2, 8, 8),)


@idiom
def nms_free_detection():
    """Boxes, unions and intersections by broadcasting, masked selection of anchors, GIoU."""
    net = nn.Linear(6, 5)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def step(x, boxes):
        out = net(x)
        p = torch.cat([out[:, :2], out[:, :2] + F.softplus(out[:, 2:4])], 1)
        g = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:].abs() + 0.1], 1)
        lt, rb = torch.max(p[:, None, :2], g[None, :, :2]), torch.min(p[:, None, 2:], g[None, :, 2:])
        inter = (rb - lt).clamp(min=0).prod(2)
        area = lambda b: (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
        union = area(p)[:, None] + area(g)[None] - inter
        iou = inter / (union + 1e-7)
        best, at = iou.max(1)
        positive = best > 0.1
        matched = g[at]
        hull = (torch.max(p[:, 2:], matched[:, 2:]) - torch.min(p[:, :2], matched[:, :2])).prod(1)
        giou = best - (hull - union.gather(1, at[:, None])[:, 0]) / hull
        loss = ((1 - giou) * positive).sum() / positive.sum().clamp(min=1)
        loss = loss + F.binary_cross_entropy_with_logits(out[:, 4], positive.to(out.dtype)) + p[positive].square().sum()
        optimizer.zero_grad()
        loss.backward()
        return loss, iou, optimizer.step()

    return net, step, (floats(6), floats(4))


# -- structure ------------------------------------------------------------------------------------------------------


@idiom
def experts_top_k():
    """Tokens sent to two of four experts by nonzero and index_add_, a balance loss by counts."""
    gate = nn.Linear(6, 4, bias=False)
    experts = nn.ModuleList([nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 6)) for _ in range(4)])
    optimizer = torch.optim.SGD([*gate.parameters(), *experts.parameters()], lr=0.1)

    def step(x):
        hidden = x.view(-1, x.shape[-1])
        routing = F.softmax(gate(hidden), dim=1)
        weights, selected = torch.topk(routing, 2, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        final = torch.zeros_like(hidden)
        mask = F.one_hot(selected, num_classes=4).permute(2, 1, 0)
        for i, expert in enumerate(experts):
            idx, top_x = torch.where(mask[i])
            current = expert(hidden[top_x]) * weights[top_x, idx, None]
            final.index_add_(0, top_x, current.to(hidden.dtype))
        balance = 4 * (mask.sum(1).double().mean(1) * routing.mean(0)).sum()
        loss = F.mse_loss(final.view_as(x), x) + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        return final, loss, optimizer.step()

    return [gate, experts], step, (floats(3, 6),)


@idiom
def graph_attention():
    """Edges as rows, a softmax by segment with scatter_reduce, messages by index_add, pooled by scatter_add_."""
    W, a_s, a_d = nn.Linear(5, 4), nn.Linear(4, 1), nn.Linear(4, 1)
    model = nn.ModuleList([W, a_s, a_d])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x, graph):
        n = x.shape[0]
        src = torch.arange(n).repeat(2)
        dst = torch.cat([torch.arange(n), torch.arange(n).roll(1)])
        h = W(x)
        e = F.leaky_relu(a_s(h)[src] + a_d(h)[dst], 0.2).squeeze(-1)
        top = torch.full((n,), float("-inf")).scatter_reduce(0, dst, e, reduce="amax", include_self=False)
        w = (e - top[dst]).exp()
        total = torch.zeros(n).scatter_add_(0, dst, w)
        out = torch.zeros(n, 4).index_add_(0, dst, h[src] * (w / total[dst])[:, None])
        mean = torch.zeros(3, 4).scatter_reduce_(0, graph[:, None].expand(-1, 4), out, "mean", include_self=False)
        loss = mean.square().sum() + out.std()
        optimizer.zero_grad()
        loss.backward()
        return out, mean, loss, optimizer.step()

    return model, step, (floats(5), ids(3))


@idiom
def lora_and_film():
    """A frozen layer with a low rank beside it, FiLM, a hypernetwork that makes weights, baddbmm."""

    class LoRA(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            for p in base.parameters():
                p.requires_grad_(False)
            self.A, self.B = nn.Parameter(torch.randn(2, 6) * 0.1), nn.Parameter(torch.zeros(5, 2))

        def forward(self, x):
            return self.base(x) + (F.dropout(x, 0.0, self.training) @ self.A.T @ self.B.T) * 0.5

    layer, film, hyper = LoRA(nn.Linear(6, 5)), nn.Linear(3, 10), nn.Linear(3, 5 * 2 + 2)
    model = nn.ModuleList([layer, film, hyper])
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2)

    def step(x, cond):
        gamma, beta = torch.tensor_split(film(cond), 2, dim=-1)
        h = torch.addcmul(beta, 1 + gamma, layer(x))
        params = hyper(cond)
        w, b = params[:, :10].view(-1, 5, 2), params[:, 10:].unsqueeze(1)
        y = torch.baddbmm(b, h.unsqueeze(1), w)[:, 0]
        loss = y.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        return y, loss, optimizer.step()

    return model, step, (floats(6), floats(3))


@idiom
def siren():
    """Coordinates that require gradients; gradient and Laplacian in the loss."""

    class Sine(nn.Module):
        def __init__(self, a, b, first=False):
            super().__init__()
            self.linear = nn.Linear(a, b)
            with torch.no_grad():
                bound = 1 / a if first else math.sqrt(6 / a) / 3
                self.linear.weight.uniform_(-bound, bound)

        def forward(self, x):
            return torch.sin(3 * self.linear(x))

    net = nn.Sequential(Sine(2, 8, True), Sine(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(lr=1e-3, params=net.parameters())

    def gradient(y, x):
        return torch.autograd.grad(y, [x], grad_outputs=torch.ones_like(y), create_graph=True)[0]

    def step(coords, target):
        coords = coords.clone().detach().requires_grad_(True)
        y = net(coords)
        g = gradient(y, coords)
        laplace = 0.0
        for i in range(g.shape[-1]):
            laplace += torch.autograd.grad(g[..., i], coords, torch.ones_like(g[..., i]), create_graph=True)[0][
                ..., i : i + 1
            ]
        loss = ((laplace - target) ** 2).mean() + (g.norm(dim=-1) - 1).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        return y, laplace, loss, optimizer.step()

    return net, step, (floats(2), floats(1))


@idiom
def neural_ode():
    """Runge-Kutta in a loop with a closure; the trajectory stacked."""
    f = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.RMSprop(f.parameters(), lr=1e-3, momentum=0.9, centered=True)

    def odeint(func, y0, t):
        ys = [y0]
        for a, b in zip(t[:-1], t[1:], strict=True):
            h, y = b - a, ys[-1]
            k1 = func(a, y)
            k2 = func(a + h / 2, y + h * k1 / 2)
            ys.append(y + h * k2)
        return torch.stack(ys)

    def step(y0):
        path = odeint(lambda t, y: f(y**3) + t, y0, torch.linspace(0.0, 1.0, 5))
        loss = torch.mean(torch.abs(path - y0 * 0.5))
        optimizer.zero_grad()
        loss.backward()
        return path, loss, optimizer.step()

    return f, step, (floats(2),)


@idiom
def physics_informed():
    """Collocation points unbound into columns, derivatives of a solution by autograd.grad."""
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    nu = nn.Parameter(torch.tensor(0.1))
    optimizer = torch.optim.Adam([*net.parameters(), nu], lr=1e-2)

    def step(points):
        x, t = points[:, 0:1].requires_grad_(), points[:, 1:2].requires_grad_()
        u = net(torch.cat([x, t], 1))
        u_t, u_x = torch.autograd.grad(u.sum(), (t, x), create_graph=True)
        u_xx = torch.autograd.grad(u_x.sum(), x, create_graph=True)[0]
        loss = (u_t + u * u_x - nu * u_xx).square().mean()
        optimizer.zero_grad()
        loss.backward()
        return u, u_xx, loss, optimizer.step()

    return [net, nu], step, (floats(2),)


@idiom
def maml():
    """One inner step by functional_call, the outer gradient through it."""
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def step(x, y, x2, y2):
        params = dict(net.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(net, params, (x,)), y)
        grads = torch.autograd.grad(inner, tuple(params.values()), create_graph=True)
        fast = {k: v - 0.1 * g for (k, v), g in zip(params.items(), grads, strict=True)}
        outer = F.mse_loss(torch.func.functional_call(net, fast, (x2,)), y2)
        optimizer.zero_grad()
        outer.backward()
        return inner, outer, optimizer.step()

    return net, step, (floats(3), floats(1), floats(3), floats(1))


@idiom
def per_sample_gradients():
    """vmap of grad over rows, clipped row by row; a Jacobian by jacrev."""
    net = nn.Linear(3, 2)

    def step(x, y):
        params = {k: v.detach() for k, v in net.named_parameters()}

        def loss(p, a, b):
            return (torch.func.functional_call(net, p, (a.unsqueeze(0),)).squeeze(0) - b).square().sum()

        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()], 1).norm(dim=1)
        clipped = {k: (g * (1 / norms.clamp(min=1)).view(-1, *[1] * (g.dim() - 1))).mean(0) for k, g in grads.items()}
        jac = torch.func.vmap(torch.func.jacrev(lambda a: torch.tanh(net(a))))(x)
        with torch.no_grad():
            for k, p in net.named_parameters():
                p.add_(clipped[k], alpha=-0.1)
        return norms, jac, clipped, list(net.parameters())

    return net, step, (floats(3), floats(2))


@idiom
def constrained_weights():
    """weight_norm, spectral_norm, forward hooks that keep activations, weights clipped after the step."""
    a = nn.utils.parametrizations.weight_norm(nn.Linear(5, 6))
    b = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    c = nn.Linear(6, 2)
    model = nn.Sequential(a, nn.ReLU6(inplace=True), b, nn.Hardswish(inplace=True), c)
    kept = {}
    model[1].register_forward_hook(lambda m, i, o: kept.update(act=o))
    model[4].register_forward_pre_hook(lambda m, i: (i[0] * 2,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        out = model(x)
        loss = F.cross_entropy(out, y) + 1e-2 * kept["act"].abs().mean()
        l1 = sum(p.abs().sum() for p in model.parameters())
        optimizer.zero_grad()
        (loss + 1e-4 * l1).backward()
        done = optimizer.step()
        for p in c.parameters():
            p.data.clamp_(-0.1, 0.1)
        return loss, done, list(c.parameters())

    return model, step, (floats(5), ids(2))


@idiom
def accumulation():
    """Micro batches by chunk, losses divided, one step; the loss as a running number."""
    net = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 2))
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        total = 0.0
        for part, label in ((x, y), (x.flip(0), y.flip(0))):
            loss = F.cross_entropy(net(part), label) / 2
            loss.backward()
            total += loss.detach()
        return total, optimizer.step()

    return net, step, (floats(5), ids(2))


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor

    def __len__(self):
        return len(self.x)

    def to(self, dtype):
        return Batch(self.x.to(dtype), self.y)


@idiom
def dtypes():
    """A dataclass, bytes to floats by given means, integer division and remainders, half, float32 inside float64."""
    net = nn.Linear(12, 3)
    mean, std = np.array([0.4, 0.5, 0.6], dtype=np.float32), np.array([0.2, 0.3, 0.2], dtype=np.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(image, y):
        batch = Batch(image, y).to(torch.float32)
        x = (batch.x / 255.0 - torch.from_numpy(mean).view(3, 1, 1)) / torch.from_numpy(std).view(3, 1, 1)
        half = x.half() * 2
        out = net((x + half.float() / 2).flatten(1).double())
        rows, cols = batch.y // 2, batch.y % 2
        loss = F.cross_entropy(out, rows) + (cols * out[:, 0]).sum() / batch.x.shape[0]
        bits = (image >> 3) & 0x1F
        optimizer.zero_grad()
        loss.backward()
        return loss, bits, half, rows + cols, optimizer.step()

    return net, step, (lambda rows: torch.randint(0, 256, (rows, 3, 2, 2), dtype=torch.uint8), ids(6))


@idiom
def boolean_assignment():
    """x[mask] = v in all its forms, masked_select, masked_scatter, where with scalars, put_, fill_diagonal_."""
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x, mask):
        h = net(x)
        h = h.clone()
        h[mask] = 0.5
        h[h > 1.0] *= 0.1
        h[:, 1:3][mask[:, 1:3]] -= 1
        h[..., -1] += h[..., 0]
        h[torch.arange(h.shape[0]), h.argmax(1)] = h.mean(1)
        h[mask[:, 0]] = h[mask[:, 0]].flip(1)
        picked = torch.masked_select(h, ~mask)
        filled = torch.zeros_like(h).masked_scatter(~mask, picked)
        loss = picked.square().sum() + torch.where(h > 0, h, -0.1).sum() + filled.std() + h[mask].sum()
        gram = (h.T @ h).fill_diagonal_(0.0)
        loss = loss + gram.abs().mean()
        optimizer.zero_grad()
        loss.backward()
        return h, filled, loss, optimizer.step()

    return net, step, (floats(4), bools(4))


@idiom
def scripted_and_compiled():
    """torch.jit.script, torch.compile, an autograd Function, checkpointing and einsum in one model."""

    @torch.jit.script
    def fused_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = x + bias
        return y * 0.5 * (1.0 + torch.erf(y / 1.41421))

    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sign()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * (x.abs() <= 1)

    compiled = torch.compile(lambda a, b: torch.einsum("b i d, b j d -> b i j", a, b).softmax(-1))
    w, b, proj = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.zeros(4)), nn.Linear(4, 4)
    optimizer = torch.optim.Adam([w, b, *proj.parameters()], lr=1e-2)

    def step(x):
        h = fused_gelu(torch.einsum("...d,de->...e", x, w), b)
        h = torch.einsum("bij,bjd->bid", compiled(h, x), h)
        h = torch.utils.checkpoint.checkpoint(proj, h, use_reentrant=False)
        loss = (Sign.apply(h) - x).pow(2).mean() + torch.einsum("bid,bid->", h, x) * 0.01
        optimizer.zero_grad()
        loss.backward()
        return h, loss, optimizer.step()

    return [w, b, proj], step, (floats(3, 4),)


@idiom
def kmeans_and_sinkhorn():
    """Assignments by cdist and argmin, means by segment; a transport plan by a loop; sort, cumsum, searchsorted."""
    net = nn.Linear(3, 2)
    centres = nn.Parameter(torch.randn(4, 2))
    optimizer = torch.optim.Adam([*net.parameters(), centres], lr=1e-2)

    def step(x):
        z = net(x)
        d = torch.cdist(z, centres)
        at = d.argmin(dim=1)
        counts = torch.bincount(at, minlength=4)
        sums = torch.zeros(4, 2).index_add(0, at, z)
        means = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], centres)
        logp = -d / 0.5
        for _ in range(3):
            logp = logp - torch.logsumexp(logp, 1, keepdim=True)
            logp = logp - torch.logsumexp(logp, 0, keepdim=True)
        ranked, order = z[:, 0].sort(descending=True)
        cum = ranked.exp().cumsum(0)
        cut = torch.searchsorted(cum, cum[-1:] / 2)
        median, quant = z[:, 1].median(), torch.quantile(z[:, 1], torch.tensor([0.25, 0.75]))
        loss = (logp.exp() * d).sum() + (means - centres).pow(2).mean() + cum.log().mean() + median + quant.sum()
        optimizer.zero_grad()
        loss.backward()
        return counts, means, cut, order, loss, optimizer.step()

    return [net, centres], step, (floats(3),)


@idiom
def spectral_audio():
    """stft with a window, log-mel by a fixed matrix, complex weights in a Fourier layer, istft."""
    w = nn.Parameter(torch.randn(9, dtype=torch.complex128))
    mel = torch.rand(9, 4)
    optimizer = torch.optim.SGD([w], lr=0.01)

    def step(x):
        window = torch.hann_window(16)
        S = torch.stft(x, n_fft=16, hop_length=4, window=window, return_complex=True)
        S = S * w[None, :, None]
        power = S.abs().pow(2)
        logmel = torch.log10(torch.clamp(mel.T @ power, min=1e-10))
        logmel = torch.maximum(logmel, logmel.amax(dim=(1, 2), keepdim=True) - 8.0)
        back = torch.istft(S, 16, 4, window=window, length=x.shape[-1])
        spectrum = torch.fft.irfft(torch.fft.rfft(x)[:, :9] * w, n=32)
        loss = logmel.mean() + F.l1_loss(back, x) + spectrum.square().mean()
        optimizer.zero_grad()
        loss.backward()
        return logmel, back, loss, optimizer.step()

    return [w], step, (floats(64),)


@idiom
def scheduled():
    """A warm-up and cosine rate set into param_groups before the step, read from a tensor of the step number."""
    net = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net.count = nn.Buffer(torch.zeros((), dtype=torch.long))

    def step(x, y):
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        net.count.add_(1)
        return loss, net.count, optimizer.step()

    return net, step, (floats(4), ids(2))


@idiom
def deep_supervision_with_state():
    """A convolutional LSTM over frames, states by zeros, outputs by list and stack(dim=1), ModuleDict heads."""
    gates = nn.Conv2d(3 + 4, 16, 3, padding=1)
    heads = nn.ModuleDict({"a": nn.Conv2d(4, 1, 1), "b": nn.Conv2d(4, 1, 3, padding="same")})
    model = nn.ModuleList([gates, heads])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(video):
        b, t, c, h, w = video.size()
        state = (torch.zeros(b, 4, h, w), torch.zeros(b, 4, h, w))
        outs = []
        for frame in range(t):
            i, f, o, g = torch.split(gates(torch.cat([video[:, frame], state[0]], dim=1)), 4, dim=1)
            cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
            state = (torch.sigmoid(o) * torch.tanh(cell), cell)
            outs.append({name: head(state[0]) for name, head in heads.items()})
        total = sum(F.mse_loss(torch.stack([o[k] for o in outs], dim=1), video[:, :, :1]) for k in heads)
        optimizer.zero_grad()
        total.backward()
        return total, outs[-1], optimizer.step()

    return model, step, (floats(3, 3, 4, 4),)
