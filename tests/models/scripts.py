"""Whole training scripts in the structure of PyTorch's examples, plain and as notebooks: digits to language models."""

from __future__ import annotations

from tests.models.script import Script

SCRIPTS: dict[str, Script] = {}

SCRIPTS["digits, with a test set and a scheduler"] = Script(
    """
args = Namespace(batch_size=8, epochs=3, lr=0.5, gamma=0.7, log_interval=1)
images, labels = torch.randn(29, 1, 8, 8), torch.randint(10, (29,))
order = torch.Generator().manual_seed(3)
train_loader = DataLoader(TensorDataset(images[:21], labels[:21]), args.batch_size, shuffle=True, generator=order)
test_loader = DataLoader(TensorDataset(images[21:], labels[21:]), 5)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.bn, self.fc1, self.fc2 = nn.BatchNorm2d(4), nn.Linear(24, 12), nn.Linear(12, 10)

    def forward(self, x):
        x = F.relu(self.bn(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)

def test(model, loader):
    model.eval()
    test_loss = correct = 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1, keepdim=True).eq(target.view(-1, 1)).sum().item()
    log.extend([test_loss / len(loader.dataset), correct])

model = Net()
optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
""",
    """
def train(args, model, loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            log.append(loss.item())

for epoch in range(1, args.epochs + 1):
    train(args, model, train_loader, optimizer, epoch)
    test(model, test_loader)
    scheduler.step()
""",
    """
# %%
%%tfgraph mnist
data, target = tfnb.placeholder(images[:8]), tfnb.placeholder(labels[:8])
optimizer.zero_grad()
output = model(data)
loss = F.nll_loss(output, target)
loss.backward()
step = optimizer.step()
# %%
def train(args, model, loader, optimizer, epoch):
    model.train()
    for batch_idx, batch in enumerate(loader):
        _, value = tfnb.run([step, loss], {data: batch[0], target: batch[1]})
        if batch_idx % args.log_interval == 0:
            log.append(value.item())

for epoch in range(1, args.epochs + 1):
    train(args, model, train_loader, optimizer, epoch)
    test(model, test_loader)
    scheduler.step()
""",
)

SCRIPTS["images, with meters and a checkpoint in mid-training"] = Script(
    """
args = Namespace(epochs=4, start_epoch=0, lr=0.1, momentum=0.9, weight_decay=1e-3, label_smoothing=0.1)
data = TensorDataset(torch.randint(0, 256, (22, 3, 8, 8), dtype=torch.uint8), torch.randint(7, (22,)))
train_loader, val_loader = DataLoader(data, 8), DataLoader(data, 11)

class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        batch_size = target.size(0)
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / batch_size) for k in topk]

def validate(loader, model):
    top1 = AverageMeter()
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            output = model(images.double().sub_(127).div_(64))
            top1.update(accuracy(output, target, topk=(1, 3))[1][0].item(), images.size(0))
    return top1.avg

def split(model):
    skip = [p for n, p in model.named_parameters() if p.dim() == 1]
    rest = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": skip, "weight_decay": 0.0}, {"params": rest}]

model = nn.Sequential(
    nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(6, 6, 3),
    nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(6, 7),
)
model[4].requires_grad_(False)
optimizer = torch.optim.SGD(split(model), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=12)
criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
best_acc1, best = 0, None
""",
    """
def train(loader, model, criterion, optimizer, epoch):
    losses, top3 = AverageMeter(), AverageMeter()
    model.train()
    for i, (images, target) in enumerate(loader):
        images = images.double().sub_(127).div_(64)
        output = model(images)
        loss = criterion(output, target)
        acc1, acc3 = accuracy(output, target, topk=(1, 3))
        losses.update(loss.item(), images.size(0))
        top3.update(acc3[0].item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    log.extend([losses.avg, top3.avg])

for epoch in range(args.start_epoch, args.epochs):
    train(train_loader, model, criterion, optimizer, epoch)
    acc1 = validate(val_loader, model)
    log.append(acc1)
    if acc1 > best_acc1:
        best_acc1, best = acc1, copy.deepcopy(model.state_dict())
    if epoch == 1:
        saved = io.BytesIO()
        torch.save({"epoch": 2, "state": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    if epoch == 2:
        checkpoint = torch.load(io.BytesIO(saved.getvalue()))
        model.load_state_dict(checkpoint["state"])
        optimizer.load_state_dict(checkpoint["optimizer"])
log.extend(best.values())
""",
    """
# %%
%%tfgraph images
images, target = map(tfnb.placeholder, next(iter(train_loader)))
images = images.double().sub_(127).div_(64)
output = model(images)
loss = criterion(output, target)
acc1, acc3 = accuracy(output, target, topk=(1, 3))
optimizer.zero_grad()
loss.backward()
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
step = optimizer.step()
# %%
def train(loader, model, criterion, optimizer, epoch):
    losses, top3 = AverageMeter(), AverageMeter()
    model.train()
    for i, batch in enumerate(loader):
        _, value, top = tfnb.run([step, loss, acc3], {images: batch[0], target: batch[1]})
        losses.update(value.item(), len(batch[0]))
        top3.update(top[0].item(), len(batch[0]))
        scheduler.step()
    log.extend([losses.avg, top3.avg])

for epoch in range(args.start_epoch, args.epochs):
    train(train_loader, model, criterion, optimizer, epoch)
    acc1 = validate(val_loader, model)
    log.append(acc1)
    if acc1 > best_acc1:
        best_acc1, best = acc1, copy.deepcopy(model.state_dict())
    if epoch == 1:
        saved = io.BytesIO()
        torch.save({"epoch": 2, "state": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    if epoch == 2:
        checkpoint = torch.load(io.BytesIO(saved.getvalue()))
        model.load_state_dict(checkpoint["state"])
        optimizer.load_state_dict(checkpoint["optimizer"])
log.extend(best.values())
""",
)

SCRIPTS["words, with a state from batch to batch"] = Script(
    """
args = Namespace(emsize=6, nhid=6, nlayers=2, lr=4.0, clip=0.25, epochs=4, batch_size=4, bptt=5, log_interval=2)

def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()

def get_batch(source, i):
    seq_len = min(args.bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)

train_data, val_data = batchify(torch.randint(11, (95,)), args.batch_size), batchify(torch.randint(11, (40,)), 2)

class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers):
        super().__init__()
        self.ntoken, self.nhid, self.nlayers = ntoken, nhid, nlayers
        self.encoder, self.rnn = nn.Embedding(ntoken, ninp), nn.LSTM(ninp, nhid, nlayers, dropout=0.0)
        self.decoder = nn.Linear(nhid, ntoken)
        self.decoder.weight = self.encoder.weight

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return F.log_softmax(self.decoder(output).view(-1, self.ntoken), dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return (weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid))

def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)

def evaluate(data_source):
    model.eval()
    total_loss, hidden = 0.0, model.init_hidden(2)
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, args.bptt):
            data, targets = get_batch(data_source, i)
            output, hidden = model(data, hidden)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(data_source) - 1)

model, criterion, lr, best_val_loss = RNNModel(11, args.emsize, args.nhid, args.nlayers), nn.NLLLoss(), args.lr, None
""",
    """
def train():
    model.train()
    total_loss = 0.0
    hidden = model.init_hidden(args.batch_size)
    for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total_loss += loss.item()
        if batch % args.log_interval == 0:
            log.append(total_loss)
            total_loss = 0

for epoch in range(1, args.epochs + 1):
    train()
    val_loss = evaluate(val_data)
    log.append(val_loss)
    if not best_val_loss or val_loss < best_val_loss:
        best, best_val_loss = copy.deepcopy(model), val_loss
    else:
        lr /= 4.0
log.append(evaluate(val_data))
log.extend(best.parameters())
""",
    """
# %%
%%tfgraph words
data = tfnb.placeholder(train_data[:5], shape=("T", 4))
targets = tfnb.placeholder(get_batch(train_data, 0)[1])
rate = tfnb.placeholder(lr)
hidden = tuple(tfnb.placeholder(h, shape=h.shape) for h in model.init_hidden(args.batch_size))
model.zero_grad()
hidden = repackage_hidden(hidden)
output, hidden = model(data, hidden)
loss = criterion(output, targets)
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
for p in model.parameters():
    p.data.add_(p.grad * -rate)
step = tfnb.effects()
# %%
def train():
    model.train()
    total_loss = 0.0
    state = model.init_hidden(args.batch_size)
    for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
        words, following = get_batch(train_data, i)
        feeds = {data: words, targets: following, rate: lr, hidden[0]: state[0], hidden[1]: state[1]}
        _, value, state = tfnb.run([step, loss, hidden], feeds)
        total_loss += value.item()
        if batch % args.log_interval == 0:
            log.append(total_loss)
            total_loss = 0

for epoch in range(1, args.epochs + 1):
    train()
    val_loss = evaluate(val_data)
    log.append(val_loss)
    if not best_val_loss or val_loss < best_val_loss:
        best, best_val_loss = copy.deepcopy(model), val_loss
    else:
        lr /= 4.0
log.append(evaluate(val_data))
log.extend(best.parameters())
""",
)

SCRIPTS["waves, by L-BFGS"] = Script(
    """
data = torch.sin(torch.arange(20) / 2.0 + torch.rand(6, 1) * 9)
input, target = data[2:, :-1], data[2:, 1:]

class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 5), nn.LSTMCell(5, 5), nn.Linear(5, 1)

    def forward(self, input, future=0):
        outputs = []
        h_t, c_t, h_t2, c_t2 = (torch.zeros(input.size(0), 5, dtype=torch.double) for _ in range(4))
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
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6)
""",
    """
for i in range(3):
    def closure():
        optimizer.zero_grad()
        out = model(input)
        loss = criterion(out, target)
        log.append(loss.item())
        loss.backward()
        return loss
    optimizer.step(closure)
    with torch.no_grad():
        log.append(criterion(model(data[:2, :-1], future=4)[:, :-4], data[:2, 1:]).item())
""",
    """
# %%
%%tfgraph waves
out = model(input)
loss = criterion(out, target)
grads = torch.autograd.grad(loss, list(model.parameters()))
# %%
for i in range(3):
    def closure():
        value, found = tfnb.run([loss, grads])
        log.append(value.item())
        for p, g in zip(model.parameters(), found):
            p.grad = g
        return value
    optimizer.step(closure)
    with torch.no_grad():
        log.append(criterion(model(data[:2, :-1], future=4)[:, :-4], data[:2, 1:]).item())
""",
)

SCRIPTS["forward and forward, each layer with its optimizer"] = Script(
    """
def get_y_neg(y):
    return (y + torch.randint(1, 10, y.shape)) % 10

def overlay_y_on_x(x, y, classes=10):
    x_ = x.clone()
    x_[:, :classes] *= 0.0
    x_[range(x.shape[0]), y] = x.max()
    return x_

class Layer(nn.Linear):
    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.relu, self.threshold, self.num_epochs = nn.ReLU(), 1.5, 4
        self.opt = torch.optim.Adam(self.parameters(), lr=0.03)

    def forward(self, x):
        x_direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return self.relu(torch.mm(x_direction, self.weight.T) + self.bias.unsqueeze(0))

    def train(self, x_pos, x_neg):
        for i in range(self.num_epochs):
            g_pos = self.forward(x_pos).pow(2).mean(1)
            g_neg = self.forward(x_neg).pow(2).mean(1)
            loss = torch.log(1 + torch.exp(torch.cat([-g_pos + self.threshold, g_neg - self.threshold]))).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
        return self.forward(x_pos).detach(), self.forward(x_neg).detach()

class Net(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.layers = [Layer(dims[d], dims[d + 1]) for d in range(len(dims) - 1)]

    def predict(self, x):
        goodness_per_label = []
        for label in range(10):
            h = overlay_y_on_x(x, torch.full((x.shape[0],), label))
            goodness = []
            for layer in self.layers:
                h = layer(h)
                goodness = goodness + [h.pow(2).mean(1)]
            goodness_per_label += [sum(goodness).unsqueeze(1)]
        return torch.cat(goodness_per_label, 1).argmax(1)

    def train(self, x_pos, x_neg):
        h_pos, h_neg = x_pos, x_neg
        for layer in self.layers:
            h_pos, h_neg = layer.train(h_pos, h_neg)

net = Net([16, 10, 10])
x, y = torch.rand(12, 16), torch.randint(10, (12,))
y_neg = get_y_neg(y)
model = nn.ModuleList(net.layers)
""",
    """
x_pos = overlay_y_on_x(x, y)
x_neg = overlay_y_on_x(x, y_neg)
net.train(x_pos, x_neg)
log.append(1.0 - net.predict(x).eq(y).double().mean().item())
""",
    """
# %%
%%tfgraph goodness
x_pos = overlay_y_on_x(x, y)
x_neg = overlay_y_on_x(x, y_neg)
net.train(x_pos, x_neg)
step = tfnb.effects()
# %%
tfnb.run(step)
log.append(1.0 - net.predict(x).eq(y).double().mean().item())
""",
)

_POLE = """
class CartPole:
    def reset(self):
        self.state, self.steps = np.random.uniform(-0.05, 0.05, 4), 0
        return self.state.copy()

    def step(self, action):
        x, v, a, w = self.state
        force = 10.0 if action == 1 else -10.0
        push = (force + 0.05 * w**2 * np.sin(a)) / 1.1
        turn = (9.8 * np.sin(a) - np.cos(a) * push) / (0.5 * (4 / 3 - 0.1 * np.cos(a) ** 2 / 1.1))
        pull = push - 0.05 * turn * np.cos(a) / 1.1
        self.state = np.array([x + 0.02 * v, v + 0.02 * pull, a + 0.02 * w, w + 0.02 * turn])
        self.steps += 1
        return self.state.copy(), 1.0, bool(abs(self.state[2]) > 0.2 or self.steps == 40)

args, env, eps = Namespace(gamma=0.99, episodes=5), CartPole(), np.finfo(np.float32).eps.item()
"""

SCRIPTS["a policy by its episodes"] = Script(
    _POLE
    + """
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.dropout, self.affine2 = nn.Linear(4, 16), nn.Dropout(p=0.0), nn.Linear(16, 2)
        self.saved_log_probs, self.rewards = [], []

    def forward(self, x):
        x = F.relu(self.dropout(self.affine1(x)))
        return F.softmax(self.affine2(x), dim=1)

policy = model = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
""",
    """
def select_action(state):
    state = torch.from_numpy(state).unsqueeze(0)
    probs = policy(state)
    m = torch.distributions.Categorical(probs)
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()

def finish_episode():
    R, returns = 0, []
    for r in policy.rewards[::-1]:
        R = r + args.gamma * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    policy_loss = []
    for log_prob, R in zip(policy.saved_log_probs, returns):
        policy_loss.append(-log_prob * R)
    optimizer.zero_grad()
    policy_loss = torch.cat(policy_loss).sum()
    policy_loss.backward()
    optimizer.step()
    log.append(policy_loss.item())
    del policy.rewards[:]
    del policy.saved_log_probs[:]

for i_episode in range(args.episodes):
    state, done = env.reset(), False
    while not done:
        action = select_action(state)
        state, reward, done = env.step(action)
        policy.rewards.append(reward)
    finish_episode()
""",
    """
# %%
%%tfgraph episode
samples = torch.zeros(7, 4), torch.zeros(7, dtype=torch.int64), torch.zeros(7)
seen, taken, gains = map(tfnb.placeholder, samples)
m = torch.distributions.Categorical(policy(seen))
optimizer.zero_grad()
policy_loss = (-m.log_prob(taken) * gains).sum()
policy_loss.backward()
step = optimizer.step()
# %%
def select_action(state):
    state = torch.from_numpy(state).unsqueeze(0)
    probs = policy(state)
    m = torch.distributions.Categorical(probs)
    action = m.sample()
    policy.saved_log_probs.append((state, action))
    return action.item()

def finish_episode():
    R, returns = 0, []
    for r in policy.rewards[::-1]:
        R = r + args.gamma * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    states, actions = map(torch.cat, zip(*policy.saved_log_probs))
    _, value = tfnb.run([step, policy_loss], {seen: states, taken: actions, gains: returns})
    log.append(value.item())
    del policy.rewards[:]
    del policy.saved_log_probs[:]

for i_episode in range(args.episodes):
    state, done = env.reset(), False
    while not done:
        action = select_action(state)
        state, reward, done = env.step(action)
        policy.rewards.append(reward)
    finish_episode()
""",
)

SCRIPTS["an actor with its critic"] = Script(
    _POLE
    + """
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.action_head, self.value_head = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 1)
        self.saved_actions, self.rewards = [], []

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)

model = Policy()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
""",
    """
def select_action(state):
    state = torch.from_numpy(state)
    probs, state_value = model(state)
    m = torch.distributions.Categorical(probs)
    action = m.sample()
    model.saved_actions.append((m.log_prob(action), state_value))
    return action.item()

def finish_episode():
    R, returns = 0, []
    for r in model.rewards[::-1]:
        R = r + args.gamma * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    policy_losses, value_losses = [], []
    for (log_prob, value), R in zip(model.saved_actions, returns):
        advantage = R - value.item()
        policy_losses.append(-log_prob * advantage)
        value_losses.append(F.smooth_l1_loss(value, torch.tensor([R])))
    optimizer.zero_grad()
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    loss.backward()
    optimizer.step()
    log.append(loss.item())
    del model.rewards[:]
    del model.saved_actions[:]

for i_episode in range(args.episodes):
    state, done = env.reset(), False
    while not done:
        action = select_action(state)
        state, reward, done = env.step(action)
        model.rewards.append(reward)
    finish_episode()
""",
    """
# %%
%%tfgraph episode
samples = torch.zeros(7, 4), torch.zeros(7, dtype=torch.int64), torch.zeros(7)
seen, taken, gains = map(tfnb.placeholder, samples)
policy_losses, value_losses = [], []
for s, a, R in zip(seen, taken, gains):
    probs, value = model(s)
    m = torch.distributions.Categorical(probs)
    advantage = R - value.item()
    policy_losses.append(-m.log_prob(a) * advantage)
    value_losses.append(F.smooth_l1_loss(value, torch.tensor([R])))
optimizer.zero_grad()
loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
loss.backward()
step = optimizer.step()
# %%
def select_action(state):
    state = torch.from_numpy(state)
    probs, state_value = model(state)
    m = torch.distributions.Categorical(probs)
    action = m.sample()
    model.saved_actions.append((state, action))
    return action.item()

def finish_episode():
    R, returns = 0, []
    for r in model.rewards[::-1]:
        R = r + args.gamma * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    states, actions = map(torch.stack, zip(*model.saved_actions))
    _, value = tfnb.run([step, loss], {seen: states, taken: actions, gains: returns})
    log.append(value.item())
    del model.rewards[:]
    del model.saved_actions[:]

for i_episode in range(args.episodes):
    state, done = env.reset(), False
    while not done:
        action = select_action(state)
        state, reward, done = env.step(action)
        model.rewards.append(reward)
    finish_episode()
""",
)

SCRIPTS["translation word by word, with a coin and an end"] = Script(
    """
SOS, EOS, MAX_LENGTH, teacher_forcing_ratio = 0, 1, 8, 0.5

class EncoderRNN(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.hidden_size = hidden_size
        self.embedding, self.gru = nn.Embedding(input_size, hidden_size), nn.GRU(hidden_size, hidden_size)

    def forward(self, input, hidden):
        embedded = self.embedding(input).view(1, 1, -1)
        return self.gru(embedded, hidden)

    def initHidden(self):
        return torch.zeros(1, 1, self.hidden_size)

class AttnDecoderRNN(nn.Module):
    def __init__(self, hidden_size, output_size):
        super().__init__()
        self.embedding, self.attn = nn.Embedding(output_size, hidden_size), nn.Linear(hidden_size * 2, MAX_LENGTH)
        self.attn_combine, self.gru = nn.Linear(hidden_size * 2, hidden_size), nn.GRU(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, output_size)

    def forward(self, input, hidden, encoder_outputs):
        embedded = self.embedding(input).view(1, 1, -1)
        attn_weights = F.softmax(self.attn(torch.cat((embedded[0], hidden[0]), 1)), dim=1)
        attn_applied = torch.bmm(attn_weights.unsqueeze(0), encoder_outputs.unsqueeze(0))
        output = self.attn_combine(torch.cat((embedded[0], attn_applied[0]), 1)).unsqueeze(0)
        output, hidden = self.gru(F.relu(output), hidden)
        return F.log_softmax(self.out(output[0]), dim=1), hidden, attn_weights

encoder, decoder = EncoderRNN(9, 6), AttnDecoderRNN(6, 9)
model, criterion = nn.ModuleList([encoder, decoder]), nn.NLLLoss()
encoder_optimizer = torch.optim.SGD(encoder.parameters(), lr=0.5)
decoder_optimizer = torch.optim.SGD(decoder.parameters(), lr=0.5)
pairs = [(torch.randint(2, 9, (a, 1)), torch.cat([torch.randint(2, 9, (b, 1)), torch.tensor([[EOS]])]))
         for a, b in ((5, 4), (3, 6), (7, 3), (4, 5), (5, 2), (3, 6))]
""",
    """
def train(input_tensor, target_tensor):
    encoder_hidden = encoder.initHidden()
    encoder_optimizer.zero_grad()
    decoder_optimizer.zero_grad()
    input_length = input_tensor.size(0)
    target_length = target_tensor.size(0)
    encoder_outputs = torch.zeros(MAX_LENGTH, encoder.hidden_size)
    loss = 0
    for ei in range(input_length):
        encoder_output, encoder_hidden = encoder(input_tensor[ei], encoder_hidden)
        encoder_outputs[ei] = encoder_output[0, 0]
    decoder_input = torch.tensor([[SOS]])
    decoder_hidden = encoder_hidden
    use_teacher_forcing = random.random() < teacher_forcing_ratio
    if use_teacher_forcing:
        for di in range(target_length):
            decoder_output, decoder_hidden, _ = decoder(decoder_input, decoder_hidden, encoder_outputs)
            loss += criterion(decoder_output, target_tensor[di])
            decoder_input = target_tensor[di]
    else:
        for di in range(target_length):
            decoder_output, decoder_hidden, _ = decoder(decoder_input, decoder_hidden, encoder_outputs)
            topv, topi = decoder_output.topk(1)
            decoder_input = topi.squeeze().detach()
            loss += criterion(decoder_output, target_tensor[di])
            if decoder_input.item() == EOS:
                break
    loss.backward()
    encoder_optimizer.step()
    decoder_optimizer.step()
    return loss.item() / target_length

for input_tensor, target_tensor in pairs * 2:
    log.append(train(input_tensor, target_tensor))
""",
    """
# %%
%%tfgraph pairs
input_tensor, target_tensor = map(tfnb.placeholder, pairs[0])
use_teacher_forcing = tfnb.placeholder(True)
encoder_hidden = encoder.initHidden()
encoder_optimizer.zero_grad()
decoder_optimizer.zero_grad()
input_length = input_tensor.size(0)
target_length = target_tensor.size(0)
encoder_outputs = torch.zeros(MAX_LENGTH, encoder.hidden_size)
loss = torch.zeros(())
for ei in range(input_length):
    encoder_output, encoder_hidden = encoder(input_tensor[ei], encoder_hidden)
    encoder_outputs[ei] = encoder_output[0, 0]
decoder_input = torch.tensor([SOS])
decoder_hidden = encoder_hidden
if use_teacher_forcing:
    for di in range(target_length):
        decoder_output, decoder_hidden, _ = decoder(decoder_input, decoder_hidden, encoder_outputs)
        loss += criterion(decoder_output, target_tensor[di])
        decoder_input = target_tensor[di]
else:
    for di in range(target_length):
        decoder_output, decoder_hidden, _ = decoder(decoder_input, decoder_hidden, encoder_outputs)
        topv, topi = decoder_output.topk(1)
        decoder_input = topi[0].detach()
        loss += criterion(decoder_output, target_tensor[di])
        if decoder_input.item() == EOS:
            break
loss.backward()
step = [encoder_optimizer.step(), decoder_optimizer.step()]
# %%
def train(words, translation):
    coin = random.random() < teacher_forcing_ratio
    feeds = {input_tensor: words, target_tensor: translation, use_teacher_forcing: coin}
    _, value = tfnb.run([step, loss], feeds)
    return value.item() / len(translation)

for words, translation in pairs * 2:
    log.append(train(words, translation))
""",
)

SCRIPTS["attention over a graph, all of it in each step"] = Script(
    """
features, labels = torch.randn(12, 5), torch.randint(3, (12,))
adj_mat = ((torch.rand(12, 12) < 0.3) | torch.eye(12, dtype=torch.bool)).double()
idx = torch.randperm(12)
idx_train, idx_val = idx[:8], idx[8:]

class GraphAttentionLayer(nn.Module):
    def __init__(self, in_features, out_features, n_heads, concat, slope=0.2):
        super().__init__()
        self.n_heads, self.concat, self.n_hidden = n_heads, concat, out_features // n_heads if concat else out_features
        self.W = nn.Parameter(torch.empty((in_features, self.n_hidden * n_heads)))
        self.a = nn.Parameter(torch.empty((n_heads, 2 * self.n_hidden, 1)))
        self.leakyrelu = nn.LeakyReLU(slope)
        nn.init.xavier_normal_(self.W)
        nn.init.xavier_normal_(self.a)

    def forward(self, h, adj_mat):
        n_nodes = h.shape[0]
        h = torch.mm(h, self.W).view(n_nodes, self.n_heads, self.n_hidden).permute(1, 0, 2)
        source = torch.matmul(h, self.a[:, : self.n_hidden, :])
        target = torch.matmul(h, self.a[:, self.n_hidden :, :])
        e = self.leakyrelu(source + target.mT)
        attention = torch.where(adj_mat > 0, e, -9e16 * torch.ones_like(e))
        h = torch.matmul(F.softmax(attention, dim=-1), h)
        return h.permute(1, 0, 2).contiguous().view(n_nodes, -1) if self.concat else h.mean(dim=0)

class GAT(nn.Module):
    def __init__(self):
        super().__init__()
        self.gat1, self.gat2 = GraphAttentionLayer(5, 8, 2, True), GraphAttentionLayer(8, 3, 1, False)
        self.elu = nn.ELU()

    def forward(self, x, adj_mat):
        return F.log_softmax(self.gat2(self.elu(self.gat1(x, adj_mat)), adj_mat), dim=1)

def test():
    model.eval()
    with torch.no_grad():
        output = model(features, adj_mat)
        return criterion(output[idx_val], labels[idx_val]).item()

model, criterion = GAT(), nn.NLLLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
best_loss, bad = float("inf"), 0
""",
    """
for epoch in range(20):
    model.train()
    optimizer.zero_grad()
    output = model(features, adj_mat)
    loss = criterion(output[idx_train], labels[idx_train])
    loss.backward()
    optimizer.step()
    loss_val = test()
    scheduler.step(loss_val)
    log.extend([loss.item(), loss_val])
    bad = bad + 1 if loss_val >= best_loss else 0
    best_loss = min(best_loss, loss_val)
    if bad == 5:
        break
""",
    """
# %%
%%tfgraph cora
model.train()
optimizer.zero_grad()
output = model(features, adj_mat)
loss = criterion(output[idx_train], labels[idx_train])
loss.backward()
step = optimizer.step()
# %%
for epoch in range(20):
    model.train()
    _, value = tfnb.run([step, loss])
    loss_val = test()
    scheduler.step(loss_val)
    log.extend([value.item(), loss_val])
    bad = bad + 1 if loss_val >= best_loss else 0
    best_loss = min(best_loss, loss_val)
    if bad == 5:
        break
""",
)

SCRIPTS["a language model, accumulated, warmed up and averaged"] = Script(
    """
args = Namespace(accumulate=2, block=6, batch=3, iterations=10, warmup=3, lr=1e-2, min_lr=1e-3, decay=0.9)
tokens = torch.randint(13, (200,))

def get_batch():
    ix = torch.randint(len(tokens) - args.block, (args.batch,))
    x, y = ([tokens[i + shift : i + shift + args.block] for i in ix] for shift in (0, 1))
    return torch.stack(x), torch.stack(y)

class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.ln_1, self.ln_2, self.heads = nn.LayerNorm(d, bias=False), nn.LayerNorm(d), heads
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(approximate="tanh"), nn.Linear(4 * d, d), nn.Dropout(0.0))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(C, dim=2)
        q, k, v = (z.view(B, T, self.heads, C // self.heads).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0 if self.training else 0, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.ln_2(x))

class GPT(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(13, d), nn.Embedding(args.block, d)
        self.h, self.ln_f = nn.ModuleList([Block(d, 2) for _ in range(2)]), nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, 13, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(4))

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.2)

    def forward(self, idx, targets=None):
        b, t = idx.size()
        assert t <= args.block
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    @torch.no_grad()
    def generate(self, idx, count):
        for _ in range(count):
            logits, _ = self(idx[:, -args.block :])
            v, _ = torch.topk(logits[:, -1, :], 3)
            logits[:, -1, :][logits[:, -1, :] < v[:, [-1]]] = -float("inf")
            idx = torch.cat((idx, torch.multinomial(F.softmax(logits[:, -1, :], dim=-1), num_samples=1)), dim=1)
        return idx

def get_lr(it):
    if it < args.warmup:
        return args.lr * (it + 1) / (args.warmup + 1)
    ratio = (it - args.warmup) / (args.iterations - args.warmup)
    return args.min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (args.lr - args.min_lr)

@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(2)
    for k in range(2):
        losses[k] = model(*get_batch())[1].item()
    model.train()
    return losses.mean()

model = GPT()
groups = [[p for p in model.parameters() if p.dim() >= 2], [p for p in model.parameters() if p.dim() < 2]]
optim_groups = [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(optim_groups, lr=args.lr, betas=(0.9, 0.95))
ema = {name: p.detach().clone() for name, p in model.named_parameters()}
""",
    """
for it in range(args.iterations):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(it)
    if it % 4 == 0:
        log.append(estimate_loss())
    for micro_step in range(args.accumulate):
        X, Y = get_batch()
        logits, loss = model(X, Y)
        loss = loss / args.accumulate
        loss.backward()
    log.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, p in model.named_parameters():
            ema[name].lerp_(p, 1 - args.decay)
    log.append(loss.item())
log.extend([*ema.values(), model.generate(tokens[None, :4], 5)])
""",
    """
# %%
%%tfgraph gpt
samples = tokens[:18].view(3, 6), tokens[1:19].view(3, 6)
pairs = [tuple(map(tfnb.placeholder, samples)) for _ in range(args.accumulate)]
for X, Y in pairs:
    logits, loss = model(X, Y)
    loss = loss / args.accumulate
    loss.backward()
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
step = optimizer.step()
optimizer.zero_grad(set_to_none=True)
# %%
for it in range(args.iterations):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(it)
    if it % 4 == 0:
        log.append(estimate_loss())
    feeds = {}
    for X, Y in pairs:
        feeds[X], feeds[Y] = get_batch()
    _, size, value = tfnb.run([step, norm, loss], feeds)
    log.append(size)
    with torch.no_grad():
        for name, p in model.named_parameters():
            ema[name].lerp_(p, 1 - args.decay)
    log.append(value.item())
log.extend([*ema.values(), model.generate(tokens[None, :4], 5)])
""",
)

SCRIPTS["a critic with a gradient penalty, and lists of losses"] = Script(
    """
args = Namespace(epochs=2, n_critic=2, latent=3, penalty=10.0)
loader = DataLoader(TensorDataset(torch.randn(26, 1, 4, 4)), batch_size=6)
netG = nn.Sequential(
    nn.ConvTranspose2d(args.latent, 4, 2), nn.BatchNorm2d(4), nn.ReLU(True), nn.ConvTranspose2d(4, 1, 3), nn.Tanh(),
)
netD = nn.Sequential(nn.Conv2d(1, 4, 3), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(4, 1, 2), nn.Flatten(0))

def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.2)
    elif classname.find("BatchNorm") != -1:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)

netG.apply(weights_init)
netD.apply(weights_init)
model = nn.ModuleList([netG, netD])
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.9))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.9))
fixed_noise = torch.randn(4, args.latent, 1, 1)

def gradient_penalty(real, fake, alpha):
    inter = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    gradients, = torch.autograd.grad(netD(inter), inter, torch.ones(real.size(0)), create_graph=True, retain_graph=True)
    return ((gradients.view(real.size(0), -1).norm(2, dim=1) - 1) ** 2).mean()
""",
    """
for epoch in range(args.epochs):
    for i, (real,) in enumerate(loader):
        noise, alpha = torch.randn(real.size(0), args.latent, 1, 1), torch.rand(real.size(0), 1, 1, 1)
        netD.zero_grad()
        fake = netG(noise)
        errD = netD(fake.detach()).mean() - netD(real).mean()
        loss_D = errD + args.penalty * gradient_penalty(real, fake.detach(), alpha)
        loss_D.backward()
        optimizerD.step()
        log.append(loss_D.item())
        if i % args.n_critic == 0:
            netG.zero_grad()
            loss_G = -netD(netG(noise)).mean()
            loss_G.backward()
            optimizerG.step()
            log.append(loss_G.item())
    with torch.no_grad():
        log.append(netG(fixed_noise))
""",
    """
# %%
%%tfgraph critic
real = tfnb.placeholder(next(iter(loader))[0])
noise, alpha = tfnb.placeholder(torch.zeros(6, args.latent, 1, 1)), tfnb.placeholder(torch.zeros(6, 1, 1, 1))
netD.zero_grad()
fake = netG(noise)
errD = netD(fake.detach()).mean() - netD(real).mean()
loss_D = errD + args.penalty * gradient_penalty(real, fake.detach(), alpha)
loss_D.backward()
step_D = optimizerD.step()
# %%
%%tfgraph critic
netG.zero_grad()
loss_G = -netD(netG(noise)).mean()
loss_G.backward()
step_G = optimizerG.step()
# %%
for epoch in range(args.epochs):
    for i, (images,) in enumerate(loader):
        draws = torch.randn(images.size(0), args.latent, 1, 1), torch.rand(images.size(0), 1, 1, 1)
        _, value = tfnb.run([step_D, loss_D], {real: images, noise: draws[0], alpha: draws[1]})
        log.append(value.item())
        if i % args.n_critic == 0:
            _, value = tfnb.run([step_G, loss_G], {noise: draws[0]})
            log.append(value.item())
    with torch.no_grad():
        log.append(netG(fixed_noise))
""",
)
