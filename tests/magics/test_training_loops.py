"""Training loops of the kinds that PyTorch's examples have, as notebooks: same weights as torch, and no note.

A note or a `StaleNode` in an ordinary loop would teach people to overlook them. Each loop has its step as one text,
which a cell records and the oracle executes batch by batch in plain PyTorch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import dedent
from typing import Any

import pytest
import torch

IMPORTS = """
import copy, math, random
import numpy as np
import torch, tfnb
from torch import nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
torch.manual_seed(1); random.seed(1); np.random.seed(1)
"""


@dataclass(frozen=True)
class Loop:
    """setup: models, optimizers and ``batches``, a list of tuples. step: what is done with a batch; sets ``fetched``.

    names: of a batch's tensors. shapes: of their placeholders, where not only the first axis varies. epoch: behind the
    batches of each epoch. draws: numbers are drawn, in another order than torch's.
    """

    setup: str
    step: str
    names: str = "x y"
    shapes: str = ""
    epoch: str = ""
    draws: bool = False


CLASSES = "batches = [(torch.randn(n, 1, 8, 8), torch.randint(10, (n,))) for n in (8, 8, 5)]"
NET = """
class Net(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.dropout = nn.Dropout(p)
        self.fc = nn.Linear(24, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return F.log_softmax(self.fc(self.dropout(torch.flatten(x, 1))), dim=1)
"""
USUAL = "optimizer.zero_grad()\nloss = criterion(model(x), y)\nloss.backward()\nfetched = optimizer.step()"

LOOPS = {
    "mnist": Loop(
        NET + CLASSES + """
model, criterion = Net(), F.nll_loss
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
""",
        USUAL,
        epoch="""
model.eval()
with torch.no_grad():
    correct = sum(model(a).argmax(1).eq(b).sum().item() for a, b in batches)
model.train()
scheduler.step()
""",
    ),
    "mnist with dropout": Loop(
        NET + CLASSES + """
model, criterion = Net(0.5), F.nll_loss
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
""",
        USUAL,
        draws=True,
    ),
    "mnist of rows": Loop(
        CLASSES + """
class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(input_size=8, hidden_size=12, batch_first=True)
        self.batchnorm = nn.BatchNorm1d(12)
        self.fc = nn.Linear(12, 10)

    def forward(self, input):
        input = input.reshape(-1, 8, 8)
        output, hidden = self.rnn(input)
        return F.log_softmax(self.fc(self.batchnorm(output[:, -1, :])), dim=1)

model, criterion = Rows(), F.nll_loss
optimizer = torch.optim.Adadelta(model.parameters(), lr=0.1)
""",
        USUAL,
        epoch="torch.save(model.state_dict(), io := __import__('io').BytesIO())",
    ),
    "image classes": Loop(
        CLASSES + """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.downsample = None

    def forward(self, x):
        identity = x
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return F.relu(out)

head = nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(4, 10)
model = nn.Sequential(nn.Conv2d(1, 4, 3), Block(4), Block(4), *head)
for m in model.modules():
    if isinstance(m, nn.Conv2d):
        nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
""",
        """
output = model(x)
loss = criterion(output, y)
optimizer.zero_grad()
loss.backward()
fetched = optimizer.step()
_, pred = output.topk(5, 1, True, True)
correct = pred.t().eq(y.view(1, -1).expand(5, -1))
top5 = correct[:5].reshape(-1).float().sum(0, keepdim=True) * (100.0 / y.size(0))
""",
        epoch="best = max(0, 1); scheduler.step(); state = {'epoch': 1, 'optimizer': optimizer.state_dict()}",
    ),
    "variational autoencoder": Loop(
        """
batches = [(torch.rand(n, 1, 6, 6),) for n in (8, 8, 3)]
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(36, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 36)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 36))
        return torch.sigmoid(self.fc4(F.relu(self.fc3(self.reparameterize(mu, logvar))))), mu, logvar

model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
""",
        """
optimizer.zero_grad()
recon_batch, mu, logvar = model(x)
BCE = F.binary_cross_entropy(recon_batch, x.view(-1, 36), reduction="sum")
KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
loss = BCE + KLD
loss.backward()
fetched = optimizer.step()
""",
        names="x",
        draws=True,
    ),
    "two networks": Loop(
        """
batches = [(torch.randn(n, 6), torch.randn(n, 3)) for n in (8, 8, 4)]
netG = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(True), nn.Linear(8, 6), nn.Tanh())
netD = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2, inplace=True), nn.Linear(8, 1), nn.Sigmoid(), nn.Flatten(0))
def weights_init(m):
    if type(m) is nn.Linear:
        nn.init.normal_(m.weight, 0.0, 0.02)
netG.apply(weights_init), netD.apply(weights_init)
model = nn.ModuleDict({"g": netG, "d": netD})
criterion = nn.BCELoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
""",
        """
netD.zero_grad()
label = torch.full((x.size(0),), 1.0)
errD_real = criterion(netD(x), label)
errD_real.backward()
fake = netG(y)
errD_fake = criterion(netD(fake.detach()), torch.zeros_like(label))
errD_fake.backward()
D_x = errD_real + errD_fake
first = optimizerD.step()
netG.zero_grad()
errG = criterion(netD(fake), label)
errG.backward()
second = optimizerG.step()
fetched = [first, second]
""",
    ),
    "words": Loop(
        """
batches = [(torch.randint(20, (5, 4)), torch.randint(20, (20,))) for _ in range(3)]
class RNNModel(nn.Module):
    def __init__(self, ntoken=20, ninp=6, nhid=6, nlayers=2):
        super().__init__()
        self.ntoken, self.nhid, self.nlayers = ntoken, nhid, nlayers
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.GRU(ninp, nhid, nlayers)
        self.decoder = nn.Linear(nhid, ntoken)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return F.log_softmax(self.decoder(output).view(-1, self.ntoken), dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(self.nlayers, bsz, self.nhid)

model, lr = RNNModel(), 2.0
criterion = nn.NLLLoss()
""",
        """
model.zero_grad()
hidden = model.init_hidden(4)
output, hidden = model(x, hidden)
loss = criterion(output, y)
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
for p in model.parameters():
    p.data.add_(p.grad, alpha=-lr)
fetched = tfnb.effects() if recorded else None
""",
        epoch="ppl = math.exp(2.5)",
    ),
    "super resolution": Loop(
        """
batches = [(torch.rand(n, 1, 5, 5), torch.rand(n, 1, 10, 10)) for n in (4, 4, 2)]
class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, (5, 5), (1, 1), (2, 2)), nn.Conv2d(8, upscale_factor**2, 3, 1, 1)
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        nn.init.orthogonal_(self.conv1.weight, nn.init.calculate_gain("relu"))

    def forward(self, x):
        return self.pixel_shuffle(self.conv2(self.relu(self.conv1(x))))

model, criterion = Net(2), nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
""",
        USUAL,
    ),
    "waves": Loop(
        """
times = [torch.arange(4 * n).view(n, 4) / 3.0 for n in (3, 3, 2)]
batches = [(torch.sin(t), torch.cos(t)) for t in times]
class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 5), nn.LSTMCell(5, 5), nn.Linear(5, 1)

    def forward(self, input, future=0):
        outputs = []
        h_t, c_t = torch.zeros(input.size(0), 5), torch.zeros(input.size(0), 5)
        h_t2, c_t2 = torch.zeros(input.size(0), 5), torch.zeros(input.size(0), 5)
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for i in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)

model, criterion = Sequence(), nn.MSELoss()
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5)
scheduler = ExponentialLR(optimizer, 0.9)
""",
        USUAL,
        epoch="scheduler.step()",
    ),
    "policy gradient": Loop(
        """
batches = [(torch.randn(n, 4), torch.randint(2, (n,)), torch.randn(n)) for n in (6, 9, 4)]
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.affine2 = nn.Linear(4, 16), nn.Linear(16, 2)
        self.saved_log_probs, self.rewards = [], []

    def forward(self, x):
        return F.softmax(self.affine2(F.relu(self.affine1(x))), dim=1)

model = Policy()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
eps = np.finfo(np.float32).eps.item()
""",
        """
m = torch.distributions.Categorical(model(x))
returns = (r - r.mean()) / (r.std() + eps)
policy_loss = (-m.log_prob(y) * returns).sum()
optimizer.zero_grad()
policy_loss.backward()
fetched = optimizer.step()
""",
        names="x y r",
        epoch="running_reward = 0.05 * 3 + 0.95 * 10\ndel model.rewards[:]\ndel model.saved_log_probs[:]",
    ),
    "actor and critic": Loop(
        """
batches = [(torch.randn(n, 4), torch.randint(2, (n,)), torch.randn(n)) for n in (6, 9, 4)]
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.action_head, self.value_head = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)

model = Policy()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
""",
        """
probs, values = model(x)
advantage = r - values.squeeze(-1).detach()
policy_losses = -torch.distributions.Categorical(probs).log_prob(y) * advantage
value_losses = F.smooth_l1_loss(values.squeeze(-1), r, reduction="none")
loss = policy_losses.sum() + value_losses.sum()
optimizer.zero_grad()
loss.backward()
fetched = optimizer.step()
""",
        names="x y r",
    ),
    "style": Loop(
        """
batches = [(torch.rand(n, 3, 8, 8), torch.rand(n, 3, 8, 8)) for n in (2, 2, 1)]
class ConvLayer(nn.Module):
    def __init__(self, i, o, kernel_size, stride):
        super().__init__()
        self.reflection_pad, self.conv2d = nn.ReflectionPad2d(kernel_size // 2), nn.Conv2d(i, o, kernel_size, stride)

    def forward(self, x):
        return self.conv2d(self.reflection_pad(x))

class Up(nn.Module):
    def __init__(self, i, o, upsample=None):
        super().__init__()
        self.upsample, self.conv = upsample, ConvLayer(i, o, 3, 1)

    def forward(self, x):
        if self.upsample:
            x = F.interpolate(x, mode="nearest", scale_factor=self.upsample)
        return self.conv(x)

def gram_matrix(y):
    (b, ch, h, w) = y.size()
    features = y.view(b, ch, w * h)
    return features.bmm(features.transpose(1, 2)) / (ch * h * w)

model = nn.Sequential(ConvLayer(3, 6, 3, 2), nn.InstanceNorm2d(6, affine=True), nn.ReLU(), Up(6, 3, upsample=2))
vgg = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU()).requires_grad_(False)
mse_loss = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
""",
        """
optimizer.zero_grad()
y_hat = model(x)
content_loss = 1e2 * mse_loss(vgg(y_hat), vgg(x))
style_loss = 0.0
style_loss += mse_loss(gram_matrix(vgg(y_hat)), gram_matrix(vgg(y)))
total_loss = content_loss + style_loss
total_loss.backward()
fetched = optimizer.step()
""",
    ),
    "siamese": Loop(
        """
batches = [(torch.randn(n, 1, 6, 6), torch.randn(n, 1, 6, 6), 1.0 * torch.randint(2, (n,))) for n in (6, 6, 2)]
class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
        self.fc = nn.Sequential(nn.Linear(128, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
        self.sigmoid = nn.Sigmoid()

    def forward_once(self, x):
        output = self.body(x)
        return output.view(output.size()[0], -1)

    def forward(self, input1, input2):
        return self.sigmoid(self.fc(torch.cat((self.forward_once(input1), self.forward_once(input2)), 1)))

model, criterion = SiameseNetwork(), nn.BCELoss()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
""",
        """
optimizer.zero_grad()
outputs = model(x, y).squeeze()
loss = criterion(outputs, t)
loss.backward()
fetched = optimizer.step()
""",
        names="x y t",
        epoch="scheduler.step()",
    ),
    "vision transformer": Loop(
        CLASSES + """
class ViT(nn.Module):
    def __init__(self, patch=4, dim=8):
        super().__init__()
        self.patch_embedding = nn.Conv2d(1, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.position = nn.Parameter(torch.randn(1, 5, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 2, 16, 0.0, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, x):
        x = self.patch_embedding(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.position
        return self.head(self.norm(self.encoder(x))[:, 0])

model, criterion = ViT(), nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
scheduler = CosineAnnealingLR(optimizer, T_max=4)
""",
        USUAL,
        epoch="scheduler.step()",
    ),
    "graph convolution": Loop(
        """
nodes = torch.randn(7, 5)
adj = (torch.rand(7, 7) < 0.4) * 1.0
batches = [(nodes, torch.randint(3, (7,)))] * 2
class GraphConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.kernel, self.bias = nn.Parameter(torch.empty(i, o)), nn.Parameter(torch.zeros(o))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, h, adj):
        return torch.mm(adj, torch.mm(h, self.kernel)) + self.bias

class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2 = GraphConv(5, 8), GraphConv(8, 3)

    def forward(self, h, adj):
        return F.log_softmax(self.gc2(F.relu(self.gc1(h, adj)), adj), dim=1)

model, criterion = GCN(), nn.NLLLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
""",
        """
optimizer.zero_grad()
output = model(x, adj)
loss = criterion(output, y)
loss.backward()
fetched = optimizer.step()
""",
        shapes="(7,5) (7,)",
    ),
    "translation": Loop(
        """
batches = [(torch.randint(1, 15, (n, 6)), torch.randint(1, 15, (n, 5))) for n in (4, 4, 3)]
class Seq2Seq(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.transformer = nn.Transformer(d, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.generator, self.src, self.tgt = nn.Linear(d, 15), nn.Embedding(15, d), nn.Embedding(15, d)
        self.emb_size = d
        den = torch.exp(-torch.arange(0, d, 2) * math.log(10000) / d)
        pos = torch.arange(0, 10).reshape(10, 1)
        pe = torch.zeros((10, d))
        pe[:, 0::2], pe[:, 1::2] = torch.sin(pos * den), torch.cos(pos * den)
        self.register_buffer("pos_embedding", pe)

    def forward(self, src, tgt, mask):
        a = self.src(src) * math.sqrt(self.emb_size) + self.pos_embedding[: src.size(1)]
        b = self.tgt(tgt) * math.sqrt(self.emb_size) + self.pos_embedding[: tgt.size(1)]
        return self.generator(self.transformer(a, b, tgt_mask=mask))

model = Seq2Seq()
loss_fn = nn.CrossEntropyLoss(ignore_index=0)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
scheduler = LambdaLR(optimizer, lambda epoch: 1.0 / (1 + epoch))
""",
        """
tgt_input, tgt_out = y[:, :-1], y[:, 1:]
mask = torch.triu(torch.full((tgt_input.size(1), tgt_input.size(1)), float("-inf")), diagonal=1)
logits = model(x, tgt_input, mask)
optimizer.zero_grad()
loss = loss_fn(logits.reshape(-1, logits.shape[-1]), tgt_out.reshape(-1))
loss.backward()
fetched = optimizer.step()
""",
        epoch="scheduler.step()",
    ),
    "sentence pairs": Loop(
        """
batches = [(torch.randint(30, (6, n)), torch.randint(30, (6, n)), torch.randint(3, (n,))) for n in (5, 5, 4)]
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(input_size=6, hidden_size=6, num_layers=1, bidirectional=True)

    def forward(self, inputs):
        batch_size = inputs.size()[1]
        h0 = c0 = inputs.new_zeros(2, batch_size, 6)
        outputs, (ht, ct) = self.rnn(inputs, (h0, c0))
        return ht[-1] if False else ht[-2:].transpose(0, 1).contiguous().view(batch_size, -1)

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.projection, self.encoder = nn.Embedding(30, 6), nn.Linear(6, 6), Encoder()
        self.out = nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, premise, hypothesis):
        prem, hypo = self.embed(premise).detach(), self.embed(hypothesis).detach()
        prem, hypo = F.relu(self.projection(prem)), F.relu(self.projection(hypo))
        return self.out(torch.cat([self.encoder(prem), self.encoder(hypo)], 1))

model, criterion = Classifier(), nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
""",
        """
optimizer.zero_grad()
answer = model(x, y)
correct = (torch.max(answer, 1)[1].view(t.size()) == t).sum()
loss = criterion(answer, t)
loss.backward()
fetched = optimizer.step()
""",
        names="x y t",
        shapes="(6,None) (6,None) (None,)",
    ),
    "regression": Loop(
        """
W_target, b_target = torch.randn(4, 1) * 5, torch.randn(1) * 5
def make_features(x):
    x = x.unsqueeze(1)
    return torch.cat([x**i for i in range(1, 5)], 1)
def f(x):
    return x.mm(W_target) + b_target.item()
batches = [(x, f(x)) for x in (make_features(torch.randn(32) / 2) for _ in range(4))]
model = torch.nn.Linear(W_target.size(0), 1)
""",
        """
model.zero_grad()
loss = F.smooth_l1_loss(model(x), y)
loss.backward()
for param in model.parameters():
    param.data.add_(-0.1 * param.grad)
fetched = tfnb.effects() if recorded else None
""",
    ),
    "a small language model": Loop(
        """
batches = [(torch.randint(11, (n, 6)), torch.randint(11, (n, 6))) for n in (4, 4, 2)]
class Attention(nn.Module):
    def __init__(self, d, n_head, block):
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = nn.Linear(d, 3 * d), nn.Linear(d, d), n_head
        self.register_buffer("bias", torch.tril(torch.ones(block, block)).view(1, 1, block, block))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (z.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for z in self.c_attn(x).split(C, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.softmax(att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")), dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))

class GPT(nn.Module):
    def __init__(self, d=8, block=6):
        super().__init__()
        self.block_size = block
        self.wte, self.wpe = nn.Embedding(11, d), nn.Embedding(block, d)
        self.h = nn.ModuleList(nn.ModuleDict({"ln": nn.LayerNorm(d), "attn": Attention(d, 2, block)}) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(d), nn.Linear(d, 11, bias=False)

    def forward(self, idx, targets=None):
        b, t = idx.size()
        assert t <= self.block_size, f"cannot forward sequence of length {t}"
        pos = torch.arange(0, t, dtype=torch.long).unsqueeze(0)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = x + block["attn"](block["ln"](x))
        logits, loss = self.lm_head(self.ln_f(x)), None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

model = GPT()
decay = [p for n, p in model.named_parameters() if p.dim() >= 2]
plain = [p for n, p in model.named_parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], 1e-3)
""",
        """
logits, loss = model(x, y)
model.zero_grad(set_to_none=True)
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
fetched = optimizer.step()
""",
        epoch="for group in optimizer.param_groups:\n    group['lr'] = group['lr'] * 0.9",
    ),
    "distributed": Loop(
        """
batches = [(torch.randn(n, 10), torch.randn(n, 5)) for n in (20, 20, 12)]
class ToyMpModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))

model, loss_fn = ToyMpModel(), nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, nesterov=True, momentum=0.9)
scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=30)
""",
        "optimizer.zero_grad()\nloss = loss_fn(model(x), y)\nloss.backward()\nfetched = optimizer.step()",
        epoch="scheduler.step()",
    ),
    "forward and forward": Loop(
        """
batches = [(torch.randn(n, 6), torch.randn(n, 6)) for n in (10, 10, 4)]
class Layer(nn.Linear):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.relu, self.threshold = torch.nn.ReLU(), 2.0

    def forward(self, x):
        return self.relu(super().forward(x / (x.norm(2, 1, keepdim=True) + 1e-4)))

model = nn.ModuleList([Layer(6, 8), Layer(8, 8)])
opts = [torch.optim.Adam(layer.parameters(), lr=0.02) for layer in model]
""",
        """
fetched, h_pos, h_neg = [], x, y
for layer, opt in zip(model, opts):
    g_pos, g_neg = layer(h_pos).pow(2).mean(1), layer(h_neg).pow(2).mean(1)
    loss = torch.log(1 + torch.exp(torch.cat([-g_pos + layer.threshold, g_neg - layer.threshold]))).mean()
    opt.zero_grad()
    loss.backward()
    fetched.append(opt.step())
    h_pos, h_neg = layer(h_pos).detach(), layer(h_neg).detach()
""",
    ),
    "deep q": Loop(
        """
batches = [(torch.randn(n, 4), torch.randint(2, (n, 1)), torch.randn(n), torch.randn(n, 4)) for n in (6, 6, 6)]
policy_net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
target_net = copy.deepcopy(policy_net)
model = nn.ModuleDict({"policy": policy_net, "target": target_net})
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-3, amsgrad=True)
""",
        """
state_action_values = policy_net(x).gather(1, y)
with torch.no_grad():
    next_state_values = target_net(n).max(1).values
expected = next_state_values * 0.99 + r
loss = nn.SmoothL1Loss()(state_action_values, expected.unsqueeze(1))
optimizer.zero_grad()
loss.backward()
torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
fetched = optimizer.step()
""",
        names="x y r n",
        epoch="target_net.load_state_dict(policy_net.state_dict())",
    ),
}  # fmt: skip
EPOCHS = 3


def in_torch(loop: Loop) -> dict[str, torch.Tensor]:
    """The weights after the loop in plain PyTorch."""
    space: dict[str, Any] = {"recorded": False}
    exec(IMPORTS + dedent(loop.setup), space)
    for _ in range(EPOCHS):
        for batch in space["batches"]:
            space.update(zip(loop.names.split(), batch, strict=True))
            exec(loop.step, space)
        exec(loop.epoch, space)
    return space["model"].state_dict()


def cell(loop: Loop) -> str:
    """The step as a cell, whose sample is the first batch."""
    names = loop.names.split()
    shapes = loop.shapes.split() or [""] * len(names)
    given = [
        f"{name} = tfnb.placeholder(batches[0][{n}]{shape and f', shape={shape}'})"
        for n, (name, shape) in enumerate(zip(names, shapes, strict=True))
    ]
    return "\n".join(["%%tfgraph loop --no-show", *given, loop.step])


@pytest.fixture
def double() -> Iterator[None]:
    """Tensors are float64: Adam turns rounding errors of a gradient that is 0 (of a bias before a norm) into steps."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_as_in_torch_and_gives_no_note(notebook: Any, name: str) -> None:
    loop = LOOPS[name]
    want = in_torch(loop)
    feeds = "{" + ", ".join(f"{n}: batch[{i}]" for i, n in enumerate(loop.names.split())) + "}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        notebook.ok(f"recorded = True\n{IMPORTS}{dedent(loop.setup)}")
        ran = [notebook.ok(cell(loop))]
        for _ in range(EPOCHS):
            ran.append(notebook.ok(f"for batch in batches:\n    tfnb.run(fetched, {feeds})"))
            ran.append(notebook.ok(loop.epoch))
    shown = [bundle["text/plain"] for each in ran for bundle in each.shown]
    assert [text for text in shown if text.startswith("note")] == [] and not any(each.err for each in ran)
    got = notebook.names["model"].state_dict()
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert got[key].isfinite().all()
        if not loop.draws:
            torch.testing.assert_close(
                got[key], value, rtol=1e-6, atol=1e-8, msg=lambda text, key=key: f"{key}: {text}"
            )
