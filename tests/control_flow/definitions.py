"""Functions, classes and closures with statements in them: a function of ``x`` after each name."""

DEFINITIONS = r'''
# elif chain with early returns in a helper
def g(v):
    if v.sum() > 2: return v * 2
    elif v.sum() > 0:
        return v * 3
    elif v.mean() > -0.5: return v
    return -v
return g(x)

# nested helpers that return early from loops
def g(v):
    for row in v:
        for c in row:
            if c > 1:
                return c * 10
    return v.min()
return g(x)

# recursion with a Python depth
def g(v, n):
    if n == 0:
        return v
    if v.sum() > 0:
        return g(v / 2, n - 1)
    return g(v + 1, n - 1)
return g(x.sum(), 3)

# an attribute target, augmented
class Box: pass
b = Box()
b.v, b.n = x.sum(), 0
while b.v < 3:
    b.v += 1
    b.n += 1
return b.v, b.n

# lambdas in a loop
fs = [lambda v: v + 1, lambda v: v * 2 if v.sum() > 0 else v]
r = x
for f_ in fs:
    r = f_(r)
return r

# a lambda that closes over what a branch set
k = 1
if x.sum() > 0:
    k = 3
g = lambda v: v * k
return g(x)

# a decorator
def twice(fn):
    def inner(v):
        return fn(fn(v))
    return inner
@twice
def g(v):
    if v.sum() > 1:
        return v / 2
    return v + 1
return g(x)

# a decorator with functools.wraps and arguments
import functools
def times(n):
    def wrap(fn):
        @functools.wraps(fn)
        def inner(v):
            for _ in range(n):
                v = fn(v)
            return v
        return inner
    return wrap
@times(3)
def g(v):
    if v.sum() > 1:
        return v / 2
    return v + 0.75
return g(x)

# docstring, comments and continued lines
"""What it does."""
def g(v):
    """Doc."""
    # a comment
    if v.sum() > 0 \
            and v.max() > 0:  # why
        # inside
        return (v
                * 2)
    return v
return g(x)

# return in try
def g(v):
    try:
        if v.sum() > 0:
            return v.sum()
        return v.mean()
    finally:
        pass
return g(x)

# return in with
def g(v):
    with torch.no_grad():
        if v.sum() > 0:
            return v.sum()
    return v.mean()
return g(x)

# a method with default arguments and keywords
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = 2.0
    def forward(self, v, *, shift=1.0, **more):
        if v.sum() > shift:
            return v * self.gain
        return v + more.get("extra", 0)
return Net()(x, extra=3)

# a property and a class method
class Net(nn.Module):
    @property
    def limit(self): return 0.5
    @classmethod
    def half(cls, v):
        return v / 2 if v.sum() > 0 else v
    @staticmethod
    def neg(v):
        return -v if v.max() > 1 else v
    def forward(self, v):
        v = self.half(v) if v.mean() > self.limit else self.neg(v)
        return v
return Net()(x)

# a callable object
class Call:
    def __call__(self, v):
        if v.sum() > 0:
            return v + 1
        return v - 1
return Call()(x)

# a partial
from functools import partial
def g(k, v):
    if v.sum() > k:
        return v * k
    return v
return partial(g, 2.0)(x)

# mutually recursive helpers
def even(v, n):
    if n == 0: return v
    return odd(v * 2 if v.sum() > 0 else v + 1, n - 1)
def odd(v, n):
    if n == 0: return -v
    return even(v - 1 if v.sum() > 3 else v, n - 1)
return even(x.sum(), 5)

# a class made in a branch
if x.shape[1] == 3:
    class K:
        def go(self, v):
            return v * 2 if v.sum() > 0 else v
r = K().go(x)
return r

# nested functions that share a cell
def make():
    state = x.sum()
    def step():
        nonlocal state
        state = state + 1
        return state
    return step
step = make()
r = step()
while r < 4:
    r = r + 2
return r, step()

# a closure made before the branch
k = 1
g = lambda: x * k
if x.sum() > 0:
    k = 3
return g()

# a closure made before the loop
k = x.sum() * 0
def g():
    return k * 2
n = 0
while n < x.sum():
    k = k + 1
    n += 1
return g()
'''
