"""Cells with control flow, as people write them: each reads ``x`` (and ``n``) and leaves ``out``.

After the name, ``staged`` if a run decides all of it, or ``python`` if some statement stays Python, with a note.
"""

from __future__ import annotations

CELLS = """
# if: staged
if x.sum() > 0:
    out = x * 2
else:
    out = x - 1

# if without else: staged
out = x
if x.mean() > 0:
    out = out + 1

# elif: staged
if x.sum() > 5:
    out = x / 2
elif x.sum() > 0:
    out = x * 3
elif x.sum() > -5:
    out = -x
else:
    out = torch.zeros_like(x)

# nested if: staged
out = x.sum()
if x.max() > 1:
    if x.min() < -1:
        out = out * 2
    else:
        out = out * 3
else:
    out = out - 1

# if in if after if: staged
a = x.sum()
b = x.mean()
if a > 0:
    a = a + b
    if a > b:
        b = a * 2
if b > 1:
    a = -b
out = a, b

# several names: staged
if x.sum() > 0:
    a, b = x, -x
    c = 3
else:
    b, a = x * 2, x * 3
    c = 4
out = a, b, c

# swap: staged
a, b = x.min(), x.max()
if a + b > 0:
    a, b = b, a
out = a, b

# a number from both sides: staged
if x.sum() > 0:
    k = 1
else:
    k = 2.5
out = x * k

# a flag: staged
big = False
if x.max() > 1:
    big = True
out = x if not big else x / 2

# a flag in a loop: staged
found = False
for row in x:
    if row.sum() > 2:
        found = True
out = torch.zeros(()) + found

# while: staged
y = x
while y.abs().sum() > 1:
    y = y / 2
out = y

# while with a counter: staged
y, count = x, 0
while y.norm() > 1:
    y = y / 2
    count += 1
out = y, count

# while with and: staged
count, s = 0, x.sum()
while s < 20 and count < 6:
    s = s + 3
    count += 1
out = s, count

# while with or and not: staged
count, s = 0, x.sum()
while not (s > 20 or count >= 6):
    s = s + 3
    count += 1
out = s, count

# while true: staged
y = x
while True:
    y = y / 2
    if y.abs().max() < 0.5:
        break
out = y

# while with break and continue: staged
i, s = 0, x.sum()
while i < 10:
    i += 1
    if i % 2 == 0:
        continue
    s = s + i
    if s > 12:
        break
out = s, i

# nested while: staged
a, total = x.sum().abs(), 0
while a > 1:
    b = a
    while b > 1:
        b = b / 2
        total += 1
    a = a / 3
out = total

# newton: staged
t = x.abs().sum() + 1
guess = t
while (guess * guess - t).abs() > 1e-3:
    guess = (guess + t / guess) / 2
out = guess

# a sum that starts as a number: staged
total = 0
y = x.sum().abs()
while y > 0.5:
    total = total + y
    y = y / 2
out = total

# rows: staged
s = torch.zeros(3)
for row in x:
    s = s + row.relu()
out = s

# rows with a condition: staged
s = torch.zeros(())
for row in x:
    if row.sum() > 0:
        s = s + row.sum()
    else:
        s = s - 1
out = s

# rows with continue: staged
s = torch.zeros(())
for row in x:
    if row.sum() < 0:
        continue
    s = s + row.max()
out = s

# rows with break: staged
s = torch.zeros(())
for row in x:
    if row.max() > 1:
        break
    s = s + row.sum()
out = s

# rows counted: staged
k = 0
for row in x:
    if row.mean() > 0:
        k += 1
out = k

# enumerate: staged
s = torch.zeros(3)
for i, row in enumerate(x):
    s = s + row * i
out = s

# enumerate from one: staged
s = torch.zeros(3)
for i, row in enumerate(x, 1):
    s = s + row / i
out = s

# zip: staged
s = torch.zeros(())
for a, b in zip(x, x * 2):
    s = s + (a * b).sum()
out = s

# rows of rows: staged
s = torch.zeros(())
for row in x:
    for v in row:
        if v > 0:
            s = s + v
out = s

# range of a size: staged
s = torch.zeros(())
for i in range(x.shape[0]):
    s = s + x[i].sum() * i
out = s

# range of len: staged
s = torch.zeros(())
for i in range(len(x)):
    s = s + x[i].max()
out = s

# range of a tensor: staged
s = x.sum()
for i in range(n):
    s = s * 0.5 + i
out = s

# range with start and step: staged
s = torch.zeros(())
for i in range(1, n, 2):
    s = s + i
out = s

# range backwards: staged
s = torch.zeros(())
for i in range(n, 0, -1):
    s = s * 2 + i
out = s

# range that ends early: staged
s = x.sum()
for i in range(n):
    if s > 4:
        break
    s = s + i
out = s

# nested ranges: staged
s = torch.zeros(())
for i in range(n):
    for j in range(i):
        if (i + j) % 3 == 0:
            continue
        s = s + i * j
out = s

# a python range: staged
s = x.sum()
for i in range(4):
    if s > 3:
        s = s - i
    else:
        s = s + i
out = s

# a python range left early: staged
s = x.sum()
for i in range(5):
    if s > 3:
        break
    s = s + 1
out = s, i

# a list: staged
out = x
for scale in [1.0, 2.0, 0.5]:
    if out.sum() > 0:
        out = out * scale
    else:
        out = out + scale

# a conditional expression: staged
out = x * 2 if x.sum() > 0 else -x

# nested conditional expressions: staged
out = x if x.sum() > 3 else (x * 2 if x.sum() > 0 else x * 3)

# and, or, not: staged
a, b = x.sum() > 0, x.max() > 1
out = (a and b), (a or b), not a, (not a and not b)

# and that protects: staged
i = torch.zeros((), dtype=torch.long)
while i < x.shape[0] and x[i].sum() < 1:
    i = i + 1
out = i

# a chain: staged
out = 1 if -1 < x.mean() < 1 else 0

# early return: staged
def sign(v):
    if v > 0:
        return 1.0
    if v < 0:
        return -1.0
    return 0.0
out = sign(x.sum()) * x

# early return of a loop: staged
def first(v):
    for row in v:
        if row.sum() > 0:
            return row
    return torch.zeros(3)
out = first(x)

# early return of a while: staged
def settle(v):
    k = 0
    while k < 8:
        if v.norm() < 1:
            return v, k
        v = v / 2
        k += 1
    return v * 0, k
out = settle(x)

# a function that calls a function: staged
def clip(v):
    return v / v.norm() if v.norm() > 1 else v
def twice(v):
    v = clip(v) + 1
    return clip(v)
out = twice(x)

# a closure: staged
def make(limit):
    def inner(v):
        if v.sum() > limit:
            return v - limit
        return v
    return inner
out = make(2.0)(x)

# max and min: staged
out = max(x.sum(), x.mean() * 2), min([x.max(), x.sum(), x.mean()])

# a generator beside it: python
def parts(v):
    yield v
    if v.sum() > 0:
        yield v * 2
out = sum(parts(x))

# a value from before on one side: python
sides = {"up": x * 2, "down": x * 3}
key = None
if x.sum() > 0:
    out = sides["up"]
    key = "up"
else:
    out = sides["down"]

# a lambda: staged
pick = lambda v: v.max() if v.sum() > 0 else v.min()
out = pick(x)

# a method with super: staged
class Base:
    scale = 2.0
    def __init__(self):
        self.__hidden = 1.0
    def go(self, v):
        if v.sum() > 0:
            return v * self.scale
        return v - self.__hidden
class Derived(Base):
    def go(self, v):
        v = super().go(v)
        return v if v.mean() > 0 else -v
out = Derived().go(x)

# a module: staged
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        with torch.no_grad():
            self.lin.weight.fill_(0.25)
            self.lin.bias.fill_(0.125)
    def forward(self, v):
        v = self.lin(v)
        if v.mean() > 0:
            v = v * 2
        return v
net = nn.Sequential(Net(), Net())
out = net(x)

# decorated: staged
@torch.no_grad()
def f(v):
    if v.sum() > 0:
        return v + 1
    return v - 1
out = f(x)

# in place on one side: staged
y = x * 1
if x.sum() > 0:
    y.add_(1)
    y[0] = 7
out = y

# in place in a loop: staged
y = x * 1
for i in range(n):
    y += 1
    y[0] *= 2
out = y

# a dict of tensors: staged
h = {"a": x, "b": x.sum()}
if x.sum() > 0:
    h = {"a": x * 2, "b": h["b"] + 1}
out = h["a"], h["b"]

# a tuple is carried: staged
state = (x.sum(), x.mean())
while state[0] < 10:
    state = (state[0] + 2, state[1] * 0.5)
out = state

# comprehension beside it: staged
parts = [x.sum(), x.mean(), x.max()]
if parts[0] > 0:
    parts = [p * 2 for p in parts]
out = parts

# comprehension with a test: python
parts = [p for p in [x.sum(), x.mean() + 5] if p > 0]
out = torch.stack(parts).sum()

# a raise on the other side: staged
if not torch.isfinite(x).all():
    raise ValueError("not finite")
out = x + 1

# an attribute: staged
class Box:
    pass
box = Box()
box.value = x.sum()
if x.sum() > 0:
    box.value = box.value * 2
out = box.value

# an attribute in a loop: staged
class Cell:
    def __init__(self):
        self.h = torch.zeros(3)
cell = Cell()
for row in x:
    cell.h = (cell.h + row).tanh()
out = cell.h

# a list of rows: staged
rows = []
for row in x:
    rows.append(row * 2)
out = torch.stack(rows)

# append on one side: python
seen = []
if x.sum() > 0:
    seen.append(1)
out = x + len(seen)

# none on one side: python
extra = None
if x.sum() > 0:
    extra = x
out = x if extra is None else x + extra

# words on each side: python
mode = "up" if x.sum() > 0 else "down"
out = x + 1 if mode == "up" else x - 1

# a method that sets an attribute: python
class Counter:
    count = 0
    def more(self, v):
        self.count = self.count + 1
        return v * 2
counter = Counter()
out = x
if x.sum() > 0:
    out = counter.more(x)

# try around it: staged
try:
    if x.sum() > 0:
        out = x * 2
    else:
        out = x * 3
finally:
    done = True

# with around it: staged
with torch.no_grad():
    if x.sum() > 0:
        out = x * 2
    else:
        out = x * 3

# walrus: staged
if (s := x.sum()) > 0:
    out = s * 2
else:
    out = s - 1

# del: staged
t = x.sum()
if t > 0:
    y = t * 2
    z = y + 1
    del y
else:
    z = t
out = z

# a name for one iteration: staged
s = torch.zeros(())
for i in range(n):
    sq = i * i
    s = s + sq
out = s

# dynamic length rnn: staged
w = torch.full((3, 3), 0.1)
h = torch.zeros(3)
for row in x:
    h = torch.tanh(row @ w + h)
    if h.abs().max() > 0.9:
        h = h * 0.5
out = h
"""


def cells() -> list[tuple[str, str, str]]:
    """(name, kind, source) of each."""
    found = []
    for block in CELLS.strip().split("\n\n#"):
        head, _, source = block.lstrip("# ").partition("\n")
        name, _, kind = head.rpartition(": ")
        found.append((name, kind, source))
    return found
