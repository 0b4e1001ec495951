"""Operations on files at an fsspec URL, with comparisons and retries."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from runner.checkpoint.manifest import FileFacts
from runner.system.environment import redacted
from runner.system.error import DISTRIBUTION, ConfigError, CorruptCheckpoint, RunnerError

T = TypeVar("T")

_BLOCK_BYTES = 1 << 23
PAUSES_SECONDS = (1.0, 4.0, 16.0)  # before the second, third and fourth attempt
_FLAT = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "memory"}  # no folders
# A retry would not help.
_FINAL = (FileNotFoundError, PermissionError, NotImplementedError, RunnerError)
_S3 = f"{DISTRIBUTION}[remote]"
_PACKAGES = {"s3": _S3, "s3a": _S3, "gs": "gcsfs", "gcs": "gcsfs"}


class RemoteFault(RunnerError):
    """The remote failed, after all attempts; the message holds no secrets."""


class NotExclusive(RemoteFault):
    """The store cannot create a file only if it does not exist."""


class RemoteFiles:
    """Operations on files below a URL, each tried several times. Blocks; for background threads.

    Args:
        pauses: seconds before each further attempt.

    Attributes:
        moved: told how many bytes were read, or sent by :meth:`put`.

    Raises:
        ConfigError: the URL's scheme is unknown, or its package is not installed.
    """

    def __init__(self, url: str, *, pauses: tuple[float, ...] = PAUSES_SECONDS) -> None:
        from fsspec.core import url_to_fs  # of a rank's imports a twentieth; most have no remote

        self.url = url.rstrip("/")
        scheme = urlsplit(url).scheme
        options = {"auto_mkdir": True} if scheme in ("file", "local") else {}
        try:
            # Listings are not cached: other processes write there too.
            self._files, root = url_to_fs(
                self.url, use_listings_cache=False, skip_instance_cache=True, **options
            )
        except ImportError as error:
            package = _PACKAGES.get(scheme, f"what fsspec names for {scheme}")
            raise ConfigError(
                f"checkpoint.remote={self.url}: {error}; pip install '{package}'"
            ) from None
        except Exception as error:
            raise ConfigError(
                f"checkpoint.remote={self.url}: cannot be used ({message_of(error)}); give an URL "
                "that fsspec knows, such as s3://bucket/prefix or file:///path"
            ) from None
        self._kind = type(self._files)
        self._root = str(root).rstrip("/")
        self._makes_folders = scheme not in _FLAT
        self._pauses = pauses
        self._stopped = threading.Event()
        self.moved: Callable[[int], None] = lambda count: None

    def stop(self) -> None:
        """Stop all retries."""
        self._stopped.set()

    def names(self, folder: str) -> list[str]:
        """Names in a folder, which need not exist."""

        def work() -> list[str]:
            try:
                paths = self._files.ls(self._at(folder), detail=False)
            except FileNotFoundError:
                return []
            return sorted({str(path).rstrip("/").rpartition("/")[2] for path in paths} - {""})

        return self._try(f"listing {folder}", work)

    def read(self, name: str, limit: int) -> bytes:
        """Read a small file.

        Raises:
            CorruptCheckpoint: it has more than ``limit`` bytes, or does not exist.
            RemoteFault: it cannot be read.
        """

        def work() -> bytes:
            data = b""
            for block in self._blocks(name):
                data += block
                if len(data) > limit:
                    raise CorruptCheckpoint(f"{self.url}/{name}: has more than {limit} bytes")
            return data

        return self._try(f"reading {name}", work)

    def fetch(self, name: str, target: Path, facts: FileFacts) -> None:
        """Copy a file to a new local one, synced, and at most the expected bytes.

        Raises:
            CorruptCheckpoint: size or digest differ from ``facts``, or it does not exist.
            RemoteFault: it cannot be read.
            OSError: the local disk.
        """

        def work() -> None:
            with target.open("wb") as file:
                self._compare(name, facts, write=file.write)
                file.flush()
                os.fsync(file.fileno())

        self._try(f"reading {name}", work)

    def verify(self, name: str, facts: FileFacts) -> None:
        """Read a file back and compare it. Raises as :meth:`fetch`."""
        self._try(f"reading {name}", lambda: self._compare(name, facts))

    def _compare(
        self, name: str, facts: FileFacts, write: Callable[[bytes], Any] = lambda block: None
    ) -> None:
        digest, size = hashlib.sha256(), 0
        for block in self._blocks(name):
            size += len(block)
            if size > facts.num_bytes:
                break
            digest.update(block)
            write(block)
        if size != facts.num_bytes:
            raise CorruptCheckpoint(
                f"{self.url}/{name}: {'over ' if size > facts.num_bytes else ''}{size} bytes, "
                f"{facts.num_bytes} were written"
            )
        if digest.hexdigest() != facts.sha256:
            raise CorruptCheckpoint(f"{self.url}/{name}: digest differs: damaged at the remote")

    def _blocks(self, name: str) -> Iterator[bytes]:
        try:
            opened = self._files.open(self._at(name), "rb", cache_type="none")
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{self.url}/{name}: is missing") from None
        with opened as file:
            while block := file.read(_BLOCK_BYTES):
                self.moved(len(block))
                yield block

    def put(self, source: Path, name: str, facts: FileFacts) -> None:
        """Upload ``source`` as ``name`` and compare it; does nothing if it is there already.

        Raises:
            RemoteFault: after all attempts it is missing or differs.
        """

        def work() -> None:
            if self._has(name, facts):
                return
            self._make_folder_of(name)
            try:
                self._files.put_file(str(source), self._at(name))
            except FileNotFoundError:
                # So some stores answer who asks a second time for a file of its parts, because
                # the first answer was lost.
                if not self._has(name, facts):
                    raise
            self.moved(facts.num_bytes)
            try:
                self._compare(name, facts)
            except CorruptCheckpoint as error:
                raise OSError(f"after the upload of {source}: {error}") from None

        self._try(f"writing {name}", work)

    def put_bytes(self, name: str, data: bytes) -> None:
        """Upload a small file, whatever was there before."""

        def work() -> None:
            self._make_folder_of(name)
            self._files.pipe_file(self._at(name), data)
            if b"".join(self._blocks(name)) != data:
                raise OSError(f"{name} differs after the upload")

        self._try(f"writing {name}", work)

    def create(self, name: str, data: bytes) -> bool:
        """Create a small file if it does not exist: of all who try at once, one succeeds.

        Returns:
            Whether the file now holds this caller's ``data``.

        Raises:
            NotExclusive: the backend does not support it.
            RemoteFault: the result is unknown after all attempts.
        """

        def work() -> bool:
            self._make_folder_of(name)
            try:
                self._create(self._at(name), data)
            except (NotImplementedError, TypeError, ValueError) as error:
                raise NotExclusive(f"creating {name}: {message_of(error)}") from None
            except Exception:
                # Each backend has its own error for a name that is taken. And an answer that was
                # lost may have been a success: the contents show it.
                standing = self._small(name)
                if standing is None:
                    raise
                return standing == data
            return self._small(name) == data

        return self._try(f"creating {name}", work)

    def _create(self, path: str, data: bytes) -> None:
        kind = self._kind
        from fsspec.asyn import AsyncFileSystem
        from fsspec.implementations.local import LocalFileSystem
        from fsspec.spec import AbstractFileSystem

        if issubclass(kind, LocalFileSystem):
            _link(Path(path), data)
        elif issubclass(kind, AsyncFileSystem) or kind.pipe_file != AbstractFileSystem.pipe_file:
            self._files.pipe_file(path, data, mode="create")
        else:
            raise NotImplementedError(f"{kind.__name__} looks first and writes then")

    def is_exclusive(self, name: str) -> bool:
        """Whether :meth:`create` is exclusive here, tested with files of this name.

        A store may accept the condition and ignore it. One that seems to is asked twice: some
        errors of a connection look like those of a backend that lacks the condition.

        Raises:
            RemoteFault: as :meth:`create`.
        """
        return any(self._seems_exclusive(f"{name}-{number}") for number in range(2))

    def _seems_exclusive(self, name: str) -> bool:
        try:
            is_first = self.create(name, b"first\n")
            return is_first and not self.create(name, b"second\n")
        except NotExclusive:
            return False
        finally:
            self.delete(name)

    def _small(self, name: str) -> bytes | None:
        """Read a small file; None if it does not exist."""
        try:
            return b"".join(self._blocks(name))
        except CorruptCheckpoint:
            return None

    def _has(self, name: str, facts: FileFacts) -> bool:
        try:
            if self._files.info(self._at(name))["size"] != facts.num_bytes:
                return False
            self._compare(name, facts)
        except (FileNotFoundError, CorruptCheckpoint):
            return False
        return True

    def delete(self, name: str) -> None:
        """Delete a file, which need not exist."""

        def work() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._at(name))

        self._try(f"removing {name}", work)

    def delete_folder(self, name: str) -> None:
        """Delete a folder, where the store has folders; it need not exist."""

        def work() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm(self._at(name), recursive=True)

        if self._makes_folders:
            self._try(f"removing {name}", work)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_folder_of(self, name: str) -> None:
        if self._makes_folders:
            self._files.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)

    def _try(self, what: str, work: Callable[[], T]) -> T:
        for pause in (*self._pauses, None):
            try:
                return work()
            except (CorruptCheckpoint, NotExclusive):
                raise
            except _FINAL as error:
                raise RemoteFault(f"{what}: {message_of(error)}") from None
            except Exception as error:  # each backend has its own errors, and the network too
                if pause is None or self._stopped.wait(pause):
                    raise RemoteFault(f"{what}: {message_of(error)}") from None
        raise AssertionError("the last attempt returns or raises")


def _link(path: Path, data: bytes) -> None:
    """Create a file atomically.

    Raises:
        FileExistsError: the name is taken.
        NotImplementedError: the file system has no hard links.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        temporary.write_bytes(data)
        os.link(temporary, path)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise NotImplementedError(f"{path}: {error}") from None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def message_of(error: Exception) -> str:
    """An error as one line of bounded length, without secrets."""
    text = str(redacted(" ".join(f"{type(error).__name__}: {error}".split())))
    return text[:400]
