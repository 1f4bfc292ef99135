"""More training scripts in the structure of PyTorch's examples: images made and compared, graphs, sentences."""

from __future__ import annotations

from tests.models.script import Script

FURTHER: dict[str, Script] = {}

FURTHER["an autoencoder with drawn codes"] = Script(
    """
args = Namespace(epochs=3, batch_size=8, latent=3)
images = torch.rand(30, 1, 6, 6)
train_loader = DataLoader(TensorDataset(images[:21], torch.zeros(21)), args.batch_size)
test_loader = DataLoader(TensorDataset(images[21:], torch.zeros(9)), args.batch_size)

class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(36, 12), nn.Linear(12, args.latent), nn.Linear(12, args.latent)
        self.fc3, self.fc4 = nn.Linear(args.latent, 12), nn.Linear(12, 36)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar, eps):
        std = torch.exp(0.5 * logvar)
        return mu + eps * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x, eps):
        mu, logvar = self.encode(x.view(-1, 36))
        return self.decode(self.reparameterize(mu, logvar, eps)), mu, logvar

def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 36), reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD

def test(epoch):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for data, _ in test_loader:
            recon_batch, mu, logvar = model(data, torch.randn(len(data), args.latent))
            test_loss += loss_function(recon_batch, data, mu, logvar).item()
    log.append(test_loss / len(test_loader.dataset))

model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
""",
    """
def train(epoch):
    model.train()
    train_loss = 0
    for batch_idx, (data, _) in enumerate(train_loader):
        eps = torch.randn(len(data), args.latent)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data, eps)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        log.append(loss.item() / len(data))
    log.append(train_loss / len(train_loader.dataset))

for epoch in range(1, args.epochs + 1):
    train(epoch)
    test(epoch)
    with torch.no_grad():
        log.append(model.decode(torch.randn(4, args.latent)))
""",
    """
# %%
%%tfgraph vae
data, eps = tfnb.placeholder(images[:8]), tfnb.placeholder(torch.zeros(8, args.latent))
optimizer.zero_grad()
recon_batch, mu, logvar = model(data, eps)
loss = loss_function(recon_batch, data, mu, logvar)
loss.backward()
step = optimizer.step()
# %%
def train(epoch):
    model.train()
    train_loss = 0
    for batch_idx, (batch, _) in enumerate(train_loader):
        _, value = tfnb.run([step, loss], {data: batch, eps: torch.randn(len(batch), args.latent)})
        train_loss += value.item()
        log.append(value.item() / len(batch))
    log.append(train_loss / len(train_loader.dataset))

for epoch in range(1, args.epochs + 1):
    train(epoch)
    test(epoch)
    with torch.no_grad():
        log.append(model.decode(torch.randn(4, args.latent)))
""",
)

FURTHER["pairs of images through one net"] = Script(
    """
args = Namespace(epochs=3, batch_size=7, gamma=0.7)
labels = torch.arange(20) % 4
images = torch.randn(20, 1, 12, 12) + labels[:, None, None, None]

class Pairs(torch.utils.data.Dataset):
    def __init__(self, first, last):
        self.items = range(first, last)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        one = self.items[index]
        same = index % 2 == 0
        other = random.choice([i for i in self.items if (labels[i] == labels[one]) == same])
        return images[one], images[other], torch.tensor(float(same))

class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(4, 6, 3), nn.AdaptiveAvgPool2d(1),
        )
        self.fc = nn.Sequential(nn.Linear(12, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
        self.sigmoid = nn.Sigmoid()
        self.trunk.apply(self.init_weights)
        self.fc.apply(self.init_weights)

    def init_weights(self, m):
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward_once(self, x):
        output = self.trunk(x)
        return output.view(output.size()[0], -1)

    def forward(self, input1, input2):
        output = torch.cat((self.forward_once(input1), self.forward_once(input2)), 1)
        return self.sigmoid(self.fc(output))

def test(model, loader):
    model.eval()
    test_loss = correct = 0
    with torch.no_grad():
        for images_1, images_2, targets in loader:
            outputs = model(images_1, images_2).squeeze()
            test_loss += criterion(outputs, targets).sum().item()
            pred = torch.where(outputs > 0.5, 1, 0)
            correct += pred.eq(targets.view_as(pred)).sum().item()
    log.extend([test_loss / len(loader.dataset), correct])

train_loader, test_loader = DataLoader(Pairs(0, 16), args.batch_size), DataLoader(Pairs(16, 20), 4)
model, criterion = SiameseNetwork(), nn.BCELoss()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
""",
    """
def train(model, loader, optimizer, epoch):
    model.train()
    for batch_idx, (images_1, images_2, targets) in enumerate(loader):
        optimizer.zero_grad()
        outputs = model(images_1, images_2).squeeze()
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        log.append(loss.item())

for epoch in range(1, args.epochs + 1):
    train(model, train_loader, optimizer, epoch)
    test(model, test_loader)
    scheduler.step()
""",
    """
# %%
%%tfgraph siamese
images_1, images_2 = tfnb.placeholder(images[:7]), tfnb.placeholder(images[7:14])
targets = tfnb.placeholder(torch.zeros(7))
optimizer.zero_grad()
outputs = model(images_1, images_2).squeeze()
loss = criterion(outputs, targets)
loss.backward()
step = optimizer.step()
# %%
def train(model, loader, optimizer, epoch):
    model.train()
    for batch_idx, batch in enumerate(loader):
        _, value = tfnb.run([step, loss], dict(zip((images_1, images_2, targets), batch)))
        log.append(value.item())

for epoch in range(1, args.epochs + 1):
    train(model, train_loader, optimizer, epoch)
    test(model, test_loader)
    scheduler.step()
""",
)

FURTHER["larger images from small ones"] = Script(
    """
opt = Namespace(upscale_factor=2, batchSize=4, nEpochs=3)
pictures = torch.rand(14, 1, 12, 12)

class Shrunk(torch.utils.data.Dataset):
    def __init__(self, pictures):
        self.pictures = pictures

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        target = self.pictures[index]
        return F.avg_pool2d(target, opt.upscale_factor), target

class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, (5, 5), (1, 1), (2, 2)), nn.Conv2d(8, 8, (3, 3), (1, 1), (1, 1))
        self.conv3 = nn.Conv2d(8, upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        self._initialize_weights()

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        return self.pixel_shuffle(self.conv3(x))

    def _initialize_weights(self):
        nn.init.orthogonal_(self.conv1.weight, nn.init.calculate_gain("relu"))
        nn.init.orthogonal_(self.conv2.weight, nn.init.calculate_gain("relu"))
        nn.init.orthogonal_(self.conv3.weight)

def test():
    avg_psnr = 0
    with torch.no_grad():
        for batch in testing_data_loader:
            input, target = batch[0], batch[1]
            mse = criterion(model(input), target)
            avg_psnr += 10 * math.log10(1 / mse.item())
    log.append(avg_psnr / len(testing_data_loader))

def checkpoint(epoch):
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    log.append(torch.load(io.BytesIO(saved.getvalue()))["conv3.bias"])

training_data_loader = DataLoader(Shrunk(pictures[:10]), opt.batchSize)
testing_data_loader = DataLoader(Shrunk(pictures[10:]), 2)
model, criterion = Net(opt.upscale_factor), nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
""",
    """
def train(epoch):
    epoch_loss = 0
    for iteration, batch in enumerate(training_data_loader, 1):
        input, target = batch[0], batch[1]
        optimizer.zero_grad()
        loss = criterion(model(input), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
        log.append(loss.item())
    log.append(epoch_loss / len(training_data_loader))

for epoch in range(1, opt.nEpochs + 1):
    train(epoch)
    test()
    checkpoint(epoch)
""",
    """
# %%
%%tfgraph shuffle
input, target = map(tfnb.placeholder, next(iter(training_data_loader)))
optimizer.zero_grad()
loss = criterion(model(input), target)
loss.backward()
step = optimizer.step()
# %%
def train(epoch):
    epoch_loss = 0
    for iteration, batch in enumerate(training_data_loader, 1):
        _, value = tfnb.run([step, loss], {input: batch[0], target: batch[1]})
        epoch_loss += value.item()
        log.append(value.item())
    log.append(epoch_loss / len(training_data_loader))

for epoch in range(1, opt.nEpochs + 1):
    train(epoch)
    test()
    checkpoint(epoch)
""",
)

FURTHER["a polynomial, until the loss is small"] = Script(
    """
from itertools import count
POLY_DEGREE = 4
W_target, b_target = torch.randn(POLY_DEGREE, 1) * 5, torch.randn(1) * 5

def make_features(x):
    x = x.unsqueeze(1)
    return torch.cat([x**i for i in range(1, POLY_DEGREE + 1)], 1)

def f(x):
    return x.mm(W_target) + b_target.item()

def get_batch(batch_size=32):
    random = torch.randn(batch_size)
    x = make_features(random)
    return x, f(x)

model = fc = nn.Linear(W_target.size(0), 1)
""",
    """
for batch_idx in count(1):
    batch_x, batch_y = get_batch()
    fc.zero_grad()
    output = F.smooth_l1_loss(fc(batch_x), batch_y)
    loss = output.item()
    output.backward()
    for param in fc.parameters():
        param.data.add_(-0.1 * param.grad)
    log.append(loss)
    if loss < 4.5 or batch_idx == 60:
        break
""",
    """
# %%
%%tfgraph polynomial
batch_x, batch_y = map(tfnb.placeholder, (torch.zeros(32, POLY_DEGREE), torch.zeros(32, 1)))
fc.zero_grad()
output = F.smooth_l1_loss(fc(batch_x), batch_y)
output.backward()
for param in fc.parameters():
    param.data.add_(-0.1 * param.grad)
step = tfnb.effects()
# %%
for batch_idx in count(1):
    x, y = get_batch()
    loss = tfnb.run([output, step], {batch_x: x, batch_y: y})[0].item()
    log.append(loss)
    if loss < 4.5 or batch_idx == 60:
        break
""",
)

FURTHER["convolutions over a graph"] = Script(
    """
features, labels = torch.randn(12, 5), torch.randint(3, (12,))
edges = torch.randint(12, (2, 30))
idx = torch.randperm(12)
idx_train, idx_val, idx_test = idx[:6], idx[6:9], idx[9:]

def normalized(edges):
    adj = torch.zeros(12, 12)
    adj[edges[0], edges[1]] = 1.0
    adj = (adj + adj.t() + torch.eye(12)).clamp(max=1.0)
    degrees = adj.sum(dim=1).pow(-0.5)
    return degrees[:, None] * adj * degrees

class GraphConv(nn.Module):
    def __init__(self, input_dim, output_dim, use_bias=False):
        super().__init__()
        self.kernel = nn.Parameter(torch.Tensor(input_dim, output_dim).double())
        nn.init.xavier_normal_(self.kernel)
        self.bias = nn.Parameter(torch.zeros(output_dim)) if use_bias else None

    def forward(self, input_tensor, adj_mat):
        output = torch.mm(adj_mat, torch.mm(input_tensor, self.kernel))
        if self.bias is not None:
            output = output + self.bias
        return output

class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2 = GraphConv(5, 8, use_bias=True), GraphConv(8, 3, use_bias=True)
        self.dropout = nn.Dropout(0.0)

    def forward(self, input_tensor, adj_mat):
        x = self.dropout(F.relu(self.gc1(input_tensor, adj_mat)))
        return F.log_softmax(self.gc2(x, adj_mat), dim=1)

def test(idx):
    model.eval()
    with torch.no_grad():
        output = model(features, adj_mat)
        loss, acc = criterion(output[idx], labels[idx]), output[idx].argmax(dim=1).eq(labels[idx]).sum()
        log.extend([loss.item(), acc.item()])

adj_mat = normalized(edges)
model, criterion = GCN(), nn.NLLLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=5e-4)
""",
    """
def train_iter(epoch):
    model.train()
    optimizer.zero_grad()
    output = model(features, adj_mat)
    loss = criterion(output[idx_train], labels[idx_train])
    loss.backward()
    optimizer.step()
    test(idx_train)
    test(idx_val)
    log.append(loss.item())

for epoch in range(15):
    train_iter(epoch + 1)
test(idx_test)
""",
    """
# %%
%%tfgraph gcn
optimizer.zero_grad()
output = model(features, adj_mat)
loss = criterion(output[idx_train], labels[idx_train])
loss.backward()
step = optimizer.step()
# %%
def train_iter(epoch):
    model.train()
    _, value = tfnb.run([step, loss])
    test(idx_train)
    test(idx_val)
    log.append(value.item())

for epoch in range(15):
    train_iter(epoch + 1)
test(idx_test)
""",
)

FURTHER["digits row by row, through an LSTM"] = Script(
    """
args = Namespace(epochs=3, batch_size=6, gamma=0.7, log_interval=2)
images, labels = torch.randn(27, 1, 8, 8), torch.randint(10, (27,))
train_loader = DataLoader(TensorDataset(images[:20], labels[:20]), args.batch_size)
test_loader = DataLoader(TensorDataset(images[20:], labels[20:]), 4)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.batchnorm = nn.LSTM(input_size=8, hidden_size=8, batch_first=True), nn.BatchNorm1d(8)
        self.dropout1, self.dropout2 = nn.Dropout(0.0), nn.Dropout(0.0)
        self.fc1, self.fc2 = nn.Linear(8, 6), nn.Linear(6, 10)

    def forward(self, input):
        input = input.reshape(-1, 8, 8)
        output, hidden = self.rnn(input)
        output = output[:, -1, :]
        output = self.batchnorm(output)
        output = self.dropout1(output)
        output = self.fc1(output)
        output = F.relu(output)
        output = self.dropout2(output)
        output = self.fc2(output)
        return F.log_softmax(output, dim=1)

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
optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
""",
    """
def train(args, model, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
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
%%tfgraph rows
data, target = tfnb.placeholder(images[:6]), tfnb.placeholder(labels[:6])
optimizer.zero_grad()
output = model(data)
loss = F.nll_loss(output, target)
loss.backward()
step = optimizer.step()
# %%
def train(args, model, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, batch in enumerate(train_loader):
        _, value = tfnb.run([step, loss], {data: batch[0], target: batch[1]})
        if batch_idx % args.log_interval == 0:
            log.append(value.item())

for epoch in range(1, args.epochs + 1):
    train(args, model, train_loader, optimizer, epoch)
    test(model, test_loader)
    scheduler.step()
""",
)

FURTHER["two players, real and made images apart"] = Script(
    """
opt = Namespace(niter=2, batchSize=6, nz=3, lr=2e-3, beta1=0.5)
dataloader = DataLoader(TensorDataset(torch.randn(20, 1, 4, 4), torch.zeros(20)), opt.batchSize)
real_label, fake_label = 1.0, 0.0

def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.2)
    elif classname.find("BatchNorm") != -1:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)

netG = nn.Sequential(
    nn.ConvTranspose2d(opt.nz, 4, 2, 1, 0, bias=False), nn.BatchNorm2d(4), nn.ReLU(True),
    nn.ConvTranspose2d(4, 1, 3, bias=False), nn.Tanh(),
)
netD = nn.Sequential(
    nn.Conv2d(1, 4, 2, 2, bias=False), nn.BatchNorm2d(4), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(4, 1, 2, bias=False), nn.Sigmoid(), nn.Flatten(0),
)
netG.apply(weights_init)
netD.apply(weights_init)
model, criterion = nn.ModuleList([netG, netD]), nn.BCELoss()
fixed_noise = torch.randn(4, opt.nz, 1, 1)
optimizerD = torch.optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
""",
    """
for epoch in range(opt.niter):
    for i, data in enumerate(dataloader, 0):
        real = data[0]
        noise = torch.randn(real.size(0), opt.nz, 1, 1)
        netD.zero_grad()
        batch_size = real.size(0)
        label = torch.full((batch_size,), real_label, dtype=real.dtype)
        output = netD(real)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean().item()
        fake = netG(noise)
        label.fill_(fake_label)
        output = netD(fake.detach())
        errD_fake = criterion(output, label)
        errD_fake.backward()
        D_G_z1 = output.mean().item()
        errD = errD_real + errD_fake
        optimizerD.step()
        netG.zero_grad()
        label.fill_(real_label)
        output = netD(fake)
        errG = criterion(output, label)
        errG.backward()
        D_G_z2 = output.mean().item()
        optimizerG.step()
        log.extend([errD.item(), errG.item(), D_x, D_G_z1, D_G_z2])
    with torch.no_grad():
        log.append(netG(fixed_noise))
""",
    """
# %%
%%tfgraph players
real = tfnb.placeholder(next(iter(dataloader))[0])
noise = tfnb.placeholder(torch.zeros(6, opt.nz, 1, 1))
netD.zero_grad()
batch_size = real.size(0)
label = torch.full((batch_size,), real_label, dtype=real.dtype)
output = netD(real)
errD_real = criterion(output, label)
errD_real.backward()
D_x = output.mean().item()
fake = netG(noise)
label.fill_(fake_label)
output = netD(fake.detach())
errD_fake = criterion(output, label)
errD_fake.backward()
D_G_z1 = output.mean().item()
errD = errD_real + errD_fake
step_D = optimizerD.step()
netG.zero_grad()
label.fill_(real_label)
output = netD(fake)
errG = criterion(output, label)
errG.backward()
D_G_z2 = output.mean().item()
step_G = optimizerG.step()
# %%
for epoch in range(opt.niter):
    for i, data in enumerate(dataloader, 0):
        feeds = {real: data[0], noise: torch.randn(len(data[0]), opt.nz, 1, 1)}
        values = tfnb.run([errD, errG, D_x, D_G_z1, D_G_z2, step_D, step_G], feeds)
        log.extend(values[:5])
    with torch.no_grad():
        log.append(netG(fixed_noise))
""",
)

FURTHER["patches of images, by attention"] = Script(
    """
args = Namespace(patch_size=2, latent_size=8, num_heads=2, num_encoders=2, num_classes=5, epochs=2, batch_size=5)
images, labels = torch.randn(24, 3, 6, 6), torch.randint(5, (24,))
trainloader = DataLoader(TensorDataset(images[:17], labels[:17]), args.batch_size)
testloader = DataLoader(TensorDataset(images[17:], labels[17:]), args.batch_size)

class InputEmbedding(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.patch_size, self.input_size = args.patch_size, args.patch_size**2 * 3
        self.linearProjection = nn.Linear(self.input_size, args.latent_size)
        self.class_token = nn.Parameter(torch.randn(1, 1, args.latent_size))
        self.pos_embedding = nn.Parameter(torch.randn(1, 1, args.latent_size))

    def forward(self, input_data):
        b, c, h, w = input_data.shape
        p = self.patch_size
        patches = input_data.unfold(2, p, p).unfold(3, p, p).permute(0, 2, 3, 4, 5, 1)
        projected = self.linearProjection(patches.reshape(b, (h // p) * (w // p), p * p * c))
        class_token = self.class_token.expand(b, -1, -1)
        linear_projection = torch.cat((class_token, projected), dim=1)
        return linear_projection + self.pos_embedding.repeat(b, linear_projection.size(1), 1)

class EncoderBlock(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.norm = nn.LayerNorm(args.latent_size)
        self.attention = nn.MultiheadAttention(args.latent_size, args.num_heads, dropout=0.0, batch_first=True)
        self.enc_MLP = nn.Sequential(
            nn.Linear(args.latent_size, args.latent_size * 4), nn.GELU(), nn.Dropout(0.0),
            nn.Linear(args.latent_size * 4, args.latent_size), nn.Dropout(0.0),
        )

    def forward(self, emb_patches):
        first_norm = self.norm(emb_patches)
        attention_out = self.attention(first_norm, first_norm, first_norm)[0]
        first_added = attention_out + emb_patches
        return self.enc_MLP(self.norm(first_added)) + first_added

class ViT(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embedding = InputEmbedding(args)
        self.encoders = nn.ModuleList([EncoderBlock(args) for _ in range(args.num_encoders)])
        self.MLPHead = nn.Sequential(nn.LayerNorm(args.latent_size), nn.Linear(args.latent_size, args.num_classes))

    def forward(self, test_input):
        enc_output = self.embedding(test_input)
        for enc_layer in self.encoders:
            enc_output = enc_layer(enc_output)
        return self.MLPHead(enc_output[:, 0])

def evaluate():
    model.eval()
    with torch.no_grad():
        losses, correct = [], 0
        for inputs, targets in testloader:
            outputs = model(inputs)
            losses.append(criterion(outputs, targets).item())
            correct += (outputs.argmax(1) == targets).sum().item()
    log.extend([sum(losses) / len(losses), correct])

model, criterion = ViT(args), nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
""",
    """
for epoch in range(args.epochs):
    model.train()
    running_loss, correct = 0.0, 0
    for inputs, targets in trainloader:
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
        correct += (outputs.argmax(1) == targets).sum().item()
        log.append(loss.item())
    log.extend([running_loss, correct])
    evaluate()
""",
    """
# %%
%%tfgraph patches
inputs, targets = tfnb.placeholder(images[:5]), tfnb.placeholder(labels[:5])
optimizer.zero_grad()
outputs = model(inputs)
loss = criterion(outputs, targets)
loss.backward()
step = optimizer.step()
# %%
for epoch in range(args.epochs):
    model.train()
    running_loss, correct = 0.0, 0
    for batch in trainloader:
        _, value, found = tfnb.run([step, loss, outputs], {inputs: batch[0], targets: batch[1]})
        running_loss += value.item()
        correct += (found.argmax(1) == batch[1]).sum().item()
        log.append(value.item())
    log.extend([running_loss, correct])
    evaluate()
""",
)

FURTHER["two sentences and what follows"] = Script(
    """
args = Namespace(epochs=2, d_embed=5, d_proj=4, d_hidden=6, n_layers=2, dp=0.0, log_every=2, dev_every=3)

class Batch:
    def __init__(self, size, first, second):
        self.batch_size = size
        self.premise, self.hypothesis = torch.randint(1, 12, (first, size)), torch.randint(1, 12, (second, size))
        self.label = torch.randint(3, (size,))

train_iter = [Batch(*sizes) for sizes in ((4, 5, 3), (4, 6, 4), (3, 4, 7), (4, 8, 3))]
dev_iter = [Batch(5, 4, 3), Batch(2, 6, 5)]

class Encoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.rnn = nn.LSTM(config.d_proj, config.d_hidden, config.n_layers, dropout=config.dp, bidirectional=True)

    def forward(self, inputs):
        batch_size = inputs.size()[1]
        state_shape = self.config.n_layers * 2, batch_size, self.config.d_hidden
        h0 = c0 = inputs.new_zeros(state_shape)
        outputs, (ht, ct) = self.rnn(inputs, (h0, c0))
        return ht[-2:].transpose(0, 1).contiguous().view(batch_size, -1)

class SNLIClassifier(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed, self.projection = nn.Embedding(12, config.d_embed), nn.Linear(config.d_embed, config.d_proj)
        self.encoder, self.relu = Encoder(config), nn.ReLU()
        width = 4 * config.d_hidden
        self.out = nn.Sequential(nn.Linear(width, width), self.relu, nn.Dropout(config.dp), nn.Linear(width, 3))

    def forward(self, batch):
        prem_embed, hypo_embed = self.embed(batch.premise), self.embed(batch.hypothesis)
        prem_embed, hypo_embed = prem_embed.detach(), hypo_embed.detach()
        prem_embed, hypo_embed = self.relu(self.projection(prem_embed)), self.relu(self.projection(hypo_embed))
        return self.out(torch.cat([self.encoder(prem_embed), self.encoder(hypo_embed)], 1))

def validate():
    model.eval()
    n_dev_correct, dev_loss = 0, 0
    with torch.no_grad():
        for dev_batch in dev_iter:
            answer = model(dev_batch)
            n_dev_correct += (torch.max(answer, 1)[1].view(dev_batch.label.size()) == dev_batch.label).sum().item()
            dev_loss = criterion(answer, dev_batch.label)
    log.extend([n_dev_correct, dev_loss.item()])

model, criterion = SNLIClassifier(args), nn.CrossEntropyLoss()
opt = torch.optim.Adam(model.parameters(), lr=0.01)
iterations = 0
""",
    """
for epoch in range(args.epochs):
    n_correct, n_total = 0, 0
    for batch_idx, batch in enumerate(train_iter):
        model.train()
        opt.zero_grad()
        iterations += 1
        answer = model(batch)
        n_correct += (torch.max(answer, 1)[1].view(batch.label.size()) == batch.label).sum().item()
        n_total += batch.batch_size
        loss = criterion(answer, batch.label)
        loss.backward()
        opt.step()
        if iterations % args.dev_every == 0:
            validate()
        if iterations % args.log_every == 0:
            log.extend([loss.item(), 100.0 * n_correct / n_total])
""",
    """
# %%
%%tfgraph sentences
batch = Batch(4, 5, 3)
batch.premise = tfnb.placeholder(batch.premise, shape=("P", "B"))
batch.hypothesis = tfnb.placeholder(batch.hypothesis, shape=("H", "B"))
batch.label = tfnb.placeholder(batch.label, shape=("B",))
opt.zero_grad()
answer = model(batch)
right = (torch.max(answer, 1)[1].view(batch.label.size()) == batch.label).sum().item()
loss = criterion(answer, batch.label)
loss.backward()
step = opt.step()
# %%
for epoch in range(args.epochs):
    n_correct, n_total = 0, 0
    for batch_idx, found in enumerate(train_iter):
        model.train()
        iterations += 1
        feeds = {getattr(batch, name): getattr(found, name) for name in ("premise", "hypothesis", "label")}
        _, value, more = tfnb.run([step, loss, right], feeds)
        n_correct += more.item()
        n_total += found.batch_size
        if iterations % args.dev_every == 0:
            validate()
        if iterations % args.log_every == 0:
            log.extend([value.item(), 100.0 * n_correct / n_total])
""",
)

FURTHER["the style of a picture"] = Script(
    """
args = Namespace(epochs=2, batch_size=3, content_weight=10.0, style_weight=100.0)
train_loader = DataLoader(TensorDataset(torch.rand(8, 3, 12, 12) * 255, torch.zeros(8)), args.batch_size)
style = torch.rand(3, 12, 12) * 255

class ConvLayer(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, upsample=None):
        super().__init__()
        self.upsample = upsample
        self.reflection_pad = nn.ReflectionPad2d(kernel_size // 2)
        self.conv2d = nn.Conv2d(in_channels, out_channels, kernel_size, stride)

    def forward(self, x):
        x_in = x
        if self.upsample:
            x_in = F.interpolate(x_in, mode="nearest", scale_factor=self.upsample)
        return self.conv2d(self.reflection_pad(x_in))

class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.in1 = ConvLayer(channels, channels, 3, 1), nn.InstanceNorm2d(channels, affine=True)
        self.conv2, self.in2 = ConvLayer(channels, channels, 3, 1), nn.InstanceNorm2d(channels, affine=True)
        self.relu = nn.ReLU()

    def forward(self, x):
        out = self.in2(self.conv2(self.relu(self.in1(self.conv1(x)))))
        return out + x

class TransformerNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.in1 = ConvLayer(3, 4, 3, 2), nn.InstanceNorm2d(4, affine=True)
        self.res1, self.relu, self.deconv = ResidualBlock(4), nn.ReLU(), ConvLayer(4, 3, 3, 1, upsample=2)

    def forward(self, X):
        return self.deconv(self.res1(self.relu(self.in1(self.conv1(X)))))

class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.slice1 = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.slice2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 5, 3, padding=1), nn.ReLU())
        for param in self.parameters():
            param.requires_grad = False

    def forward(self, X):
        h1 = self.slice1(X)
        return namedtuple("Outputs", ["relu1", "relu2"])(h1, self.slice2(h1))

def gram_matrix(y):
    (b, ch, h, w) = y.size()
    features = y.view(b, ch, w * h)
    features_t = features.transpose(1, 2)
    return features.bmm(features_t) / (ch * h * w)

def normalize_batch(batch):
    mean = batch.new_tensor([0.485, 0.456, 0.406]).view(-1, 1, 1)
    std = batch.new_tensor([0.229, 0.224, 0.225]).view(-1, 1, 1)
    batch = batch.div_(255.0)
    return (batch - mean) / std

from collections import namedtuple
model, vgg, mse_loss = TransformerNet(), Features(), nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
gram_style = [gram_matrix(y) for y in vgg(normalize_batch(style.repeat(args.batch_size, 1, 1, 1)))]
""",
    """
for e in range(args.epochs):
    model.train()
    agg_content_loss = agg_style_loss = 0.0
    count = 0
    for batch_id, (x, _) in enumerate(train_loader):
        n_batch = len(x)
        count += n_batch
        optimizer.zero_grad()
        y = model(x)
        y = normalize_batch(y)
        x = normalize_batch(x)
        features_y = vgg(y)
        features_x = vgg(x)
        content_loss = args.content_weight * mse_loss(features_y.relu2, features_x.relu2)
        style_loss = 0.0
        for ft_y, gm_s in zip(features_y, gram_style):
            gm_y = gram_matrix(ft_y)
            style_loss += mse_loss(gm_y, gm_s[:n_batch, :, :])
        style_loss *= args.style_weight
        total_loss = content_loss + style_loss
        total_loss.backward()
        optimizer.step()
        agg_content_loss += content_loss.item()
        agg_style_loss += style_loss.item()
    log.extend([agg_content_loss / count, agg_style_loss / count])
""",
    """
# %%
%%tfgraph style
x = tfnb.placeholder(next(iter(train_loader))[0])
n_batch = len(x)
optimizer.zero_grad()
y = model(x)
y = normalize_batch(y)
x = normalize_batch(x)
features_y = vgg(y)
features_x = vgg(x)
content_loss = args.content_weight * mse_loss(features_y.relu2, features_x.relu2)
style_loss = 0.0
for ft_y, gm_s in zip(features_y, gram_style):
    gm_y = gram_matrix(ft_y)
    style_loss += mse_loss(gm_y, gm_s[:n_batch, :, :])
style_loss *= args.style_weight
total_loss = content_loss + style_loss
total_loss.backward()
step = optimizer.step()
# %%
for e in range(args.epochs):
    model.train()
    agg_content_loss = agg_style_loss = 0.0
    count = 0
    for batch_id, (images, _) in enumerate(train_loader):
        count += len(images)
        _, content, styled = tfnb.run([step, content_loss, style_loss], {x: images})
        agg_content_loss += content.item()
        agg_style_loss += styled.item()
    log.extend([agg_content_loss / count, agg_style_loss / count])
""",
)

FURTHER["translation by a transformer with masks"] = Script(
    """
args = Namespace(epochs=2, d=8, heads=2, pad=1, bos=2, eos=3)

def sentences(length, size):
    words = torch.randint(4, 11, (length, size))
    words[0], words[-1], words[-2, 0] = args.bos, args.eos, args.eos
    words[-1, 0] = args.pad
    return words

train_data = [(sentences(a, n), sentences(b, n)) for a, b, n in ((5, 6, 3), (7, 4, 3), (4, 5, 2), (6, 6, 3))]

class PositionalEncoding(nn.Module):
    def __init__(self, emb_size, maxlen=12):
        super().__init__()
        den = torch.exp(-torch.arange(0, emb_size, 2) * math.log(10000) / emb_size)
        pos = torch.arange(0, maxlen).reshape(maxlen, 1)
        pos_embedding = torch.zeros((maxlen, emb_size))
        pos_embedding[:, 0::2], pos_embedding[:, 1::2] = torch.sin(pos * den), torch.cos(pos * den)
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("pos_embedding", pos_embedding.unsqueeze(-2))

    def forward(self, token_embedding):
        return self.dropout(token_embedding + self.pos_embedding[: token_embedding.size(0), :])

class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(args.d, args.heads, 16, dropout=0.0)
        encoder = nn.TransformerEncoder(layer, 1, nn.LayerNorm(args.d), enable_nested_tensor=False)
        self.transformer = nn.Transformer(args.d, args.heads, 1, 1, 16, dropout=0.0, custom_encoder=encoder)
        self.generator = nn.Linear(args.d, 11)
        self.src_embedding, self.tgt_embedding = nn.Embedding(11, args.d), nn.Embedding(11, args.d)
        self.pos_enc = PositionalEncoding(args.d)

    def forward(self, src, trg, src_mask, tgt_mask, src_padding, tgt_padding, memory_padding):
        src_emb = self.pos_enc(self.src_embedding(src) * math.sqrt(args.d))
        tgt_emb = self.pos_enc(self.tgt_embedding(trg) * math.sqrt(args.d))
        outs = self.transformer(
            src_emb, tgt_emb, src_mask, tgt_mask, None, src_padding, tgt_padding, memory_padding
        )
        return self.generator(outs)

def generate_square_subsequent_mask(size):
    mask = (torch.triu(torch.ones((size, size))) == 1).transpose(0, 1)
    return mask.double().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)

def create_mask(src, tgt):
    tgt_mask = generate_square_subsequent_mask(tgt.shape[0])
    src_mask = torch.zeros((src.shape[0], src.shape[0]))
    pads = [torch.zeros(w.shape).masked_fill(w == args.pad, float("-inf")).transpose(0, 1) for w in (src, tgt)]
    return src_mask, tgt_mask, *pads

model, criterion = Translator(), nn.CrossEntropyLoss(ignore_index=args.pad)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.98), eps=1e-9)
""",
    """
def train():
    model.train()
    losses = 0
    for src, tgt in train_data:
        tgt_input = tgt[:-1, :]
        src_mask, tgt_mask, src_padding, tgt_padding = create_mask(src, tgt_input)
        logits = model(src, tgt_input, src_mask, tgt_mask, src_padding, tgt_padding, src_padding)
        optimizer.zero_grad()
        tgt_out = tgt[1:, :]
        loss = criterion(logits.reshape(-1, logits.shape[-1]), tgt_out.reshape(-1))
        loss.backward()
        optimizer.step()
        losses += loss.item()
    log.append(losses / len(train_data))

for epoch in range(1, args.epochs + 1):
    train()
""",
    """
# %%
%%tfgraph translator
src = tfnb.placeholder(train_data[0][0], shape=("S", "B"))
tgt = tfnb.placeholder(train_data[0][1], shape=("T", "B"))
tgt_input = tgt[:-1, :]
src_mask, tgt_mask, src_padding, tgt_padding = create_mask(src, tgt_input)
logits = model(src, tgt_input, src_mask, tgt_mask, src_padding, tgt_padding, src_padding)
optimizer.zero_grad()
tgt_out = tgt[1:, :]
loss = criterion(logits.reshape(-1, logits.shape[-1]), tgt_out.reshape(-1))
loss.backward()
step = optimizer.step()
# %%
def train():
    model.train()
    losses = 0
    for pair in train_data:
        losses += tfnb.run([loss, step], {src: pair[0], tgt: pair[1]})[0].item()
    log.append(losses / len(train_data))

for epoch in range(1, args.epochs + 1):
    train()
""",
)
