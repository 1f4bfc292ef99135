"""A DQN whose decisions are conditionals of the graph, beside one whose client decides (EuroSys'18, section 6.5).

An agent walks on a grid of 8 by 8 places. A step acts, writes what came of it into a memory, learns from a batch of
memories every few steps, and renews the target net now and then. In the graph that is one run with four conditionals;
the client asks for the parts by runs of their own, as its Python decides, and keeps the agent's place and the clock.
Both take the same drawn numbers from a table, and have to end with the same weights and returns to the last bit. Each
round takes all in turns; the median of the rounds' ratios counts. Beside them plain PyTorch, whose world is Python
alone and whose gradients are autograd's, which may differ in the last bits.

    python tests/benchmarks/bench_dqn.py [--quick] [--steps 200] [--rounds 30] [--seeds 5] [--learn-every 4] [--by run]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import tfnb

SIDE, MEMORY, BATCH, WIDTH = 8, 4096, 32, 64
PLACES, LONGEST, RENEW, FILL = SIDE * SIDE, 64, 200, 128
TARGETS = {"client / graph": 1.2}
LONG, FLOAT = torch.int64, torch.float32
KINDS = {"place": LONG, "action": LONG, "reward": FLOAT, "next": LONG, "won": FLOAT}


def nets(seed: int) -> tuple[nn.Sequential, nn.Sequential]:
    """The net, and its target."""
    torch.manual_seed(seed)
    made = [nn.Sequential(nn.Linear(PLACES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1].requires_grad_(False)


@dataclass
class Draws:
    """What chance says in each step: whether to explore, and how; which memories to learn from."""

    explore: torch.Tensor
    ways: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, steps: int, seed: int) -> Draws:
        """Less and less exploring; rows among what is stored by then."""
        generator = torch.Generator().manual_seed(seed)
        least = torch.linspace(1.0, 0.1, steps)
        stored = torch.arange(1, steps + 1).clamp(max=MEMORY)[:, None]
        rows = (torch.rand(steps, BATCH, generator=generator) * stored).long()
        coins = torch.rand(steps, generator=generator) < least
        return cls(coins, torch.randint(0, 4, (steps,), generator=generator), rows)


class Agent:
    """The parts of a step as torch code, on nets and memories of its own."""

    def __init__(self, seed: int) -> None:
        self.net, self.target = nets(seed)
        rows = {name: torch.zeros(MEMORY, dtype=kind) for name, kind in KINDS.items()}
        self.memory = {name: tfnb.Variable(row, name=name, trainable=False) for name, row in rows.items()}
        self.optimizer = tfnb.train.Adam(0.001)

    def act(self, place: Any, explore: Any, way: Any) -> Any:
        """The action at a place."""
        return tfnb.cond(explore, lambda: way, lambda: self.net(F.one_hot(place, PLACES).float()).argmax())

    def move(self, place: Any, action: Any) -> tuple[Any, Any, Any]:
        """Where an action leads, the reward, and whether that is the goal."""
        row, column = place // SIDE, place % SIDE
        down = (row + (action == 1).long() - (action == 0).long()).clamp(0, SIDE - 1)
        right = (column + (action == 3).long() - (action == 2).long()).clamp(0, SIDE - 1)
        there = down * SIDE + right
        won = there == PLACES - 1
        return there, torch.where(won, 1.0, -0.01), won

    def remember(self, slot: Any, *values: Any) -> list[Any]:
        """One row of each memory."""
        pairs = zip(self.memory.values(), values, strict=True)
        return [kept.scatter_update(slot.reshape(1), value.reshape(1)) for kept, value in pairs]

    def learn(self, rows: Any) -> Any:
        """A step of Q-learning on some rows of the memories."""
        seen = {name: kept.read()[rows] for name, kept in self.memory.items()}
        values = self.net(F.one_hot(seen["place"], PLACES).float()).gather(1, seen["action"][:, None])[:, 0]
        best = self.target(F.one_hot(seen["next"], PLACES).float()).amax(1).detach()
        loss = F.smooth_l1_loss(values, seen["reward"] + 0.97 * (1 - seen["won"]) * best)
        return self.optimizer.minimize(loss, list(self.net.parameters()))

    def renew(self) -> Any:
        """The target becomes the net."""
        for kept, new in zip(self.target.parameters(), self.net.parameters(), strict=True):
            kept.copy_(new)
        return tfnb.group(*self.target.parameters())

    def weights(self) -> list[torch.Tensor]:
        """Of both nets."""
        return [value.detach().clone() for net in (self.net, self.target) for value in net.parameters()]


def caller(graph: tfnb.Graph, options: argparse.Namespace) -> Callable[..., Callable[..., Any]]:
    """What makes calls of fetches: callables made once, or `Session.run` each time."""
    session = tfnb.Session(graph, compile="off")
    if options.by == "callable":
        return session.make_callable
    return lambda fetches, feeds: lambda *values: session.run(fetches, dict(zip(feeds, values, strict=True)))


def in_graph(seed: int, options: argparse.Namespace) -> tuple[Agent, Callable[[Draws, int, int], list[float]]]:
    """The agent, and its steps from one to another; what these gave."""
    agent = Agent(seed)
    place, age, now = (tfnb.Variable(torch.tensor(0), name=name, trainable=False) for name in ("place", "age", "now"))

    @tfnb.autograph
    def step(explore: Any, way: Any, rows: Any) -> Any:
        here, clock = place.read(), now.read()
        action = agent.act(here, explore, way)
        there, reward, won = agent.move(here, action)
        done = won | (age.read() >= LONGEST - 1)
        agent.remember(clock % MEMORY, here, action, reward, there, won.float())
        if done:
            place.assign(torch.zeros_like(there))
            age.assign(torch.tensor(0))
        else:
            place.assign(there)
            age.assign_add(torch.tensor(1))
        if (clock >= FILL) & (clock % options.learn_every == 0):
            agent.learn(rows)
        if clock % RENEW == 0:
            agent.renew()
        now.assign_add(torch.tensor(1))
        both = (*agent.net.parameters(), *agent.target.parameters())
        return reward, tfnb.group(place, age, now, *agent.memory.values(), *both)

    with tfnb.record() as graph:
        explore = tfnb.placeholder(torch.tensor(True), shape=())
        way = tfnb.placeholder(torch.tensor(0), shape=())
        rows = tfnb.placeholder(torch.zeros(BATCH, dtype=torch.int64), shape=(BATCH,))
        fetches = list(step(explore, way, rows))
    call = caller(graph, options)(fetches, [explore, way, rows])

    def run(draws: Draws, start: int, stop: int) -> list[float]:
        return [call(draws.explore[i], draws.ways[i], draws.rows[i])[0].item() for i in range(start, stop)]

    return agent, run


def by_client(seed: int, options: argparse.Namespace) -> tuple[Agent, Callable[[Draws, int, int], list[float]]]:
    """The same, where Python decides between runs."""
    agent = Agent(seed)
    with tfnb.record() as graph:
        place, way, slot = (tfnb.placeholder(torch.tensor(0), shape=()) for _ in range(3))
        explore = tfnb.placeholder(torch.tensor(True), shape=())
        rows = tfnb.placeholder(torch.zeros(BATCH, dtype=torch.int64), shape=(BATCH,))
        action = agent.act(place, explore, way)
        there, reward, won = agent.move(place, action)
        values = place, action, reward, there, won.float()
        fed = [tfnb.placeholder(torch.zeros((), dtype=kind), shape=()) for kind in KINDS.values()]
        learn = agent.learn(rows)
        write = tfnb.group(*agent.remember(slot, *fed))  # last: what is recorded below it would see it
    with tfnb.record() as other:  # in the recording of `learn` these writes would belong to its step
        renew = agent.renew()
    make = caller(graph, options)
    acting = make([*values[1:], won], [place, explore, way])
    writing = make(write, [slot, *fed])
    learning, renewing = make(learn, [rows]), caller(other, options)(renew, [])
    state = {"place": torch.tensor(0), "age": 0}

    def run(draws: Draws, start: int, stop: int) -> list[float]:
        rewards = []
        for i in range(start, stop):
            here = state["place"]
            *seen, won = acting(here, draws.explore[i], draws.ways[i])
            writing(torch.tensor(i % MEMORY), here, *seen)
            done = bool(won) or state["age"] >= LONGEST - 1
            state.update(place=torch.tensor(0) if done else seen[2], age=0 if done else state["age"] + 1)
            if i >= FILL and i % options.learn_every == 0:
                learning(draws.rows[i])
            if i % RENEW == 0:
                renewing()
            rewards.append(seen[1].item())
        return rewards

    return agent, run


def in_torch(seed: int, options: argparse.Namespace) -> tuple[list[Any], Callable[[Draws, int, int], list[float]]]:
    """Plain PyTorch, eager: the world in Python's numbers, memories written in place, the fused Adam."""
    net, target = nets(seed)
    memory = {name: torch.zeros(MEMORY, dtype=kind) for name, kind in KINDS.items()}
    optimizer = torch.optim.Adam(net.parameters(), 0.001, fused=True)
    state = {"place": 0, "age": 0}

    def act(place: int, explore: Any, way: Any) -> int:
        if explore:
            return int(way)
        with torch.no_grad():
            return int(net(F.one_hot(torch.tensor(place), PLACES).float()).argmax())

    def move(place: int, action: int) -> tuple[int, float, bool]:
        row, column = divmod(place, SIDE)
        down = min(max(row + (action == 1) - (action == 0), 0), SIDE - 1)
        right = min(max(column + (action == 3) - (action == 2), 0), SIDE - 1)
        won = down * SIDE + right == PLACES - 1
        return down * SIDE + right, 1.0 if won else -0.01, won

    def learn(rows: torch.Tensor) -> None:
        seen = {name: kept[rows] for name, kept in memory.items()}
        values = net(F.one_hot(seen["place"], PLACES).float()).gather(1, seen["action"][:, None])[:, 0]
        with torch.no_grad():
            best = target(F.one_hot(seen["next"], PLACES).float()).amax(1)
            wanted = seen["reward"] + 0.97 * (1 - seen["won"]) * best
        optimizer.zero_grad()
        F.smooth_l1_loss(values, wanted).backward()
        optimizer.step()

    def run(draws: Draws, start: int, stop: int) -> list[float]:
        rewards = []
        for i in range(start, stop):
            here = state["place"]
            action = act(here, draws.explore[i], draws.ways[i])
            there, reward, won = move(here, action)
            for name, value in zip(KINDS, (here, action, reward, there, won), strict=True):
                memory[name][i % MEMORY] = value
            done = won or state["age"] >= LONGEST - 1
            state.update(place=0 if done else there, age=0 if done else state["age"] + 1)
            if i >= FILL and i % options.learn_every == 0:
                learn(draws.rows[i])
            if i % RENEW == 0:
                target.load_state_dict(net.state_dict())
            rewards.append(reward)
        return rewards

    return [*net.parameters(), *target.parameters()], run


DRIVERS = {"graph": in_graph, "client": by_client, "torch": in_torch}


def checked(steps: int, seed: int, options: argparse.Namespace) -> float:
    """The sum of rewards of some steps, which both have in common as the weights; raises AssertionError."""
    draws = Draws.of(steps, seed)
    (one, graph), (other, client) = (make(seed, options) for make in (in_graph, by_client))
    rewards = graph(draws, 0, steps)
    assert rewards == client(draws, 0, steps), f"seed {seed}: other rewards"
    assert all(map(torch.equal, one.weights(), other.weights())), f"seed {seed}: other weights"
    return sum(rewards)


def measured(options: argparse.Namespace) -> dict[str, list[float]]:
    """Steps per second of each driver in each round."""
    warm, clock = 2 * FILL, time.thread_time if options.cpu else time.perf_counter
    draws = Draws.of(warm + options.rounds * options.steps, 0)
    runs = {name: make(0, options)[1] for name, make in DRIVERS.items()}
    for run in runs.values():
        run(draws, 0, warm)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(options.rounds):
        start = warm + turn * options.steps
        for name in runs if turn % 2 else reversed(runs):
            before = clock()
            runs[name](draws, start, start + options.steps)
            rates[name].append(options.steps / (clock() - before))
    return rates


def main() -> None:
    """Check, measure, print; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps")
    parser.add_argument("--steps", type=int, default=200, help="of a round")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--check", type=int, default=2000, help="steps that are compared for each seed")
    parser.add_argument("--learn-every", type=int, default=4)
    parser.add_argument("--by", choices=("callable", "run"), default="callable", help="how parts are called")
    parser.add_argument("--cpu", action="store_true", help="count processor time, where others use the machine")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.rounds, options.seeds, options.check = 200, 3, 1, 400
    torch.set_num_threads(1)
    returns = [checked(options.check, seed, options) for seed in range(options.seeds)]
    spread = statistics.pstdev(returns)
    print(f"equal rewards and weights in {options.check} steps; return {statistics.mean(returns):.1f} +- {spread:.1f}")
    rates = measured(options)
    ratios = {}
    for name in ("client", "torch"):
        ratios[name] = statistics.median(a / b for a, b in zip(rates["graph"], rates[name], strict=True))
    shown = ", ".join(f"{name} {statistics.median(found):,.0f}" for name, found in rates.items())
    than = (
        f"{ratios['client']:.2f} times as many steps as by the client, {ratios['torch']:.2f} times as in plain PyTorch"
    )
    print(f"in the graph {than}; steps/s: {shown}")
    print(json.dumps({**rates, "ratio": ratios["client"], "ratios": ratios, "returns": returns, "targets": TARGETS}))


if __name__ == "__main__":
    main()
