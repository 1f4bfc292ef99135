"""The four convolutional networks of OSDI table 1 and the shapes of their weights. Imports nothing of any library.

A layer is a tuple: ("conv", channels, kernel, stride, padding), ("pool", kernel, stride, padding), ("average",),
("mix", one, reduce 3, three, reduce 5, five, projection), ("fc", width). ReLU follows every conv and every fc, also the
last.
"""

from __future__ import annotations

from collections.abc import Iterator

Layer = tuple  # of a name and whole numbers
Shape = tuple[int, ...]


def _vgg(*widths: int) -> Iterator[Layer]:
    """3x3 convolutions; 0 is a pooling."""
    for width in widths:
        yield ("conv", width, 3, 1, 1) if width else ("pool", 2, 2, 0)


IMAGES = {"alexnet": 224, "overfeat": 231, "vgg": 224, "googlenet": 224}
LAYERS: dict[str, tuple[Layer, ...]] = {
    "alexnet": (
        ("conv", 64, 11, 4, 2), ("pool", 3, 2, 0), ("conv", 192, 5, 1, 2), ("pool", 3, 2, 0), ("conv", 384, 3, 1, 1),
        ("conv", 256, 3, 1, 1), ("conv", 256, 3, 1, 1), ("pool", 3, 2, 0), ("fc", 4096), ("fc", 4096), ("fc", 1000),
    ),
    "overfeat": (
        ("conv", 96, 11, 4, 0), ("pool", 2, 2, 0), ("conv", 256, 5, 1, 0), ("pool", 2, 2, 0), ("conv", 512, 3, 1, 1),
        ("conv", 1024, 3, 1, 1), ("conv", 1024, 3, 1, 1), ("pool", 2, 2, 0), ("fc", 3072), ("fc", 4096), ("fc", 1000),
    ),
    "vgg": (
        *_vgg(64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0), ("fc", 4096), ("fc", 4096), ("fc", 1000),
    ),
    "googlenet": (
        ("conv", 64, 7, 2, 3), ("pool", 3, 2, 1), ("conv", 64, 1, 1, 0), ("conv", 192, 3, 1, 1), ("pool", 3, 2, 1),
        ("mix", 64, 96, 128, 16, 32, 32), ("mix", 128, 128, 192, 32, 96, 64), ("pool", 3, 2, 1),
        ("mix", 192, 96, 208, 16, 48, 64), ("mix", 160, 112, 224, 24, 64, 64), ("mix", 128, 128, 256, 24, 64, 64),
        ("mix", 112, 144, 288, 32, 64, 64), ("mix", 256, 160, 320, 32, 128, 128), ("pool", 3, 2, 1),
        ("mix", 256, 160, 320, 32, 128, 128), ("mix", 384, 192, 384, 48, 128, 128), ("average",), ("fc", 1000),
    ),
}  # fmt: skip


def branches(mix: Layer) -> tuple[tuple[Layer, ...], ...]:
    """The four paths of an inception block."""
    _, one, reduce3, three, reduce5, five, projection = mix
    return (
        (("conv", one, 1, 1, 0),),
        (("conv", reduce3, 1, 1, 0), ("conv", three, 3, 1, 1)),
        (("conv", reduce5, 1, 1, 0), ("conv", five, 5, 1, 2)),
        (("pool", 3, 1, 1), ("conv", projection, 1, 1, 0)),
    )


def _grown(layers: tuple[Layer, ...], channels: int, grid: int) -> tuple[list[list[Shape]], int, int]:
    """Weight shapes of each layer, and the channels and grid after the last."""
    found: list[list[Shape]] = []
    for name, *sizes in layers:
        shapes: list[Shape] = []
        if name == "fc":
            shapes, channels, grid = [(sizes[0], channels * grid**2), (sizes[0],)], sizes[0], 1
        elif name == "average":
            grid = 1
        elif name == "mix":
            paths = [_grown(path, channels, grid) for path in branches((name, *sizes))]
            shapes = [shape for path in paths for layer in path[0] for shape in layer]
            channels = sum(path[1] for path in paths)
        else:
            kernel, stride, padding = sizes[-3:]
            grid = (grid + 2 * padding - kernel) // stride + 1
            if name == "conv":
                shapes, channels = [(sizes[0], channels, kernel, kernel), (sizes[0],)], sizes[0]
        found.append(shapes)
    return found, channels, grid


def shapes(net: str) -> list[list[Shape]]:
    """Shapes of weight and bias of each layer, in torch's order: out, in, height, width."""
    return _grown(LAYERS[net], 3, IMAGES[net])[0]
