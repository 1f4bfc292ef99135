"""Sources of data with a position: any iterable, or files at fsspec URLs, read by lines, by records or whole.

A position is a JSON dict, which `Session.save` keeps. Nothing is read ahead: the position is behind the element that
was given last. Imports fsspec for files; compression, globs and remote file systems are its business.
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice, takewhile
from os import PathLike
from typing import Any, BinaryIO

import fsspec
import torch
from torch.utils.data import default_collate

from tfnb.errors import DataLoss, InvalidArgument, NotFound, OutOfRange, ensure_type
from tfnb.kernels.random import mix
from tfnb.state.chunks import Partitions, is_partitioned

Position = dict[str, int]
Part = Callable[[Iterator[Any]], Iterator[Any]]


class Source:
    """Elements of an iterable that can be taken up again where they were left.

    data: what can be iterated again for each pass, such as a list or a torch DataLoader; of a Dask array, bag or
    dataframe the rows, where each partition is computed when its turn comes, where Dask has it. name: its key in
    checkpoints. seed: torch's random state at the start of each pass comes from it, so a DataLoader that shuffles gives
    the same order again; None leaves torch's state alone. A pass that is taken up again is drawn from its start and the
    elements before the position are dropped. Raises InvalidArgument for data that cannot be iterated, or only once.

    >>> source = Source(["a", "b", "c"], name="letters")
    >>> source.read(), source.position
    ('a', {'epoch': 0, 'count': 1})
    >>> list(source)
    ['b', 'c']
    >>> source.read()
    Traceback (most recent call last):
    tfnb.errors.OutOfRange: letters is at its end, after 3 elements: iterate it, or call rewind(), for another pass
    """

    def __init__(self, data: Iterable[Any], *, name: str = "data", seed: int | None = 0) -> None:
        if not isinstance(data, Iterable):
            raise InvalidArgument(f"source {name}: {type(data).__name__} is no iterable; pass a list or a DataLoader")
        if isinstance(data, Iterator):
            raise InvalidArgument(
                f"source {name}: {type(data).__name__} can be iterated only once, so no position of it can be taken up "
                "again; pass a list, a DataLoader, or an object whose __iter__ starts anew"
            )
        self.name, self._data, self._seed = name, Partitions(data) if is_partitioned(data) else data, seed
        self._parts: tuple[Part, ...] = ()
        self._root = self
        self._start({"epoch": 0, "count": 0})

    def _start(self, position: Position) -> None:
        self._position, self._is_spent = position, False
        self._each: Iterator[Any] | None = None
        self._begins = position  # which start `_each` goes on from

    # -- where it is ------------------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Behind the element that was given last, as a dict for JSON."""
        return dict(self._root._position)

    def seek(self, position: Position) -> None:
        """Go on from a position of a source like this one.

        Raises InvalidArgument for anything else.
        """
        self.ensure_position(position)
        self._root._start(dict(position))

    def ensure_position(self, position: Position) -> None:
        """Raise InvalidArgument for a value that is no position of a source like this one."""
        keys = self._root._position.keys()
        if not isinstance(position, dict) or position.keys() != keys:
            raise InvalidArgument(f"source {self.name}: a position has {', '.join(keys)}; this is {position!r}")
        if not all(type(value) is int and value >= 0 for value in position.values()):
            raise InvalidArgument(f"source {self.name}: a position has numbers of at least 0; this is {position!r}")

    def back_to(self, position: Position) -> None:
        """Go on from a position; does nothing if the source stands there already."""
        if self._root._is_spent or self.position != position:
            self.seek(position)

    def rewind(self) -> None:
        """Start the next pass."""
        root = self._root
        root._start({**dict.fromkeys(root._position, 0), "epoch": root._position["epoch"] + 1})

    # -- elements ---------------------------------------------------------------------------------------------

    def read(self) -> Any:
        """The next element; raises OutOfRange at the end of the pass."""
        if self._each is None or self._begins is not self._root._position:
            self._each, self._begins = self._elements(), self._root._position
        before = dict(self._root._position)
        try:
            return next(self._each)
        except StopIteration:
            self._root._is_spent = True
            raise OutOfRange(
                f"{self.name} is at its end, after {self._root._position['count']} elements: iterate it, or call "
                "rewind(), for another pass"
            ) from None
        except BaseException:
            self._each = None  # the next read tries again, from the position, also where a batch was half read
            self._root._position.update(before)
            raise

    def __iter__(self) -> Iterator[Any]:
        """The rest of the pass, or the next one where that is at its end."""
        if self._root._is_spent:
            self.rewind()
        while True:
            try:
                yield self.read()
            except OutOfRange:
                return

    def map(self, function: Callable[[Any], Any]) -> Source:
        """The same source, with ``function`` of each element.

        >>> list(Source([1, 2]).map(lambda x: x * 10))
        [10, 20]
        """
        return self._with(lambda each: map(function, each))

    def batch(self, size: int) -> Source:
        """The same source, with ``size`` elements at a time collated as by a DataLoader; the last batch may be short.

        Raises InvalidArgument for a size below 1.

        >>> [b.tolist() for b in Source([1.0, 2.0, 3.0]).batch(2)]
        [[1.0, 2.0], [3.0]]
        """
        if not isinstance(size, int) or size < 1:
            raise InvalidArgument(f"source {self.name}: a batch has at least 1 element, not {size!r}")
        return self._with(lambda each: map(default_collate, iter(lambda: list(islice(each, size)), [])))

    def _with(self, part: Part) -> Source:
        made = object.__new__(Source)
        made.name, made._root, made._parts = self.name, self._root, (*self._parts, part)
        made._each, made._begins = None, self._root._position
        return made

    def _elements(self) -> Iterator[Any]:
        each = self._root._counted()
        for part in self._parts:
            each = part(each)
        return each

    def _counted(self) -> Iterator[Any]:
        """The elements of the root, from the position on."""
        position = self._position
        for element in self._rest():
            position["count"] += 1
            yield element

    def _rest(self) -> Iterator[Any]:
        start = self._position["count"]
        each = self._begun()
        if (found := sum(1 for _ in islice(each, start))) < start:
            raise InvalidArgument(f"source {self.name} has {found} elements now, and its position is behind {start}")
        yield from each

    def _begun(self) -> Iterator[Any]:
        """A pass whose first element is drawn with the pass's own random state; a DataLoader draws its order then."""
        if self._seed is None:
            return iter(self._data)
        seed = mix(self._seed, self._position["epoch"])
        own = getattr(self._data, "generator", None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if isinstance(own, torch.Generator):
                own.manual_seed(seed)
            each = iter(self._data)
            return chain(list(islice(each, 1)), each)

    def __repr__(self) -> str:
        at = ", ".join(f"{key} {value}" for key, value in self.position.items())
        return f"<{type(self._root).__name__} {self.name}: {at}>"


class _FileReader(Source):
    """Records of files, one file after the other; a position is a file and a byte offset."""

    def __init__(
        self, urls: str | Sequence[str], *, name: str, compression: str | None, options: Mapping[str, Any] | None
    ) -> None:
        self.name, self._parts, self._root = name, (), self
        for url in urls if isinstance(urls, list | tuple) else (urls,):
            ensure_type(url, (str, PathLike), f"{name}: a url")
        try:
            self._files = list(fsspec.open_files(urls, "rb", compression=compression, **(options or {})))
        except (ValueError, ImportError, OSError) as error:
            raise InvalidArgument(f"{name}: cannot open {urls!r}: {error}") from error
        if not self._files:
            raise NotFound(f"{name}: no file is at {urls!r}")
        self._start({"epoch": 0, "count": 0, "file": 0, "offset": 0})

    def _rest(self) -> Iterator[Any]:
        position = self._position
        while position["file"] < len(self._files):
            entry = self._files[position["file"]]
            with self._opened(entry) as file:
                if position["offset"]:
                    file.seek(position["offset"])
                for record in self._records(file, entry.full_name):
                    position["offset"] = file.tell()
                    yield record
            position["file"], position["offset"] = position["file"] + 1, 0

    @contextmanager
    def _opened(self, entry: Any) -> Iterator[BinaryIO]:
        """Open a file; errors name the file."""
        try:
            with entry as file:
                yield file
        except FileNotFoundError as error:
            raise NotFound(f"{self.name}: no file is at {entry.full_name}") from error
        except (IsADirectoryError, PermissionError) as error:
            raise InvalidArgument(f"{self.name}: {entry.full_name} is no file to read: {error}") from error
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            if entry.compression is None:
                raise
            raise DataLoss(f"{self.name}: {entry.full_name} is no whole {entry.compression} file: {error}") from error

    def _records(self, file: BinaryIO, url: str) -> Iterator[Any]:
        """Records from the current offset of the file; afterwards the offset is behind the record that was yielded."""
        raise NotImplementedError


def _are_counts(*values: object) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _ends_in_a_byte(encoding: str) -> bool:
    """Whether lines of text in this encoding are the lines of its bytes."""
    try:
        return "\n\n".encode(encoding).endswith(b"\n\n")
    except LookupError:
        return False


class TextLineReader(_FileReader):
    r"""Lines of text files, as ``str`` without their ends.

    urls: an fsspec URL or path, a glob, or several. skip_header_lines: of each file. compression: ``"infer"`` goes by
    the name (``.gz``, ``.bz2``, ``.xz``). storage_options: keywords of the file system. Raises InvalidArgument for a
    negative number of header lines, and for an encoding whose line ends take more than one byte.

    >>> with fsspec.open("memory://doc/words.txt", "w") as file:
    ...     _ = file.write("word\none\ntwo\n")
    >>> list(TextLineReader("memory://doc/words.txt", skip_header_lines=1))
    ['one', 'two']
    """

    def __init__(
        self, urls: str | Sequence[str], *, skip_header_lines: int = 0, encoding: str = "utf-8", name: str = "lines",
        compression: str | None = "infer", storage_options: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if not _are_counts(skip_header_lines) or not _ends_in_a_byte(encoding):
            raise InvalidArgument(
                f"{name}: skip_header_lines is at least 0, and encoding one in which a line ends with one byte, such "
                f"as utf-8; got {skip_header_lines!r}, {encoding!r}"
            )
        super().__init__(urls, name=name, compression=compression, options=storage_options)
        self._header, self._encoding = skip_header_lines, encoding

    def _records(self, file: BinaryIO, url: str) -> Iterator[str]:
        if file.tell() == 0:
            for _ in takewhile(bool, map(lambda _: file.readline(), range(self._header))):
                pass
        while line := file.readline():
            try:
                yield line.decode(self._encoding).rstrip("\r\n")
            except UnicodeDecodeError as error:
                start = file.tell() - len(line)
                raise DataLoss(f"{self.name}: {url}, byte {start}: the line is no {self._encoding}: {error}") from error


class FixedLengthRecordReader(_FileReader):
    r"""Records of equal length of files, each a uint8 tensor ``[record_bytes]``.

    header_bytes, footer_bytes: of each file, left out. A file that ends within a record or header raises DataLoss.
    Raises InvalidArgument for records of no bytes, and for a negative header or footer.

    >>> with fsspec.open("memory://doc/pairs.bin", "wb") as file:
    ...     _ = file.write(b"\x01\x02\x03\x04")
    >>> [record.tolist() for record in FixedLengthRecordReader("memory://doc/pairs.bin", 2)]
    [[1, 2], [3, 4]]
    """

    def __init__(
        self, urls: str | Sequence[str], record_bytes: int, *, header_bytes: int = 0, footer_bytes: int = 0,
        name: str = "records", compression: str | None = "infer", storage_options: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if not _are_counts(record_bytes, header_bytes, footer_bytes) or record_bytes < 1:
            raise InvalidArgument(
                f"{name}: record_bytes is at least 1, header and footer at least 0; "
                f"got {record_bytes!r}, {header_bytes!r}, {footer_bytes!r}"
            )
        super().__init__(urls, name=name, compression=compression, options=storage_options)
        self._bytes, self._header, self._footer = record_bytes, header_bytes, footer_bytes

    def _records(self, file: BinaryIO, url: str) -> Iterator[torch.Tensor]:
        start = file.tell() or self._header
        end = file.seek(0, 2) - self._footer
        if start > end:
            raise DataLoss(
                f"{self.name}: {url} ends within its header of {self._header} and footer of {self._footer} bytes"
            )
        file.seek(start)
        while start < end:
            if end - start < self._bytes:
                raise DataLoss(
                    f"{self.name}: {url} ends within a record: {end - start} of {self._bytes} bytes at byte {start}"
                )
            yield torch.frombuffer(bytearray(file.read(self._bytes)), dtype=torch.uint8)
            start += self._bytes


class WholeFileReader(_FileReader):
    r"""Whole files, each as ``(url, uint8 tensor)``.

    >>> with fsspec.open("memory://doc/whole/a.bin", "wb") as file:
    ...     _ = file.write(b"\x07\x08")
    >>> [(url, bytes.tolist()) for url, bytes in WholeFileReader("memory://doc/whole/*.bin")]
    [('memory:///doc/whole/a.bin', [7, 8])]
    """

    def __init__(
        self, urls: str | Sequence[str], *, name: str = "files", compression: str | None = "infer",
        storage_options: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(urls, name=name, compression=compression, options=storage_options)

    def _rest(self) -> Iterator[tuple[str, torch.Tensor]]:
        position = self._position
        while position["file"] < len(self._files):
            entry = self._files[position["file"]]
            with self._opened(entry) as file:
                content = torch.frombuffer(bytearray(file.read()) or bytearray(1), dtype=torch.uint8)
                content = content if file.tell() else content[:0]
            position["file"] += 1
            yield entry.full_name, content
