"""A file system with a volatile and a durable layer, for what a power cut may leave.

:class:`Trace` records what our code asks of the file system while it works in a real folder:
every write, every change of a name, every fsync, in order. :func:`after_crash` takes the first
so many of these operations and a :class:`Chooser`, and gives one of the states in which a crash
right there may leave the disk:

* bytes written since the file's last fsync are there, or not, or a prefix of them, or zeros, or
  garbage in their place;
* each change of a name since its folder's last fsync has happened or has not, whatever came
  before or after it; a rename is one change;
* fsync of a file does not make its name durable.

POSIX allows that much, and real file systems have each done some of it.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

_REAL_OPEN, _REAL_FSYNC = io.open, os.fsync


@dataclass(frozen=True, slots=True)
class Write:
    """``data`` None: cut or lengthened to ``offset`` bytes."""

    inode: int
    offset: int
    data: bytes | None


@dataclass(frozen=True, slots=True)
class Rename:
    """Names of one folder or two that change together: (folder, name, inode or None)."""

    changes: tuple[tuple[int, str, int | None], ...]


@dataclass(frozen=True, slots=True)
class Sync:
    """``site``: which of our functions asked, and who called it."""

    inode: int
    site: str


@dataclass(frozen=True, slots=True)
class Fact:
    """Not an operation: something was promised to somebody from here on."""

    what: Any


Operation = Write | Rename | Sync | Fact
Disk = Mapping[str, bytes | None]  # path within the root -> contents; None: a folder


class Chooser(Protocol):
    """Decides what a crash does with everything that is not durable."""

    def keeps(self) -> bool:
        """Whether a change of a name survives."""

    def contents(self, durable: bytes, writes: Sequence[Write]) -> bytes:
        """The content of a file with unsynced writes."""


def applied(data: bytes, writes: Sequence[Write]) -> bytes:
    """``data`` after these writes."""
    content = bytearray(data)
    for write in writes:
        if write.data is None:
            del content[write.offset :]
            content.extend(bytes(write.offset - len(content)))
        else:
            content.extend(bytes(max(0, write.offset - len(content))))
            content[write.offset : write.offset + len(write.data)] = write.data
    return bytes(content)


@dataclass(slots=True)
class _Inode:
    is_folder: bool
    data: bytes = b""
    names: dict[str, int] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)


class Trace:
    """Records the operations on ``root`` from here on. Start it with :meth:`recording`.

    Args:
        deaf: sites whose fsync does nothing, to show that the test sees it.
    """

    def __init__(self, root: Path, *, deaf: Sequence[str] = ()) -> None:
        self.root = root
        self.operations: list[Operation] = []
        self.sites: set[str] = set()
        self._deaf = deaf
        self._lock = threading.RLock()
        self._numbers: dict[int, int] = {}  # st_ino -> ours
        self._kinds: dict[int, bool] = {}  # ours -> is a folder
        self._next = 0
        self._disk = {str(path.relative_to(root)): path for path in sorted(root.rglob("*"))}
        self.start = _Start(self)

    def fact(self, kind: str, value: Any) -> None:
        """Note a promise."""
        with self._lock:
            self.operations.append(Fact((kind, value)))

    def number(self, real: int) -> int:
        return self._numbers[real]

    def made(self, real: int, *, is_folder: bool) -> int:
        """A new inode: the real one's number may have been another's before."""
        self._next += 1
        self._numbers[real] = self._next
        self._kinds[self._next] = is_folder
        return self._next

    def is_folder(self, inode: int) -> bool:
        return self._kinds[inode]

    # -- what the patched functions tell ----------------------------------------------------

    def place(self, path: Any, dir_fd: int | None = None) -> tuple[int, str] | None:
        """(folder's inode, name), or None for what lies elsewhere."""
        text = os.fspath(path)
        if isinstance(text, bytes):
            text = text.decode()
        if dir_fd is not None and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        text = os.path.abspath(text)
        root = str(self.root)
        if not text.startswith(root + "/"):
            return None
        folder, name = os.path.split(text)
        return self.number(os.stat(folder).st_ino), name

    def names(self, *changes: tuple[int, str, int | None]) -> None:
        with self._lock:
            self.operations.append(Rename(changes))

    def opened(self, path: Any, existed: bool, descriptor: int, dir_fd: int | None = None) -> bool:
        """After an open that may have made the file; whether it is one of ours."""
        with self._lock:
            place = self.place(path, dir_fd)
            if place is not None and not existed:
                number = self.made(os.fstat(descriptor).st_ino, is_folder=False)
                self.names((*place, number))
            return place is not None

    def wrote(self, descriptor: int, offset: int, data: bytes | None) -> None:
        with self._lock:
            inode = self.number(os.fstat(descriptor).st_ino)
            self.operations.append(Write(inode, offset, data))

    def synced(self, descriptor: int) -> None:
        with self._lock:
            real = os.fstat(descriptor).st_ino
            site = _site()
            self.sites.add(site)
            if real in self._numbers and site not in self._deaf:
                self.operations.append(Sync(self.number(real), site))

    # -- patching -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def recording(self) -> Iterator[Trace]:
        """Record Python's file functions in this trace inside of the context."""
        patches = _patches(self)
        kept = {(module, name): getattr(module, name) for module, name in patches}
        for (module, name), function in patches.items():
            setattr(module, name, function)
        try:
            yield self
        finally:
            for (module, name), function in kept.items():
                setattr(module, name, function)


class _Start:
    """The content of the root when the trace began, which is durable."""

    def __init__(self, trace: Trace) -> None:
        self.inodes: dict[int, _Inode] = {}
        self.root = self._scan(trace, trace.root)

    def _scan(self, trace: Trace, path: Path) -> int:
        number = trace.made(path.stat().st_ino, is_folder=path.is_dir())
        inode = self.inodes[number] = _Inode(is_folder=path.is_dir())
        if inode.is_folder:
            for entry in sorted(path.iterdir()):
                inode.names[entry.name] = self._scan(trace, entry)
        else:
            inode.data = path.read_bytes()
        return number


def _site() -> str:
    """``function<function<...``, from the fsync out to the first outside ``system/files``."""
    frame, lines = sys._getframe(2), []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "/runner/" in frame.f_code.co_filename:
            if path.name != "files.py":
                return "<".join([*lines, f"{path.stem}.{frame.f_code.co_name}"])
            lines.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return "<".join(lines)


class _File(io.FileIO):
    """A file that records writes in the trace."""

    trace: Trace

    def write(self, data: Any) -> int:
        raw = bytes(data)
        end = os.fstat(self.fileno()).st_size
        offset = end if "a" in self.mode else self.tell()
        self.trace.wrote(self.fileno(), offset, raw)
        return super().write(raw)

    def truncate(self, size: int | None = None) -> int:
        new_size = super().truncate(size)
        self.trace.wrote(self.fileno(), new_size, None)
        return new_size


def _patches(trace: Trace) -> dict[tuple[Any, str], Callable[..., Any]]:
    patched = _Patched(trace)
    by_name = {
        "open": patched.open_descriptor,
        "fsync": patched.fsync,
        "rename": patched.rename,
        "replace": patched.rename,
        "unlink": patched.unlink,
        "remove": patched.unlink,
        "mkdir": patched.mkdir,
        "rmdir": patched.rmdir,
        "link": patched.link,
    }
    patches: dict[tuple[Any, str], Callable[..., Any]] = {
        (os, name): function for name, function in by_name.items()
    }
    return patches | {(io, "open"): patched.open, (builtins, "open"): patched.open}


class _Patched:
    """Python's functions, which do their work and record it in the trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        names = ("open", "rename", "unlink", "mkdir", "rmdir", "link")
        self._real = {name: getattr(os, name) for name in names}

    def open(self, file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        writes = set(mode) & set("wax+")
        if isinstance(file, int) or not writes or self._trace.place(file) is None:
            return _REAL_OPEN(file, mode, *rest, **named)
        existed = os.path.exists(file)
        raw = _File(file, mode.replace("b", "").replace("t", ""))
        raw.trace = self._trace
        self._trace.opened(file, existed, raw.fileno())
        if "w" in mode and existed:
            self._trace.wrote(raw.fileno(), 0, None)
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding="utf-8")

    def open_descriptor(
        self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None
    ) -> int:
        existed = True
        if flags & os.O_CREAT:
            try:
                os.stat(path, dir_fd=dir_fd)
            except FileNotFoundError:
                existed = False
        descriptor = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        if not existed:
            self._trace.opened(path, existed, descriptor, dir_fd)
        return int(descriptor)

    def fsync(self, descriptor: Any) -> None:
        # The real one would cost a disk's time and tell nothing.
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        self._trace.synced(number)

    def rename(self, source: Any, target: Any, **named: Any) -> None:
        one, other = self._trace.place(source), self._trace.place(target)
        self._real["rename"](source, target, **named)
        if one is not None and other is not None:
            inode = self._trace.number(os.stat(target).st_ino)
            self._trace.names((*one, None), (*other, inode))

    def unlink(self, path: Any, *, dir_fd: Any = None) -> None:
        self._take_away("unlink", path, dir_fd)

    def rmdir(self, path: Any, *, dir_fd: Any = None) -> None:
        self._take_away("rmdir", path, dir_fd)

    def _take_away(self, how: str, path: Any, dir_fd: Any) -> None:
        place = self._trace.place(path, dir_fd)
        self._real[how](path, dir_fd=dir_fd)
        if place is not None:
            self._trace.names((*place, None))

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: Any = None) -> None:
        self._real["mkdir"](path, mode, dir_fd=dir_fd)
        place = self._trace.place(path, dir_fd)
        if place is not None:
            number = self._trace.made(os.stat(path, dir_fd=dir_fd).st_ino, is_folder=True)
            self._trace.names((*place, number))

    def link(self, source: Any, target: Any, **named: Any) -> None:
        self._real["link"](source, target, **named)
        place = self._trace.place(target)
        if place is not None:
            self._trace.names((*place, self._trace.number(os.stat(target).st_ino)))


# What a crash leaves


def after_crash(trace: Trace, num: int, chooser: Chooser) -> Disk:
    """One state in which a crash after the first ``num`` operations may leave the root."""
    inodes = {
        number: _Inode(is_folder=i.is_folder, data=i.data, names=dict(i.names))
        for number, i in trace.start.inodes.items()
    }
    pending: list[tuple[int, Rename]] = []
    for operation in trace.operations[:num]:
        if isinstance(operation, Write):
            inodes[operation.inode].writes.append(operation)
        elif isinstance(operation, Rename):
            for _, _, inode in operation.changes:
                if inode is not None and inode not in inodes:
                    inodes[inode] = _Inode(is_folder=trace.is_folder(inode))
            pending.append((operation.changes[0][0], operation))
        elif isinstance(operation, Sync):
            pending = _synced(inodes, operation.inode, pending)
    for _, change in pending:
        if chooser.keeps():
            _rename(inodes, change)
    return _tree(inodes, trace.start.root, chooser)


def _synced(
    inodes: dict[int, _Inode], inode: int, pending: list[tuple[int, Rename]]
) -> list[tuple[int, Rename]]:
    node = inodes[inode]
    node.data = applied(node.data, node.writes)
    node.writes.clear()
    for folder, change in pending:
        if folder == inode:
            _rename(inodes, change)
    return [(folder, change) for folder, change in pending if folder != inode]


def _rename(inodes: dict[int, _Inode], change: Rename) -> None:
    for folder, name, inode in change.changes:
        if inode is None:
            inodes[folder].names.pop(name, None)
        else:
            inodes[folder].names[name] = inode


def _tree(inodes: dict[int, _Inode], root: int, chooser: Chooser) -> dict[str, bytes | None]:
    files: dict[str, bytes | None] = {}
    inodes_read: dict[int, bytes] = {}

    def walk(folder: int, above: str) -> None:
        for name, inode in sorted(inodes[folder].names.items()):
            node, path = inodes[inode], f"{above}{name}"
            if node.is_folder:
                files[path] = None
                walk(inode, f"{path}/")
                continue
            if inode not in inodes_read:
                writes = node.writes
                inodes_read[inode] = chooser.contents(node.data, writes) if writes else node.data
            files[path] = inodes_read[inode]

    walk(root, "")
    return files


def lay_out(disk: Disk, root: Path) -> None:
    """Make a real folder of it."""
    root.mkdir(parents=True)
    for path, data in disk.items():
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)


def key(disk: Disk) -> int:
    """Equal for equal states."""
    return hash(tuple(sorted((path, data) for path, data in disk.items() if data is not None))
                + tuple(sorted(path for path, data in disk.items() if data is None)))  # fmt: skip


class All:
    """Everything volatile is kept, or lost."""

    def __init__(self, kept: bool) -> None:
        self._kept = kept

    def keeps(self) -> bool:
        return self._kept

    def contents(self, durable: bytes, writes: Sequence[Write]) -> bytes:
        return applied(durable, writes) if self._kept else durable


class AllBut(All):
    """As :class:`All`, but for the ``number``-th thing asked about."""

    def __init__(self, kept: bool, number: int) -> None:
        super().__init__(kept)
        self.left = number

    def keeps(self) -> bool:
        self.left -= 1
        return self._kept is not (self.left == -1)


class Dice:
    """Each thing by itself."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._bias = dice.choice((0.1, 0.5, 0.9))

    def keeps(self) -> bool:
        return self._dice.random() < self._bias

    def contents(self, durable: bytes, writes: Sequence[Write]) -> bytes:
        dice = self._dice
        how = dice.choice(("lost", "kept", "prefix", "zeros", "garbage", "length"))
        whole = applied(durable, writes)
        if how == "lost":
            return durable
        if how == "kept":
            return whole
        if how == "prefix":
            some = list(writes[: dice.randrange(len(writes)) + 1])
            last = some.pop()
            if last.data is not None:
                cut = dice.randrange(len(last.data) + 1)
                some.append(Write(last.inode, last.offset, last.data[:cut]))
            return applied(durable, some)
        first = min((w.offset for w in writes), default=0)
        length = len(whole) if how != "length" else dice.randrange(first, len(whole) + 1)
        left = min(first, len(durable))
        fill = bytes if how != "garbage" else lambda size: bytes(dice.randbytes(size))
        return (whole[:left] + fill(max(0, len(whole) - left)))[:length]
