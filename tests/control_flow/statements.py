"""Statements and expressions, as people write them: a function of ``x`` after each name."""

STATEMENTS = r"""
# augmented assignments of all kinds
a, b = x.sum(), 7
if a > 0:
    a += 1; a *= 2; b -= 2; b //= 2; b **= 2
else:
    a /= 2; a -= 1; b %= 4; b |= 8; b <<= 1
return a, b

# lambdas in loops and branches, with parameters of the same names
y = (lambda p, q: p + q)(x.sum(), 1.0)
for row in x:
    if row.sum() > 0:
        y = (lambda p, q: p * 0.5 + q)(row.sum(), y)
return y

# tuple targets in a loop
a, (b, c) = x.sum(), (x.mean(), 0)
while a < 5:
    a, (b, c) = a + 1 + b.abs(), (b * 2, c + 1)
return a, b, c

# starred targets
a, *rest = x.sum(), x.mean(), x.max()
if a > 0:
    first, *rest = rest[1], rest[0], a
else:
    first = a
return first, rest[0]

# subscripts of tensors as targets
y = x.clone()
if x.sum() > 0:
    y[0, 1] = 9
    y[:, 2] *= 2
else:
    y[0] += y.sum()
return y

# a subscript by a loop index
y = torch.zeros(len(x), 3)
for i in range(len(x)):
    if x[i].sum() > 0:
        y[i] = x[i] * i
    else:
        y[i, 0] = i
return y

# walrus in while
v = x.sum().abs()
n = 0
while (h := v / 2) > 0.1:
    v = h
    n += 1
return v, n, h

# try with a user's error that is caught
try:
    if x.sum() > 0:
        r = x.sum()
    else:
        r = -x.sum()
    raise KeyError("k")
except KeyError:
    r = r + 1
finally:
    r = r * 2
return r

# with inside of a branch
if x.sum() > 0:
    with torch.no_grad():
        r = x.sum() * 2
else:
    with torch.enable_grad():
        r = x.mean()
return r

# a generator expression
return sum(c.sum() if c.sum() > 0 else c.mean() for c in (x, x * 2))

# del in a loop
s = x.sum()
n = 0
while s < 3:
    t = s + 1
    s = t
    del t
    n += 1
return s, n

# global
global total_
total_ = x.sum()
if x.sum() > 0:
    total_ = total_ * 2
return total_

# f-strings beside it
label = f"{x.shape[1]:>3}"
if x.sum() > 0:
    text = f"{label}!"
    r = x.sum()
else:
    text = f"{label}?"
    r = x.mean()
return r

# assert on a recorded tensor
assert x.shape[1] == 3, "three columns"
if x.sum() > 0:
    assert x.shape[1] > 2
    r = x.sum()
else:
    r = x.mean()
return r

# pass and ellipsis
if x.sum() > 0:
    pass
else:
    ...
return x.sum()

# nested break and continue
s = x.new_zeros(())
for row in x:
    k = 0
    while True:
        k += 1
        if k > 4:
            break
        if row.sum() * k < 0.5:
            continue
        s = s + k
        if s > 12:
            break
    if s > 20:
        break
return s

# break in try
s, i = x.sum(), 0
while i < 5:
    try:
        if s > 3:
            break
    finally:
        i += 1
    s = s + 1
return s, i

# a loop over a zip of numbers and rows
s = x.sum()
for k, w in zip((1, 2, 3), (0.5, 1.5, 2.5)):
    if s > w:
        s = s - k
    else:
        s = s + w
return s

# rows together, with their number
s = x.sum() * 0
for i, (row, other) in enumerate(zip(x, x * 2), 1):
    s = s * 0.5 + (row * other).sum() + i
return s

# ranges from behind
s = x.sum() * 0
for i in reversed(range(1, x.shape[0], 2)):
    s = s * 0.5 + x[i].sum()
for i in reversed(range(len(x))):
    s = s * 0.5 + i
k = (x.abs().sum() * 2).long()
for i in reversed(range(k, -3, -2)):
    s = s * 0.9 + i
return s

# enumerate with a break
n = 0
for i, row in enumerate(x):
    if row.sum() > 1:
        n = i
        break
return n

# conditional expressions in arguments and indices
y = torch.where(x > 0, x if x.sum() > 0 else -x, x * 2)
return y[0 if 3 > 2 else 1], max(x.sum() if x.sum() > 0 else -x.sum(), x.max())

# a chain of comparisons with tensors and numbers
a, b = x.sum(), x.mean()
r = 0
if -1 < b < a < 10:
    r = 1
elif not (a == b) != (a > 0):
    r = 2
return r

# chained booleans with mixed kinds
flag = True
r = 0
if flag and (x.sum() > 0 or not x.max() > 1) and not (x.min() < -3):
    r = 1
return r

# a sorted pair
a, b = x.sum(), x.mean()
if a < b:
    a, b = b, a
lo, hi = (b, a)
return lo, hi

# swap of names through a dict
names = dict(a=x.sum(), b=x.max())
if names["a"] > names["b"]:
    names = dict(a=names["b"], b=names["a"])
return names["a"], names["b"]

# a named tuple
from collections import namedtuple
P = namedtuple("P", "u v")
p = P(x.sum(), x.mean())
while p.u < 2:
    p = P(p.u + 1, p.v * 2)
return p.u, p.v

# list unpacking of a branch
pair = [x.sum(), x.mean()]
if x.sum() > 0:
    pair = [*pair[::-1]]
return pair[0], pair[1]

# several statements on a line
if x.sum() > 0: a = 1; b = 2
else: a = 3; b = 4
return a, b

# annotated assignments
a: torch.Tensor = x.sum()
n: int
n = 0
while a < 2:
    a: torch.Tensor = a + 1
    n += 1
return a, n

# an import inside of a branch
if x.sum() > 0:
    import math
    r = x.sum() * math.pi
else:
    r = x.sum()
return r

# print in a branch
if x.sum() > 5:
    print("large", x.sum())
return x.sum()

# a comprehension in a loop body
s = x.sum()
while s < 4:
    s = s + sum([k * 0.25 for k in range(1, 4)])
return s

# a comprehension whose element branches
return torch.stack([v * 2 if v > 0 else v for v in [x.sum(), x.mean(), x.min()]])

# int and float of Python numbers
n = int(3.7)
s = x.sum()
for _ in range(n):
    if s > float("1.5"):
        s = s / 2
    else:
        s = s + 1
return s

# a while over a tensor condition with a method
v = x.clone()
while not torch.all(v.abs() < 0.5):
    v = v / 2
return v

# a do-while
v = x.sum()
while True:
    v = v + 1
    if not v < 2.5:
        break
return v

# ternary of different number kinds
k = 1 if x.sum() > 0 else 2.5
m = True if x.max() > 1 else 0
return x.sum() * k + m

# a string built up
s = ""
if x.shape[1] > 2:
    s += "wide"
return x.sum() if s == "wide" and x.sum() > 0 else x.mean()

# a generator consumed in a loop
def parts(v):
    for i in range(3):
        yield v[:, i]
s = x.new_zeros(())
for p in parts(x):
    if p.sum() > 0:
        s = s + p.sum()
return s

# yield beside a staged loop
def gen(n):
    i = 0
    while i < n:
        yield i
        i += 1
return sum(x.sum() * i if x.sum() > 0 else x.mean() for i in gen(3))

# rows of several lengths
s = x.sum() * 0
for row, other in zip(x, torch.cat([x, x])[1:]):
    s = s * 0.5 + (row * other).sum()
return s
"""
