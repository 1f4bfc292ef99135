"""Python state that a block reaches by objects, containers, functions, hooks, NumPy's memory and the system is told."""

from __future__ import annotations

import itertools
import linecache
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tfnb
from tests.recording.test_cells import Notebook
from tfnb.recording import user_code_ran

X = torch.linspace(-1, 1, 12).reshape(4, 3)
HEAD = """
import array, collections, contextvars, functools, itertools, os, queue, threading, types
from types import SimpleNamespace as Space
import numpy as np, torch, tfnb
from torch import nn
"""
numbers = itertools.count()


def module(forward: str, init: str = "", data: str = "pass") -> str:
    """The source of a module of one forward, and of an object of it."""
    lines = "".join(f"        {line}\n" for line in forward.split("; "))
    return (
        f"class M(nn.Module):\n    {data}\n    def __init__(self):\n        super().__init__()\n"
        f"        {init or 'pass'}\n    def forward(self, x):\n{lines}m = M()"
    )


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str, str], dict[str, Any]]:
    """Runs a set-up, and then a block of a file that records ``y`` from ``x``; returns the names."""

    def run(setup: str, block: str) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": "__main__", "X": X}
        body = "".join(f"    {line}\n" for line in ["x = tfnb.placeholder(X)", *block.splitlines()])
        for part, text in (("setup", HEAD + setup), ("block", f"with tfnb.record() as graph:\n{body}")):
            path = tmp_path / f"{part}{next(numbers)}.py"
            path.write_text(text)
            linecache.checkcache(str(path))
            exec(compile(text, str(path), "exec"), names)
        return names

    return run


def run(names: dict[str, Any]) -> Any:
    user_code_ran()
    return tfnb.run(names["y"], {names["x"]: X})


CHANGED = {  # set-up, block, change, note of the next run
    "two objects deep": ("c = Space(m=Space(k=2.0))\ndef f(x, c):\n    return x * c.m.k", "y = f(x, c)",
                         "c.m.k = 3.0", r"c\.m\.k was 2\.0 when .*, and is 3\.0 now"),
    "of a module": (module("c = self.c; return x * c.m.k", "self.c = Space(m=Space(k=2.0))"), "y = m(x)",
                    "m.c.m.k = 3.0", r"attribute c\.m\.k of m \(M\) was 2\.0"),
    "shared by modules": (module("return self.l(x) * self.l.gain", "self.l = nn.Linear(3, 3); self.l.gain = 2.0"),
                          "y = m(x)", "m.l.gain = 3.0", r"attribute gain of m\.l \(Linear\) was 2\.0"),
    "module that is handed on": ("class C(nn.Module):\n    pass\nc = C(); c.k = 2.0\ndef f(x, c):\n    return x * c.k",
                                 "y = f(x, c)", "c.k = 3.0", r"c\.k was 2\.0"),
    "class of a module": (module("return x * self.k", data="k = 2.0"), "y = m(x)", "M.k = 3.0", r"attribute k of m"),
    "dict with tensors": ("c = {'k': 2.0, 't': torch.ones(3)}", "y = x * c['k'] + c['t']", "c['k'] = 3.0", "c was"),
    "list of objects": ("c = [Space(k=2.0)]", "y = x * c[0].k", "c[0].k = 3.0", "c was"),
    "nested list of a module": (module("return x * self.c[0][0]", "self.c = [[2.0]]"), "y = m(x)", "m.c[0][0] = 3.0",
                                r"attribute c of m \(M\) was \[\[2\.0\]\]"),
    "long list": ("c = [float(i) for i in range(200)]", "y = x * c[150]", "c[150] = 0.0", "c was"),
    "property": ("class C:\n    _k = 2.0\n    k = property(lambda self: self._k)\nc = C()", "y = x * c.k",
                 "c._k = 3.0", r"c\._k was 2\.0"),
    "operators": ("class C:\n    def __init__(self): self.k = [2.0]\n    def __iter__(self): return iter(self.k)\n"
                  "c = C()", "y = x\nfor k in c:\n    y = y * k", "c.k[0] = 3.0", r"c\.k was"),
    "called objects": ("class C:\n    def __init__(self): self.k = 2.0\n    def __call__(self, x): return x * self.k\n"
                       "c = [C()]", "y = c[0](x)", "c[0].k = 3.0", "c was"),
    "method": ("class C:\n    def __init__(self): self.k = 2.0\n    def f(self, x): return x * self.k\n"
               "c = C()\nf = c.f", "y = f(x)", "c.k = 3.0", r"f\.k was 2\.0"),
    "partial": ("c = Space(k=2.0)\nf = functools.partial(lambda x, c: x * c.k, c=c)", "y = f(x)", "c.k = 3.0",
                "f is another function"),
    "cached function": ("k = 2.0\n@functools.lru_cache\ndef f(n): return n * k", "y = x * f(3)", "k = 3.0",
                        r"k was 2\.0"),
    "context variable": ("k = contextvars.ContextVar('k', default=2.0)", "y = x * k.get()", "k.set(3.0)", "k was 2.0"),
    "thread local": ("k = threading.local()\nk.v = 2.0", "y = x * k.v", "k.v = 3.0", r"k\.v was 2\.0"),
    "array": ("k = array.array('d', [2.0])", "y = x * k[0]", "k[0] = 3.0", r"k was \[2\.0\]"),
    "deque": ("k = collections.deque([2.0])", "y = x * sum(k)", "k.append(3.0)", r"k was \[2\.0\]"),
    "view of a dict": ("d = {'k': 2.0}\nk = types.MappingProxyType(d)", "y = x * k['k']", "d['k'] = 3.0", "k was"),
    "environment": ("os.environ['TFNB_K'] = '2'\ndef f(x): return x * float(os.environ.get('TFNB_K', '1'))", "y = f(x)",
                    "os.environ['TFNB_K'] = '3'", r"os\.environ\['TFNB_K'\] was '2'"),
    "getenv": ("os.environ.pop('TFNB_K', None)", "y = x * float(os.getenv('TFNB_K', '1'))",
               "os.environ['TFNB_K'] = '3'", r"os\.environ\['TFNB_K'\] was ''"),
    "forward hook": ("k = 2.0\nm = nn.Linear(3, 3)\nm.register_forward_hook(lambda m, a, o: o * k)", "y = m(x)",
                     "k = 3.0", r"k was 2\.0"),
    "gradient hook": ("k = 2.0\nw = nn.Parameter(torch.ones(3))\nw.register_hook(lambda g: g * k)",
                      "(x * w).sum().backward()\ny = w.grad * 1", "k = 3.0", r"k was 2\.0"),
    "backward of a Function": (
        "k = 2.0\nclass F(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x): return x * 1\n"
        "    @staticmethod\n    def backward(ctx, g): return g * k\nw = nn.Parameter(torch.ones(3))",
        "F.apply(x * w).sum().backward()\ny = w.grad * 1", "k = 3.0", r"k was 2\.0"),
    "array of NumPy": ("a = np.ones(300, np.float32)", "y = x.sum() * torch.from_numpy(a)", "a += 1", "a was an array"),
    "tensor of an array": ("a = np.ones(3, np.float32)\nt = torch.from_numpy(a)", "y = x * t", "a += 1",
                           "t has other values"),
    "array of a tensor": ("t = torch.ones(3)\na = t.numpy()", "y = x * t", "a += 1", "t has other values"),
    "tensor of a module": (module("return x * self.t", "self.t = torch.from_numpy(a)").replace(
        "class", "a = np.ones(3, np.float32)\nclass", 1), "y = m(x)", "a += 1", "attribute t of m .* has other values"),
    "tensor in a list": ("k = [torch.ones(3)]", "y = x * k[0]", "k[0] = torch.zeros(3)", "a tensor in k has other"),
    "tensor in an object": (module("return x * self.c.w", "self.c = Space(w=torch.ones(3))"), "y = m(x)",
                            "m.c.w = torch.zeros(3)", "a tensor in attribute c of m .* has other values"),
    "tensors of a functional call": ("m = nn.Linear(3, 3)\np = {k: v * 2 for k, v in m.state_dict().items()}",
                                     "y = torch.func.functional_call(m, p, (x,))", "p['weight'].zero_()",
                                     "a tensor in p has other values"),
    "rate of a scheduler": ("o = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.5)\n"
                            "s = torch.optim.lr_scheduler.StepLR(o, 1)", "y = x * s.get_last_lr()[0]",
                            "o.step(); s.step()", r"s\._last_lr was \[0\.5\]"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*lr_scheduler")
@pytest.mark.parametrize("case", CHANGED)
def test_a_change_after_the_recording_is_told(case: str, program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFNB_K", "0")  # put back afterwards
    setup, block, change, said = CHANGED[case]
    names = program(setup, block)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = run(names)
    exec(change, names)
    with pytest.warns(UserWarning, match=f"(?s){said}.*the graph computes with"):
        assert torch.equal(run(names), before)


CARRIED = {  # set-up, block, note of the recording
    "made once, None in the class": (module("if self.c is None: self.c = x.mean(); return x - self.c", data="c = None")
                                     .replace("if self.c is None: ", "if self.c is None:\n            "), "y = m(x)",
                                     r"m \(M\) keeps its attribute c"),
    "made once, in a helper": ("def f(m, x):\n    if m.c is None:\n        m.c = x.mean()\n    return m.c\n"
                               + module("return x - f(self, x)", data="c = None"), "y = m(x)", "its attribute c"),
    "cached property": (module("self.s = x; return x * self.k",
                               data="k = functools.cached_property(lambda s: s.s.sum())"), "y = m(x)", "attribute k"),
    "object of a module": (module("self.c.n += 1; return x * self.c.n", "self.c = Space(n=0)"), "y = m(x)",
                           r"keeps its attribute c\.n"),
    "list of an enclosing function": ("def make():\n    n = [0]\n    def f(x):\n        n[0] += 1\n"
                                      "        return x * n[0]\n    return f\nf = make()", "y = f(x)", "keeps f in"),
    "attribute of a wrapper": ("def counted(f):\n    def g(x):\n        g.n += 1\n        return f(x) * g.n\n"
                               "    g.n = 0\n    return g\nf = counted(torch.sin)", "y = f(x)", "keeps f in"),
    "number of a class": ("class C:\n    n = 0\n    @classmethod\n    def next(cls):\n        cls.n += 1\n"
                          "        return cls.n", "y = x * C.next()", r"keeps C\.n in"),
    "count of a function": ("c = itertools.count(1)\ndef f(x): return x * next(c)", "y = f(x)", "keeps c in"),
    "count of a module": (module("return x * next(self.c)", "self.c = itertools.count(1)"), "y = m(x)",
                          "keeps its attribute c"),
    "queue": ("q = queue.Queue()\nq.put(2.0)\nq.put(3.0)", "y = x * q.get()", r"keeps q\.queue in"),
    "dict that loses": ("d = {1: 2.0, 2: 3.0}", "y = x * d.popitem()[1]", "keeps d in"),
    "counts of a dict": ("d = collections.defaultdict(int)", "d['n'] += 1\ny = x * d['n']", "keeps d in"),
    "array": ("a = array.array('d', [2.0])", "a[0] += 1\ny = x * a[0]", "keeps a in"),
    "tuple of states": ("h = None", "h = (x.sum() if h is None else h[0] + x.sum(),)\ny = x + h[0]", "keeps h in"),
    "hook with a count": ("class H:\n    def __init__(self): self.n = 0\n    def __call__(self, m, a):\n"
                          "        self.n += 1\n        return (a[0] * self.n,)\nm = nn.Linear(3, 3)\n"
                          "m.register_forward_pre_hook(H())", "y = m(x)", "keeps its attribute _forward_pre_hooks"),
    "NumPy writes": ("t = torch.ones(3)", "a = t.numpy()\na += 1\ny = x * t", "NumPy writes into the memory"),
    "NumPy writes what it made": ("", "a = np.ones(3, np.float32)\nt = torch.from_numpy(a)\na += 1\ny = x * t",
                                  "NumPy writes into the memory"),
    "rate that is read": ("o = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.5)",
                          "y = x * o.param_groups[0]['lr']", "reads lr of the param groups of o"),
    "type of a size": ("", "n = x.shape[0]\ny = x * (2.0 if isinstance(n, int) else 3.0)",
                       r"`isinstance\(\)` asks for the type of a size.*%%tfgraph"),
    "type of a size in a function": ("def f(x):\n    n = x.shape[0]\n    return x * (2.0 if type(n) is int else 3.0)",
                                     "y = f(x)",
                                     r"line \d+.*`type\(\)` asks for the type of a size"),
    "type of a tensor": ("", "y = x if type(x) is torch.Tensor else -x", "asks for the type of a tensor"),
    "text of a size": ("", "y = x * float(str(x.shape[0]))", r"`str\(\)` took the sample's value"),
    "text of a shape": ("", "y = x * len(f'{tuple(x.shape)}')", r"`repr\(\)` took the sample's value"),
    "clock": ("from time import time", "y = x * (time() % 10)", r"`time\.time\(\)` read a clock"),
    "clock of a class": ("from datetime import datetime\ndef f(x): return x * datetime.now().microsecond", "y = f(x)",
                         r"`datetime\.now\(\)` read a clock"),
    "clock in nanoseconds": ("import time", "y = x * (time.perf_counter_ns() % 97)", "read a clock"),
    "identifier": ("import uuid", "y = x * (uuid.uuid4().int % 97)", r"`uuid\.uuid4\(\)` drew in Python"),
    "secrets": ("import secrets", "y = x * secrets.randbelow(97)", r"`secrets\.randbelow\(\)` drew in Python"),
    "bytes of the system": ("", "y = x * os.urandom(1)[0]", r"`os\.urandom\(\)` drew in Python"),
    "generator of an object": ("class C:\n    def __init__(self): self.r = np.random.default_rng(3)\n"
                               "    def f(self, x): return x * self.r.random()\nc = C()", "y = c.f(x)",
                               "drew in Python"),
}  # fmt: skip


@pytest.mark.parametrize("case", CARRIED)
def test_state_that_no_run_carries_is_told_by_the_recording(case: str, program: Any) -> None:
    setup, block, said = CARRIED[case]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = program(setup, block)["graph"]
    assert any(re.search(f"(?s){said}", text) for text in (*graph.notes, *(str(each.message) for each in caught)))


QUIET = {  # set-up, block, change: nothing to tell
    "other attributes": ("c = Space(k=2.0, n=0)", "y = x * c.k", "c.n = 7"),
    "attribute that is set before": (module("self.h = x * 2; return self.h"), "y = m(x)", "m.h = None"),
    "log of an object": ("class C:\n    def __init__(self): self.log = []\n    def f(self, x):\n"
                         "        self.log.append(1.0)\n        return x * 2\nc = C()", "y = c.f(x)",
                         "c.log.append(2.0)"),
    "rate that a step takes": ("w = nn.Parameter(torch.ones(3))\no = torch.optim.SGD([w], lr=0.5)",
                               "o.zero_grad()\n(x * w).sum().backward()\nstep = o.step()\n"
                               "for g in o.param_groups:\n    g['params']\ny = x * 1", "o.param_groups[0]['lr'] = 0.1"),
    "a tensor in a dict that is not used": ("c = {'k': 2.0, 'data': torch.ones(9)}", "y = x * c['k']",
                                            "c['data'] = torch.zeros(9)"),
    "another environment": ("", "y = x * 2", "os.environ['TFNB_K'] = '5'"),
    "empty cells": ("def f():\n    def g(): return z\n    with tfnb.record():\n"
                    "        z = tfnb.placeholder(torch.ones(3))\n        return g() * 2\nf()", "y = x * 2", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", QUIET)
def test_what_changes_no_number_is_not_told(case: str, program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFNB_K", "0")
    setup, block, change = QUIET[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = program(setup, block)
        before = run(names)
        exec(change, names)
        assert torch.equal(run(names), before)


def test_tensors_of_a_functional_call_are_no_parameters_of_its_module() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    lent = {name: value * 0.5 for name, value in model.state_dict().items()}
    with tfnb.record():
        x = tfnb.placeholder(X)
        y = torch.func.functional_call(model, lent, (x,))
        z = torch.func.functional_call(model, dict(other.named_parameters()), (x,))
        own = model(x)
    for fetch, want in ((y, torch.func.functional_call(model, lent, (X,))), (z, other(X)), (own, model(X))):
        torch.testing.assert_close(tfnb.run(fetch, {x: X}), want.detach())
    with torch.no_grad():
        other.weight.mul_(2)
    torch.testing.assert_close(tfnb.run(z, {x: X}), other(X).detach())


def test_where_of_two_numbers_has_the_dtype_of_numbers() -> None:
    @tfnb.autograph
    def chosen(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x.sum().item(), 0.0)

    with tfnb.record():
        x = tfnb.placeholder(X.double())
        y = chosen(x)
    fed = torch.tensor([[1.0, -2.0, 4.0]], dtype=torch.float64)
    assert y.dtype is torch.float32
    torch.testing.assert_close(tfnb.run(y, {x: fed}), torch.where(fed > 0, fed.sum().item(), 0.0))


def test_a_generator_without_state_records_and_is_told() -> None:
    drawn = random.SystemRandom()
    with pytest.warns(UserWarning, match="SystemRandom.random"), tfnb.record():
        y = tfnb.placeholder(X) * drawn.random()
    assert y is not None


@pytest.mark.parametrize(("call", "said"), [
    (lambda x: torch.from_numpy(np.arange(x.shape[0])), r"gives a size that varies .*torch\.arange"),
    (lambda x: divmod(x.shape[0], 3), "gives a size that varies"),
    (lambda x: {x.shape[0]: 1}, "keeps something by a size that varies"),
    (lambda x: torch.nn.Parameter(torch.ones(3)).grad.zero_(), r"a \.grad that is empty.*zero_grad"),  # type: ignore
], ids=["arange", "divmod", "key", "grad"])  # fmt: skip
def test_errors_of_python_say_the_line_and_what_to_do(call: Callable[[Any], Any], said: str) -> None:
    with pytest.raises((TypeError, AttributeError)) as error, tfnb.record():
        call(tfnb.placeholder(X))
    assert len(error.value.__notes__) == 1
    assert re.search(rf"(?s)test_reached_state\.py line \d+: .*{said}", error.value.__notes__[0])


def test_a_gradient_that_is_added_up_by_hand_is_told_in_a_cell() -> None:
    for clear, is_told in (("", True), ("opt.zero_grad()\n", False)):
        book = Notebook("by hand")
        book.names["w"] = torch.nn.Parameter(torch.ones(3))
        book.names["opt"] = torch.optim.SGD([book.names["w"]], lr=0.1)
        graph = book.run(
            "1", f"x = tfnb.placeholder(torch.ones(4, 3))\n{clear}g, = torch.autograd.grad((x * w).sum(), [w])\n"
            "w.grad = g if w.grad is None else w.grad + g\nstep = opt.step()\n",
        )  # fmt: skip
        assert any("nothing in this block clears .grad" in note for note in graph.notes) is is_told


@pytest.mark.filterwarnings("ignore:.*the zeroed .grad of")
def test_a_zeroed_gradient_that_only_some_runs_compute_is_told() -> None:
    one, two = (nn.Parameter(torch.ones(3)) for _ in range(2))
    opt = torch.optim.SGD([one, two], lr=0.1, momentum=0.9)

    @tfnb.autograph
    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x * one).sum() if x.sum() > 0 else (x * two).sum()

    for set_to_none in (False, True):
        with tfnb.record() as graph:
            x = tfnb.placeholder(X + 1)
            opt.zero_grad(set_to_none=set_to_none)
            loss(x).backward()
            step = opt.step()
        told = any(re.search(r"the zeroed \.grad of .* is there from turn to turn", note) for note in graph.notes)
        assert step is not None and told is not set_to_none


@pytest.mark.filterwarnings("error::UserWarning")
def test_what_each_call_sets_before_it_is_read_is_no_state() -> None:
    """A hook that keeps an activation in a dict, and attributes that the block itself sets."""
    kept: dict[str, torch.Tensor] = {}
    net = SimpleNamespace(model=nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    net.model[1].register_forward_hook(lambda module, inputs, out: kept.update(act=out))

    def loss(x: Any) -> Any:
        return net.model(x).square().mean() + kept["act"].abs().mean()

    with tfnb.record():
        net.x = tfnb.placeholder(torch.randn(5, 3), name="x")
        net.weight = net.model[0].weight.norm()
        net.loss = loss(net.x) + net.weight
        net.train = tfnb.train.SGD(0.1).minimize(net.loss)
    assert net.train is not None


def test_row_sparse_gradients_may_be_kept_in_a_block_that_asks_for_them() -> None:
    kept = SimpleNamespace()
    table = tfnb.Variable(torch.ones(5, 2), name="table")
    with tfnb.record():
        ids = tfnb.placeholder(torch.tensor([1, 2]), name="ids")
        if not hasattr(kept, "gradients"):
            kept.gradients = tfnb.gradients(nn.functional.embedding(ids, table).sum(), [table])
    (gradient,) = kept.gradients
    assert isinstance(gradient, tfnb.IndexedSlices)
