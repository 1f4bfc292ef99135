"""Summaries: values of runs as TensorBoard event files, through torch.utils.tensorboard. May import graph.

TensorBoard is an optional package: ``pip install 'tfnb[tensorboard]'``.
"""

from __future__ import annotations

import operator
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tfnb.errors import InvalidArgument, NotFound, ShapeError
from tfnb.graph import Graph
from tfnb.graph.device_request import readable
from tfnb.graph.spec import dtype_name, tensor_of

_MOST = 1e20  # the last edge of the bins


class Writer:
    """Writes summaries into event files of a folder; a context manager that closes its files.

    Values are what `tfnb.run` gave: tensors, arrays or numbers. step: the number of the training step.

    >>> import tempfile
    >>> if find_spec("tensorboard"):
    ...     with tempfile.TemporaryDirectory() as folder, Writer(folder) as writer:
    ...         writer.scalar("loss", 0.5, step=1)
    """

    def __init__(self, folder: str | Path) -> None:
        if find_spec("tensorboard") is None:
            raise NotFound("summaries need the package tensorboard, which is not here: pip install 'tfnb[tensorboard]'")
        from torch.utils.tensorboard import SummaryWriter  # listed exception: optional extra [tensorboard]

        self.folder = str(folder)
        self._writer: Any = SummaryWriter(self.folder)

    def scalar(self, name: str, value: torch.Tensor | float, step: int) -> None:
        """One number. Raises ShapeError for a value that has more."""
        number = self._given(name, value, step)
        if number.numel() != 1:
            raise ShapeError(f"summary {name}: a scalar has one number, this is {list(number.shape)}: take its mean()")
        self._open().add_scalar(name, number.item(), step)

    def histogram(self, name: str, values: torch.Tensor, step: int) -> None:
        """How many of the values lie where. Raises InvalidArgument for none, or values beyond 1e20 or not finite."""
        found = self._given(name, values, step)
        wrong = int((~(found.abs() <= _MOST)).sum()) if found.dtype is not torch.bool else 0
        if found.numel() == 0 or wrong:
            raise InvalidArgument(
                f"summary {name}: a histogram is of values up to {_MOST:g}; of {found.numel()} values {wrong} are "
                "larger or not finite"
            )
        self._open().add_histogram(name, found.float() if found.dtype is torch.bfloat16 else found, step)

    def image(self, name: str, image: torch.Tensor, step: int) -> None:
        """A picture ``[C, H, W]`` or ``[H, W]``, or several ``[N, C, H, W]``: floats from 0 to 1, bool, or uint8."""
        shown = self._given(name, image, step)
        layout = {2: "HW", 3: "CHW", 4: "NCHW"}.get(shown.dim())
        if layout is None or (shown.dim() > 2 and shown.shape[-3] not in (1, 3)):
            raise ShapeError(
                f"summary {name}: an image is [H, W], [C, H, W] or [N, C, H, W] with 1 or 3 channels, "
                f"this is {list(shown.shape)}"
            )
        is_color = shown.dtype in (torch.uint8, torch.bool) or shown.dtype.is_floating_point
        if not is_color or not shown.numel() or not bool(torch.isfinite(shown).all()):
            raise InvalidArgument(
                f"summary {name}: an image is of finite floats from 0 to 1, bool or uint8, this is {shown.dtype} "
                f"{list(shown.shape)}{' with others' if is_color and shown.numel() else ''}"
            )
        add = self._open().add_image if shown.dim() < 4 else self._open().add_images
        add(name, shown, step, dataformats=layout)

    def text(self, name: str, text: str, step: int) -> None:
        """A text, as Markdown."""
        self._given(name, 0, step)
        self._open().add_text(name, str(text), step)

    def graph(self, graph: Graph) -> None:
        """The nodes of a graph, with their scopes, shapes and devices."""
        from tensorboard.compat.proto.config_pb2 import RunMetadata  # listed exceptions: optional extra [tensorboard]
        from tensorboard.compat.proto.graph_pb2 import GraphDef

        if not isinstance(graph, Graph):
            raise InvalidArgument(f"summary of a graph takes a tfnb.Graph, and was given {graph!r:.60}")
        shown, contents = GraphDef(), graph.contents
        for node in graph.nodes:
            inputs = [f"{contents.by_id[v.node].name}:{v.index}" for v in node.inputs]
            made = shown.node.add(name=node.name, op=node.op, input=inputs, device=readable(node.device) or "")
            for index, spec in enumerate(node.outputs):
                made.attr[f"output_{index}"].s = f"{dtype_name(spec.dtype)}{list(map(str, spec.shape))}".encode()
        self._open()._get_file_writer().add_graph((shown, RunMetadata()))

    def _given(self, name: str, value: object, step: int) -> torch.Tensor:
        """The value of a summary as a local tensor; raises InvalidArgument for invalid names, steps and values."""
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"a summary has a name, not {name!r}")
        try:
            operator.index(step)
        except (TypeError, ValueError):
            raise InvalidArgument(f"summary {name}: step is the number of a step, not {step!r}") from None
        found = tensor_of(value, None, f"summary {name}").detach().cpu()
        if found.dtype.is_complex:
            raise InvalidArgument(f"summary {name} is of real numbers, not of {found.dtype}: take abs() or real")
        return found

    def flush(self) -> None:
        """Everything so far is in the files."""
        self._open().flush()

    def close(self) -> None:
        """The end of the files; closing twice is the same as once."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> Any:
        if self._writer is None:
            raise InvalidArgument(f"the summary writer of {self.folder} is closed: make another one")
        return self._writer

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
