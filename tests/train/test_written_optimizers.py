"""Optimizers of the literature, as users write them: recorded steps equal plain PyTorch's over several runs.

Half of the way the learning rate changes, and the state goes through `state_dict` and `load_state_dict`.
"""

from __future__ import annotations

import copy
import math
from math import sqrt
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import tfnb


class Adan(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2, betas: Any = (0.98, 0.92, 0.99), eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            b1, b2, b3 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                g, s = p.grad, self.state[p]
                if len(s) == 0:
                    s["step"] = 0
                    s["m"], s["v"], s["n"] = (torch.zeros_like(p) for _ in range(3))
                    s["before"] = g.clone()
                s["step"] += 1
                m, v, n, t = s["m"], s["v"], s["n"], s["step"]
                difference = g - s["before"]
                m.lerp_(g, 1 - b1)
                v.lerp_(difference, 1 - b2)
                look = g + b2 * difference
                n.mul_(b3).addcmul_(look, look, value=1 - b3)
                denominator = (n / (1 - b3**t)).sqrt_().add_(group["eps"])
                p.addcdiv_(m / (1 - b1**t) + b2 * v / (1 - b2**t), denominator, value=-group["lr"])
                s["before"].copy_(g)


class TextbookAdamW(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2, betas: Any = (0.9, 0.999), eps: float = 1e-8) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.01))

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.data
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p.data)
                    state["exp_avg_sq"] = torch.zeros_like(p.data)
                exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
                beta1, beta2 = group["betas"]
                state["step"] += 1
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
                exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                bias_correction1 = 1 - beta1 ** state["step"]
                bias_correction2 = 1 - beta2 ** state["step"]
                denom = (exp_avg_sq.sqrt() / math.sqrt(bias_correction2)).add_(group["eps"])
                step_size = group["lr"] / bias_correction1
                p.data.addcdiv_(exp_avg, denom, value=-step_size)
        return loss


class RAdam(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.7), "eps": 1e-8})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                state["m"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["v"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                beta2_t = beta2 ** state["step"]
                most = 2 / (1 - beta2) - 1
                length = most - 2 * state["step"] * beta2_t / (1 - beta2_t)
                if length >= 4:
                    rate = math.sqrt(
                        (1 - beta2_t) * (length - 4) / (most - 4) * (length - 2) / length * most / (most - 2)
                    ) / (1 - beta1 ** state["step"])
                    p.addcdiv_(state["m"], state["v"].sqrt().add_(group["eps"]), value=-rate * group["lr"])
                else:
                    rate = 1.0 / (1 - beta1 ** state["step"])
                    p.add_(state["m"], alpha=-rate * group["lr"])


class NAdam(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "decay": 4e-3})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if "step" not in state:
                    state.update(step=0, schedule=1.0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                t = state["step"]
                now = beta1 * (1.0 - 0.5 * math.pow(0.96, t * group["decay"]))
                then = beta1 * (1.0 - 0.5 * math.pow(0.96, (t + 1) * group["decay"]))
                state["schedule"] = state["schedule"] * now
                following = state["schedule"] * then
                state["m"].lerp_(p.grad, 1 - beta1)
                state["v"].mul_(beta2).addcmul_(p.grad, p.grad.conj(), value=1 - beta2)
                denominator = (state["v"] / (1 - math.pow(beta2, t))).sqrt_() + 1e-8
                p.addcdiv_(p.grad, denominator, value=-group["lr"] * (1 - now) / (1 - state["schedule"]))
                p.addcdiv_(state["m"], denominator, value=-group["lr"] * then / (1 - following))


class AdaBelief(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2, eps: float = 1e-12) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": eps})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in filter(lambda p: p.grad is not None, group["params"]):
                s = self.state[p]
                s["step"] = s.get("step", 0) + 1
                m = s.setdefault("m", torch.zeros_like(p))
                v = s.setdefault("s", torch.zeros_like(p))
                m.mul_(b1).add_(p.grad, alpha=1 - b1)
                r = p.grad - m
                v.mul_(b2).addcmul_(r, r, value=1 - b2).add_(group["eps"])
                c1, c2 = 1 - b1 ** s["step"], 1 - b2 ** s["step"]
                p.addcdiv_(m, v.sqrt().div_(sqrt(c2)).add_(group["eps"]), value=-group["lr"] / c1)


class Yogi(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s["step"] = 0
                    s["m"] = torch.full_like(p, 1e-6)
                    s["v"] = torch.full_like(p, 1e-6)
                s["step"] += 1
                square = p.grad * p.grad
                s["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                s["v"].addcmul_(torch.sign(s["v"] - square), square, value=-0.001)
                rate = group["lr"] * math.sqrt(1 - 0.999 ** s["step"]) / (1 - 0.9 ** s["step"])
                p -= rate * s["m"] / (s["v"].abs().sqrt() + 1e-3)


class Adafactor(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "clip": 1.0, "decay": -0.8, "eps": (1e-30, 1e-3)})

    @staticmethod
    def _rms(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.norm(2) / (tensor.numel() ** 0.5)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                grad, state, factored = p.grad, self.state[p], p.dim() >= 2
                if len(state) == 0:
                    state["step"] = 0
                    if factored:
                        state["row"] = torch.zeros(grad.shape[:-1]).to(grad)
                        state["col"] = torch.zeros(grad.shape[:-2] + grad.shape[-1:]).to(grad)
                    else:
                        state["square"] = torch.zeros_like(grad)
                    state["RMS"] = 0
                state["step"] += 1
                state["RMS"] = self._rms(p)
                relative = min(group["lr"], 1.0 / math.sqrt(state["step"]))
                lr = max(group["eps"][1], state["RMS"]) * relative
                beta = 1.0 - math.pow(state["step"], group["decay"])
                update = grad**2 + group["eps"][0]
                if factored:
                    state["row"].mul_(beta).add_(update.mean(dim=-1), alpha=1.0 - beta)
                    state["col"].mul_(beta).add_(update.mean(dim=-2), alpha=1.0 - beta)
                    r = (state["row"] / state["row"].mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
                    update = torch.mul(r, state["col"].unsqueeze(-2).rsqrt()).mul_(grad)
                else:
                    state["square"].mul_(beta).add_(update, alpha=1.0 - beta)
                    update = state["square"].rsqrt().mul_(grad)
                update.div_((self._rms(update) / group["clip"]).clamp_(min=1.0))
                p.add_(-(update * lr))


class Lamb(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not len(state):
                    state["step"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                size = p.norm().clamp(0, 10)
                update = (
                    state["m"] / (1 - 0.9 ** state["step"]) / ((state["v"] / (1 - 0.99 ** state["step"])).sqrt() + 1e-6)
                    + group["weight_decay"] * p
                )
                long = update.norm()
                trust = 1 if size == 0 or long == 0 else size / long
                p.add_(update * trust * -group["lr"])
        return loss


class LARS(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "eta": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for g in self.param_groups:
            for p in g["params"]:
                d = p.grad
                if p.ndim > 1:
                    d = d.add(p, alpha=0.01)
                    a, b = torch.norm(p), torch.norm(d)
                    one = torch.ones_like(a)
                    d = d.mul(torch.where(a > 0.0, torch.where(b > 0, g["eta"] * a / b, one), one))
                param_state = self.state[p]
                if "mu" not in param_state:
                    param_state["mu"] = torch.zeros_like(p)
                mu = param_state["mu"]
                mu.mul_(g["momentum"]).add_(d)
                p.add_(mu, alpha=-g["lr"])


class SignSGD(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum_buffer" not in state:
                    buf = state["momentum_buffer"] = torch.clone(p.grad).detach()
                else:
                    buf = state["momentum_buffer"]
                    buf.mul_(group["momentum"]).add_(p.grad, alpha=1 - group["momentum"])
                p.data = p.data - group["lr"] * torch.sign(buf)


def newton_schulz(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.size(0) > g.size(1) else g
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        m = x @ x.T
        x = a * x + (b * m + c * m @ m) @ x
    return x.T if g.size(0) > g.size(1) else x


class Muon(Optimizer):
    def __init__(self, params: Any, lr: float = 2e-2, momentum: float = 0.95, nesterov: bool = True) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": nesterov})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                g, state = p.grad, self.state[p]
                if "buffer" not in state:
                    state["buffer"] = torch.zeros_like(g)
                buffer = state["buffer"]
                buffer.lerp_(g, 1 - group["momentum"])
                g = g.lerp_(buffer, group["momentum"]) if group["nesterov"] else buffer
                if g.ndim == 2:
                    g = newton_schulz(g) * max(1, g.size(-2) / g.size(-1)) ** 0.5
                p.add_(g, alpha=-group["lr"])


class Shampoo(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-1) -> None:
        super().__init__(params, {"lr": lr, "eps": 1e-2, "every": 2})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                grad, state, order = p.grad, self.state[p], p.grad.ndimension()
                if len(state) == 0:
                    state["step"] = 0
                    for i, size in enumerate(grad.size()):
                        state[f"pre_{i}"] = group["eps"] * torch.eye(size, dtype=grad.dtype)
                        state[f"inverse_{i}"] = grad.new_zeros(size, size)
                for i, size in enumerate(grad.size()):
                    pre, inverse = state[f"pre_{i}"], state[f"inverse_{i}"]
                    grad = grad.transpose(0, i).contiguous()
                    shape = grad.size()
                    grad = grad.view(size, -1)
                    pre.add_(grad @ grad.t())
                    if state["step"] % group["every"] == 0:
                        u, s, v = torch.linalg.svd(pre)
                        inverse.copy_(u @ s.pow(-1 / (2 * order)).diag() @ v)
                    grad = (inverse @ grad).view(shape).transpose(0, i).contiguous()
                state["step"] += 1
                p.data.add_(grad, alpha=-group["lr"])


class CosineAdamW(Optimizer):
    """Warm-up and cosine of its own count."""

    def __init__(self, params: Any, lr: float = 1e-2, warm: int = 2, total: int = 8) -> None:
        super().__init__(params, {"lr": lr, "warm": warm, "total": total})

    def rate(self, group: Any, t: Any) -> Any:
        if t < group["warm"]:
            return group["lr"] * t / group["warm"]
        done = (t - group["warm"]) / (group["total"] - group["warm"])
        return group["lr"] * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s["t"], s["m"], s["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                s["t"] += 1
                lr = self.rate(group, s["t"])
                s["m"].lerp_(p.grad, 0.1)
                s["v"].lerp_(p.grad.square(), 0.01)
                p.mul_(1 - lr * 0.1)
                p.sub_(lr * (s["m"] / (1 - 0.9 ** s["t"])) / ((s["v"] / (1 - 0.99 ** s["t"])).sqrt() + 1e-8))


class Clipping(Optimizer):
    """Clips the norm of all gradients inside of its step."""

    def __init__(self, params: Any, lr: float = 1e-1, most: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "most": most})

    @torch.no_grad()
    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.clamp_(-0.05, 0.05)
                p.sub_(p.grad * group["lr"])


class AveragedSGD(Optimizer):
    """Keeps a moving average of its weights."""

    def __init__(self, params: Any, lr: float = 1e-1, decay: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])
                state = self.state[p]
                if "average" not in state:
                    state["average"] = p.detach().clone()
                else:
                    state["average"].mul_(group["decay"]).add_(p, alpha=1 - group["decay"])


class LookaheadSGD(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-1, k: int = 2, alpha: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "k": k, "alpha": alpha})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["slow"], state["steps"] = p.clone(), 0
                p.add_(p.grad, alpha=-group["lr"])
                state["steps"] += 1
                if state["steps"] % group["k"] == 0:
                    state["slow"].add_(p - state["slow"], alpha=group["alpha"])
                    p.copy_(state["slow"])


class QHAdam(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "nus": (0.7, 1.0), "betas": (0.995, 0.999)})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            (nu1, nu2), (beta1, beta2) = group["nus"], group["betas"]
            for p in group["params"]:
                s, square = self.state[p], p.grad.mul(p.grad)
                if len(s) == 0:
                    s["w1"] = s["w2"] = 0.0
                    s["m"], s["v"] = torch.zeros_like(p), torch.zeros_like(p)
                s["w1"] = 1.0 + beta1 * s["w1"]
                s["w2"] = 1.0 + beta2 * s["w2"]
                adj1, adj2 = 1.0 - (1.0 / s["w1"]), 1.0 - (1.0 / s["w2"])
                s["m"].mul_(adj1).add_(p.grad, alpha=1.0 - adj1)
                s["v"].mul_(adj2).add_(square, alpha=1.0 - adj2)
                top = s["m"].mul(nu1).add_(p.grad, alpha=1.0 - nu1)
                below = s["v"].mul(nu2)
                p.addcdiv_(top, below.sqrt_().add_(1e-8), value=-group["lr"])


class SGDP(Optimizer):
    """SGD with projection, by a nested function."""

    def __init__(self, params: Any, lr: float = 1e-1) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9, "delta": 0.1, "nesterov": True})

    def _projected(self, p: torch.Tensor, d: torch.Tensor, grad: torch.Tensor, delta: float) -> torch.Tensor:
        def along(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cosine_similarity(x.view(1, -1), y.view(1, -1), dim=1, eps=1e-8).abs_()

        if along(grad, p).max() < delta / math.sqrt(p.numel()):
            unit = p / p.norm().add_(1e-8)
            d = d - unit * (unit * d).sum()
        return d

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["momentum"] = torch.zeros_like(p)
                buf = state["momentum"]
                buf.mul_(group["momentum"]).add_(p.grad)
                d = p.grad + group["momentum"] * buf if group["nesterov"] else buf
                if len(p.shape) > 1:
                    d = self._projected(p, d, p.grad, group["delta"])
                p.add_(d, alpha=-group["lr"])


class NovoGrad(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.95, 0.98)})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["m"] = torch.zeros_like(p)
                    state["v"] = torch.zeros([]).to(p)
                m, v = state["m"], state["v"]
                norm = torch.sum(torch.pow(p.grad, 2))
                if v == 0:
                    v.copy_(norm)
                else:
                    v.mul_(beta2).add_(norm, alpha=1 - beta2)
                grad = p.grad / (v.sqrt() + 1e-8)
                m.mul_(beta1).add_(grad)
                p.add_(m, alpha=-group["lr"])


class A2Grad(Optimizer):
    def __init__(self, params: Any, lr: float = 1.0, beta: float = 10.0, lips: float = 10.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "lips": lips})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["alpha_k"] = 1
                    state["v_k"] = 0
                    state["avg_grad"] = p.grad.clone()
                    state["x_k"] = p.clone()
                gamma = 2 * group["lips"] / (state["step"] + 1)
                state["avg_grad"].mul_(state["step"])
                state["avg_grad"].add_(p.grad)
                state["avg_grad"].div_(state["step"] + 1)
                delta = torch.add(p.grad, state["avg_grad"], alpha=-1)
                state["v_k"] += torch.sum(delta * delta).item()
                h = math.sqrt(state["v_k"])
                state["alpha_k1"] = 2 / (state["step"] + 3)
                coefficient = 1 / (gamma + group["beta"] * h)
                x1 = state["x_k"]
                x1.add_(p.grad, alpha=-group["lr"] * coefficient)
                p.mul_(1 - state["alpha_k1"])
                p.add_(x1, alpha=state["alpha_k1"])
                p.add_(p.grad, alpha=-(1 - state["alpha_k1"]) * state["alpha_k"] * coefficient)
                state["alpha_k"] = state["alpha_k1"]
                state["step"] += 1


class Sophia(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-1) -> None:
        super().__init__(params, {"lr": lr, "rho": 0.04, "k": 2})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if len(s) == 0:
                    s["step"] = torch.tensor(0.0)
                    s["m"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                    s["h"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                if s["step"] % group["k"] == 0:
                    s["h"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                s["step"] += 1
                s["m"].mul_(0.96).add_(p.grad, alpha=0.04)
                ratio = (s["m"].abs() / (group["rho"] * s["h"] + 1e-15)).clamp(None, 1)
                p.addcmul_(s["m"].sign(), ratio, value=-group["lr"])


class ForeachAdam(Optimizer):
    """By lists of tensors."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads, ms, vs, counts = [p.grad for p in params], [], [], []
            for p in params:
                state = self.state[p]
                if not state:
                    state["step"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                ms.append(state["m"])
                vs.append(state["v"])
                counts.append(state["step"])
            torch._foreach_lerp_(ms, grads, 1 - 0.9)
            torch._foreach_mul_(vs, 0.99)
            torch._foreach_addcmul_(vs, grads, grads, 1 - 0.99)
            roots = torch._foreach_sqrt(vs)
            torch._foreach_div_(roots, [math.sqrt(1 - 0.99**count) for count in counts])
            torch._foreach_add_(roots, 1e-8)
            torch._foreach_mul_(params, 1 - group["lr"] * 0.01)
            torch._foreach_addcdiv_(params, ms, roots, [-group["lr"] / (1 - 0.9**count) for count in counts])


class Centralized(Optimizer):
    """Gradient centralisation, heavy ball, and a helper of the module."""

    def __init__(self, params: Any, lr: float = 1e-1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "dampening": 0.3})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                d = p.grad
                if d.dim() > 1:
                    d.add_(-d.mean(dim=tuple(range(1, d.dim())), keepdim=True))
                state = self.state[p]
                if state.get("buf") is None:
                    state["buf"] = d.clone()
                else:
                    state["buf"].mul_(group["momentum"]).add_(d, alpha=1 - group["dampening"])
                p.add_(state["buf"], alpha=-group["lr"])


class AMSBound(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2, final: float = 0.1, gamma: float = 1e-1) -> None:
        super().__init__(params, {"lr": lr, "final": final, "gamma": gamma})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s["step"] = 0
                    s["m"], s["v"], s["most"] = (torch.zeros_like(p) for _ in "abc")
                s["step"] += 1
                s["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                s["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                torch.max(s["most"], s["v"], out=s["most"])
                size = group["lr"] * math.sqrt(1 - 0.99 ** s["step"]) / (1 - 0.9 ** s["step"])
                lower = group["final"] * (1 - 1 / (group["gamma"] * s["step"] + 1))
                upper = group["final"] * (1 + 1 / (group["gamma"] * s["step"]))
                rates = torch.full_like(s["most"], size)
                rates.div_(s["most"].sqrt().add_(1e-8)).clamp_(lower, upper).mul_(s["m"])
                p.add_(-rates)


class Polyak(Optimizer):
    """Steps as long as the loss over the square of the gradient's norm."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "most": 0.05})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        square = sum((p.grad**2).sum() for group in self.param_groups for p in group["params"])
        for group in self.param_groups:
            size = min(loss.item() / (square.item() + 1e-8), group["most"])
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * size)
        return loss


class Storm(Optimizer):
    """STORM with a count, and a rate that falls by the cube root of the gradients so far."""

    def __init__(self, params: Any, lr: float = 1e-1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if "sum" not in s:
                    s["sum"], s["d"], s["first"] = 0.0, torch.zeros_like(p), True
                s["sum"] += float(p.grad.norm()) ** 2
                rate = group["lr"] / (1 + s["sum"]) ** (1 / 3)
                share = 1.0 if s["first"] else min(1.0, 10 * rate**2)
                s["d"].mul_(1 - share).add_(p.grad, alpha=share)
                p.add_(s["d"], alpha=-rate)
                s["first"] = False


class Rprop(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2, etas: Any = (0.5, 1.2)) -> None:
        super().__init__(params, {"lr": lr, "etas": etas})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            minus, plus = group["etas"]
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["prev"] = torch.zeros_like(p)
                    state["size"] = torch.full_like(p, group["lr"])
                sign = p.grad.mul(state["prev"]).sign()
                sign[sign.gt(0)] = plus
                sign[sign.lt(0)] = minus
                sign[sign.eq(0)] = 1
                state["size"].mul_(sign).clamp_(1e-6, 50)
                grad = p.grad.clone()
                grad[sign.eq(minus)] = 0
                p.addcmul_(grad.sign(), state["size"], value=-1)
                state["prev"].copy_(grad)


class AdaMod(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "beta3": 0.9})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s["step"], s["m"], s["v"], s["rates"] = 0, *(torch.zeros_like(p) for _ in range(3))
                s["step"] += 1
                s["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                s["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                size = group["lr"] * math.sqrt(1 - 0.99 ** s["step"]) / (1 - 0.9 ** s["step"])
                rates = torch.full_like(p, size).div_(s["v"].sqrt().add_(1e-8))
                s["rates"].mul_(group["beta3"]).add_(rates, alpha=1 - group["beta3"])
                p.sub_(torch.minimum(rates, s["rates"]) * s["m"])


class Tiger(Optimizer):
    """Assigns the Parameter's data, with a decay by its dimension."""

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.965) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            beta, lr = group["beta"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "m" not in state:
                    state["m"] = torch.zeros_like(p.data)
                state["m"] = beta * state["m"] + (1 - beta) * p.grad.data
                new = p.data - lr * state["m"].sign()
                if p.dim() > 1:
                    new = new - lr * 0.01 * p.data
                p.data = new
        return loss


class Gravity(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if len(s) == 0:
                    s["t"], s["v"] = 0, torch.zeros_like(p)
                s["t"] += 1
                beta = (group["beta"] * s["t"] + 1) / (s["t"] + 2)
                m = 1 / torch.max(torch.abs(p.grad))
                zeta = p.grad / (1 + (p.grad / m) ** 2)
                s["v"] = beta * s["v"] + (1 - beta) * zeta
                p -= group["lr"] * s["v"]


class ClosedAggMo(Optimizer):
    """AggMo: several buffers, each with a damping of its own."""

    def __init__(self, params: Any, lr: float = 1e-1, betas: Any = (0.0, 0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                for beta in group["betas"]:
                    buffer = self.state[p].setdefault(f"buffer_{beta}", torch.zeros_like(p))
                    buffer.mul_(beta).add_(p.grad)
                    p.sub_(buffer, alpha=group["lr"] / len(group["betas"]))


class ScheduleFree(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-1) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9, "k": 0, "weight_sum": 0.0, "lr_max": -1.0, "warmup": 3})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            k, warm = group["k"], group["warmup"]
            share = (k + 1) / warm if k < warm else 1.0
            lr = group["lr"] * share
            lr_max = group["lr_max"] = max(lr, group["lr_max"])
            weight = ((k + 1) ** 0.0) * (lr_max**2.0)
            total = group["weight_sum"] = group["weight_sum"] + weight
            c = weight / total
            for p in group["params"]:
                state = self.state[p]
                if "z" not in state:
                    state["z"] = torch.clone(p)
                p.lerp_(end=state["z"], weight=c)
                p.add_(p.grad, alpha=lr * (group["beta"] * (1 - c) - 1))
                state["z"].sub_(p.grad, alpha=lr)
            group["k"] = k + 1


class Lookahead(Optimizer):
    """Around an optimizer of torch, whose groups it shares."""

    def __init__(self, params: Any, lr: float = 1e-2, k: int = 2, alpha: float = 0.5) -> None:
        self.base = torch.optim.Adam(params, lr)
        super().__init__(self.base.param_groups, self.base.defaults)
        self.param_groups = self.base.param_groups
        self.k, self.alpha = k, alpha
        for group in self.param_groups:
            group["counter"] = 0

    def update(self, group: Any) -> None:
        for fast in group["params"]:
            slow = self.state[fast]["slow"]
            slow += (fast.data - slow) * self.alpha
            fast.data.copy_(slow)

    def step(self, closure: Any = None) -> Any:
        loss = self.base.step()
        for group in self.param_groups:
            for fast in group["params"]:
                if "slow" not in self.state[fast]:
                    self.state[fast]["slow"] = torch.zeros_like(fast.data)
                    self.state[fast]["slow"].copy_(fast.data)
            if group["counter"] == 0:
                self.update(group)
            group["counter"] = (group["counter"] + 1) % self.k
        return loss


class Averaging(Optimizer):
    """Around an optimizer of torch: a mean of the weights of each second step, by a count of its own."""

    def __init__(self, params: Any, lr: float = 1e-1) -> None:
        groups = list(params)
        super().__init__(groups, {"lr": lr})
        self.inner = torch.optim.SGD([dict(group) for group in groups], lr, momentum=0.9, dampening=0.4)
        self.steps, self.averaged = 0, 0
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mean"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["mean"].add_((p - self.state[p]["mean"]) / float(self.averaged + 1))
            self.averaged += 1


KINDS = [
    Adan, TextbookAdamW, RAdam, NAdam, AdaBelief, Yogi, Adafactor, Lamb, LARS, SignSGD, Muon, Shampoo, CosineAdamW,
    Clipping, AveragedSGD, LookaheadSGD, QHAdam, SGDP, NovoGrad, A2Grad, Sophia, ForeachAdam, Centralized, AMSBound,
    Polyak, Storm, Rprop, AdaMod, Tiger, Gravity, ClosedAggMo, ScheduleFree, Lookahead, Averaging,
]  # fmt: skip
WITH_CLOSURE = {TextbookAdamW, Lamb, Polyak, Tiger}


def made(kind: Any, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any]:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    groups: list[dict[str, Any]] = [{"params": list(net[0].parameters())}, {"params": list(net[2].parameters())}]
    optimizer = kind(groups)
    optimizer.param_groups[1]["lr"] *= 0.5
    return net, optimizer


def batches(count: int = 6, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, dtype=torch.float64, generator=source).to(dtype) for _ in range(count)]


def stepped(net: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (net(x) - 1).square().mean()
        loss.backward()
        return loss

    if type(optimizer) in WITH_CLOSURE:
        optimizer.step(closure)
        return net(x).sum()
    loss = closure()
    optimizer.step()
    return loss


def assert_same(a: nn.Module, b: nn.Module, rtol: float = 1e-9) -> None:
    for mine, other in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=rtol / 100)


@pytest.mark.parametrize("kind", KINDS)
def test_six_runs_equal_plain_torch(kind: Any) -> None:
    (plain, optimizer), (net, recorded) = made(kind), made(kind)
    with tfnb.record():
        x = tfnb.placeholder(batches()[0])
        stepped(net, recorded, x)
        step = tfnb.effects()
    assert len(recorded.state) == len(optimizer.state)
    for number, batch in enumerate(batches()):
        if number == 3:
            for opt in (optimizer, recorded):
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
                for group in opt.param_groups:
                    group["lr"] *= 0.3
        stepped(plain, optimizer, batch)
        tfnb.run(step, {x: batch})
        assert_same(net, plain)
    found, wanted = recorded.state_dict()["state"], optimizer.state_dict()["state"]
    assert found.keys() == wanted.keys()
    for place, entries in wanted.items():
        assert found[place].keys() == entries.keys()
        for name, value in entries.items():
            torch.testing.assert_close(torch.as_tensor(found[place][name]).double(), torch.as_tensor(value).double())
