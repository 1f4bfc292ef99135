"""CUDA graphs of torch: the implementation of a device for `tfnb.execution.tiers.captured_steps`.

NOTE (torch 2.13): ``torch.cuda.graph`` leaves its stream current where ending a capture fails, hence the plain calls.
Only one capture may be under way in a process.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from tfnb.graph.collector import uncollected
from tfnb.interrupts import no_interrupt

_one = threading.Lock()


class CudaGraphs:
    """Captures on one CUDA device, in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = torch.cuda.Stream(device)
        self._pool: Any = None
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()  # those that lie in the pool
        self._last: torch.cuda.Stream | None = None  # of the last launch

    def generator(self) -> torch.Generator:
        """A generator for one random op of captured code."""
        return torch.Generator(self.device)

    def warm(self, call: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """``call()`` on the stream of captures, so that libraries have their workspaces there."""
        here = torch.cuda.current_stream(self.device)
        self._side.wait_stream(here)
        with torch.cuda.stream(self._side):
            outs = call()
        here.wait_stream(self._side)
        for out in outs:
            if isinstance(out, torch.Tensor) and out.is_cuda:
                out.record_stream(here)
        return outs

    def capture(
        self, call: Callable[[], Sequence[Any]], generators: Sequence[torch.Generator]
    ) -> tuple[Sequence[Any], Callable[[], None]]:
        """The results of ``call``, in the pool's memory, and the function that launches the graph; capturing does not
        run it.
        """
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        # A collection would free memory of the device, which a capture forbids.
        with _one, no_interrupt(), uncollected(), torch.cuda.stream(self._side):
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()  # the pool takes nothing of what the allocator keeps for others
            if not self._graphs:  # a pool whose last graph is gone takes no other one
                self._pool = torch.cuda.graph_pool_handle()
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                outs = call()
            except BaseException:
                with suppress(RuntimeError):  # the capture is void, which ending it says once more
                    graph.capture_end()
                graph.reset()
                self._drawing_again(generators)
                raise
            graph.capture_end()
        self._graphs.add(graph)
        return outs, lambda: self._launch(graph)

    def _drawing_again(self, generators: Sequence[torch.Generator]) -> None:
        """NOTE (torch 2.11): after a capture that failed generators draw for a capture only, torch's own one too."""
        for generator in (torch.cuda.default_generators[self.device.index], *generators):
            generator.graphsafe_set_state(generator.clone_state())

    def after(self) -> None:
        """Let the current stream wait for the last launch, and for readers of its results, on other streams."""
        here = torch.cuda.current_stream(self.device)
        if self._last is not None and here != self._last:
            here.wait_stream(self._last)

    def _launch(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()
        self._last = torch.cuda.current_stream(self.device)
