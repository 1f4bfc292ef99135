"""Values pinned on the servers at one step, until the servers have written them to a checkpoint.

What a server cannot write, because it does not see the folder, is fetched, and written here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from tfnb.cluster.engine.engine import Engine, Pins
from tfnb.cluster.wire.transport import parse_address
from tfnb.errors import CheckpointWriteError, TfnbError
from tfnb.graph import Spec, Variable
from tfnb.placement.placement import Homes, Piece, read_from
from tfnb.state import manifests
from tfnb.state.checkpoint_stores import CheckpointStore, LocalStore
from tfnb.state.manifests import Layout, Shard


@dataclass(frozen=True)
class PinnedValues:
    """Variables by label. ``say``: tells the user, once, that servers do not see a local folder. ``complete``: gets the
    file of a complete checkpoint.

    ``release``: the servers give the values up. That happens once, at the latest when nothing refers to this any more,
    as after an interrupt of the call that pinned them.
    """

    engine: Engine
    variables: Mapping[str, Variable]
    homes: Homes
    pins: Pins
    say: Callable[[str, str], None]
    complete: Callable[[Path | str], None]
    release: Callable[[], Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        release = weakref.finalize(self, self.engine.link.post, self.engine.unpin, self.pins)
        release.atexit = False  # type: ignore[misc]  # then servers are gone, or are left with all that they hold
        object.__setattr__(self, "release", release)

    @property
    def specs(self) -> dict[str, Spec]:
        """The spec of each Variable, by label."""
        return {label: Spec(one.spec.dtype, tuple(one.shape)) for label, one in self.variables.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return sum(prod(one.shape) * one.spec.dtype.itemsize for one in self.variables.values())

    def acknowledge(self, file: Path | str) -> None:
        """The checkpoint is complete: a training can go on from it, should a server be lost."""
        self.complete(file)

    def write_shards(self, store: CheckpointStore, whole: Collection[Shard]) -> Layout:
        """Let the servers write; the values are given up then. Raises CheckpointWriteError, also for a lost server."""
        link = self.engine.link
        try:
            with manifests.probed(store) as probe:
                about = {"store": str(store), "probe": probe}
                writing = link.start_aside(self.engine.write_shards, self.pins, self._labels(), about, whole)
                found = link.wait(writing, None, "writing shards of a checkpoint")
            there = set(store.listed(manifests.FOLDER))
            unseen = [shard for shard, layout in found.items() if layout is None]
            layouts = {
                shard: layout for shard, layout in found.items()
                if layout is not None and all(one.name in there for some in layout.values() for one in some)
            }  # fmt: skip
            self._say_unseen(store, unseen)
            layouts |= self._written_here(store, whole, found.keys() - layouts.keys())  # some are not there, or no more
        except CheckpointWriteError:
            raise
        except TfnbError as error:  # a server is lost, or it gave up the values for later pins
            first = error.message.partition("\n")[0]
            raise CheckpointWriteError(f"cannot write a checkpoint to {store}: {first}") from error
        finally:
            self.release()
        return {
            label: tuple(shard for piece in self._pieces(one) for shard in layouts[piece.shard][piece.key])
            for label, one in self.variables.items()
        }

    def _pieces(self, variable: Variable) -> tuple[Piece, ...]:
        return read_from(self.homes[variable.key])

    def _labels(self) -> dict[int, dict[str, str]]:
        """For each shard: labels by the keys of its pieces."""
        found: dict[int, dict[str, str]] = {shard: {} for shard in self.pins.keys}
        for label, variable in self.variables.items():
            for piece in self._pieces(variable):
                found[piece.shard][piece.key] = label
        return found

    def _written_here(
        self, store: CheckpointStore, whole: Collection[Shard], shards: Collection[int]
    ) -> dict[int, dict[str, tuple[Shard, ...]]]:  # fmt: skip
        """Fetch and write, from this process, values of shards that their servers did not write there."""
        if not shards:
            return {}
        link, labels = self.engine.link, self._labels()
        values = link.wait(link.start_aside(self.engine.fetched, self.pins, shards), None, "fetching pinned values")
        layouts = {}
        for shard in shards:
            mine = labels[shard]
            layout = manifests.write_shards(store, {label: values[key] for key, label in mine.items()}, whole)
            layouts[shard] = {key: layout[label] for key, label in mine.items()}
        return layouts

    def _say_unseen(self, store: CheckpointStore, unseen: Collection[int]) -> None:
        """Tell the user which servers do not see a local folder."""
        if unseen and isinstance(store, LocalStore):
            members = dict.fromkeys(self.engine.shards[shard] for shard in sorted(unseen))
            names = ", ".join(f"{one.name} on {parse_address(one.peer.addr)[1]}" for one in members)
            self.say(
                str(store),
                f"{names} cannot see {store}: this process fetches and writes their part of each checkpoint. In a "
                "folder that all machines share, or a URL such as s3://..., servers write by themselves",
            )  # fmt: skip
