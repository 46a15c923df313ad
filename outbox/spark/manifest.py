"""Manifests of an archive: one per window, committed after its files, never changed.

A reader of an archive takes the files that manifests count, and no others: the files of a killed extract are in no
manifest. The archive is complete up to the position of its last manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote, urlsplit

from outbox.errors import ArchiveError, PositionError
from outbox.model.command import OF_ENVIRONMENT
from outbox.model.position import Position
from outbox.store.log.stamp import Server

FOLDER = "_outbox"
VERSION = 1

_NAME = re.compile(r"(\d{8,})\.json")
#: The beginning of the name of a window's file.
_OF_WINDOW = re.compile(r"(\d{8,})-")
#: How far the clock of a database may be ahead of an extract's clock.
_CLOCKS_DIFFER = timedelta(days=1)
#: The scheme of a URL. A single letter is a drive.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
#: A file name has at most 255 bytes, and `topic=` comes before the topic.
_LONGEST_TOPIC = 249


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedFile:
    """A Parquet file: rows of one topic and one day (UTC, of `created_at`) in the order of their ids.

    `path` is relative to the archive. `sha256` is the checksum of the file's bytes, in hexadecimal.
    """

    path: str
    topic: str
    day: str
    rows: int
    bytes: int
    sha256: str
    first_id: int
    last_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files of one window, with every message that was committed after `since` and not after `until`.

    `server`: the server of the positions. `captured_at`: when `until` was captured, by the extract's clock. `topics`:
    the only topics that were extracted; None: all. `halves`: true if half messages were extracted, too. `gap`: the
    position up to which rows of the window were purged unread, accepted by the caller of the extract; None: no rows are
    missing.
    """

    window: int
    server: Server
    since: Position
    until: Position
    captured_at: datetime
    files: tuple[ArchivedFile, ...] = field(repr=False)
    topics: tuple[str, ...] | None = None
    halves: bool = False
    gap: Position | None = None

    @property
    def rows(self) -> int:
        """The number of messages in the window."""
        return sum(file.rows for file in self.files)

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(file.bytes for file in self.files)

    def to_json(self) -> str:
        """Return the text of the manifest's file."""
        return json.dumps(
            {
                "version": VERSION,
                "window": self.window,
                "server": asdict(self.server),
                "since": str(self.since),
                "until": str(self.until),
                "topics": self.topics,
                "halves": self.halves,
                "gap": None if self.gap is None else str(self.gap),
                "rows": self.rows,
                "captured_at": self.captured_at.isoformat(),
                "files": [asdict(file) for file in self.files],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text of a manifest's file; raise `ArchiveError` if the text is none, or of another version."""
        try:
            return cls._of(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, PositionError) as error:
            raise ArchiveError(
                f"is not a manifest ({type(error).__name__}: {error}); restore the file from a backup"
            ) from error

    @classmethod
    def _of(cls, stored: dict[str, Any]) -> Self:
        if stored["version"] != VERSION:
            raise ArchiveError(f"is of version {stored['version']}, not {VERSION}; install a newer outbox-log")
        made = cls(
            window=stored["window"],
            server=Server(**stored["server"]),
            since=Position.parse(stored["since"]),
            until=Position.parse(stored["until"]),
            captured_at=datetime.fromisoformat(stored["captured_at"]),
            files=tuple(ArchivedFile(**file) for file in stored["files"]),
            topics=None if stored["topics"] is None else tuple(stored["topics"]),
            halves=stored["halves"],
            gap=None if stored["gap"] is None else Position.parse(stored["gap"]),
        )
        if made.rows != stored["rows"]:
            raise ValueError(f"the files have {made.rows} rows, not {stored['rows']}")
        return made


class Archive:
    """A folder of extracted messages, on a disk that the driver and all executors see under one path."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _local(os.fspath(path))
        self._folder = self.path / FOLDER

    def last(self) -> Manifest | None:
        """Return the newest manifest, whose `until` is where the next window begins; None: there is no manifest yet."""
        newest = self._newest()
        return self._read(newest) if newest else None

    def newest(self) -> Manifest:
        """Return the newest manifest; raise `ArchiveError` if there is none."""
        last = self.last()
        if last is None:
            extract = OF_ENVIRONMENT.line("extract", self.path)
            raise ArchiveError(f"there is no archive in {self.path}; to write an archive: {extract}")
        return last

    def require_writable(self) -> None:
        """Raise if the folder cannot be written to, before anything is read. The check leaves no file there."""
        self._require_folder()
        there = next(path for path in (self._folder, *self._folder.parents) if path.exists())
        try:
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            raise ArchiveError(
                f"{self.path} cannot be written to: no file can be made in {there} ({_reason(error)}); give a folder"
                " that this user and Spark's executors may write to"
            ) from error

    def manifests(self, *, first: int = 1) -> list[Manifest]:
        """Return all manifests from window `first` on, in their order.

        Raises:
            ArchiveError: a manifest cannot be read or is missing, or does not begin where the manifest before ends.
        """
        return self._consecutive(map(self._read, range(max(1, first), self._newest() + 1)))

    def since(self, number: int) -> list[Manifest]:
        """Return, in order, the manifests of all windows that may hold messages with this number or a higher number."""
        # The position at which a window begins sees all messages of the windows before.
        return self._back_to(lambda manifest: manifest.since.head <= number)

    def of_days(self, first: str, last: str) -> list[Manifest]:
        """Return, in order, the manifests of all windows that may hold messages of these days (UTC).

        Windows that were captured before the days hold no such messages, and only the newest of their manifests is
        read. Where clocks differ by more, the names of the files in the folders of the days tell the windows.
        """
        begin = datetime.fromisoformat(f"{first}T00:00:00+00:00")
        found = self._back_to(lambda manifest: manifest.captured_at + _CLOCKS_DIFFER < begin)
        folders = (each for each in self.path.glob("topic=*/day=*") if first <= each.name.removeprefix("day=") <= last)
        named = {_window_of(path) for folder in folders for path in folder.glob("*.parquet")}
        earlier = named.intersection(range(1, found[0].window)) if found else ()
        return [*map(self._read, sorted(earlier)), *found]

    def commit(self, manifest: Manifest) -> None:
        """Make a window part of the archive: from now on its files count. A crash adds the whole window or nothing.

        Raises:
            ArchiveError: another extract has committed this window, or a file is not there.
        """
        for path, problem in self._problems(manifest.files):
            raise ArchiveError(
                f"{path}, which an executor has written, {problem}; nothing of window {manifest.window} counts; the"
                " path must be of a disk that the driver and all executors share"
            )
        file = self._file(manifest.window)
        temporary = self._folder / f"{file.stem}-{uuid.uuid4().hex}.tmp"
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as opened:
                opened.write(manifest.to_json().encode())
                opened.flush()
                os.fsync(opened.fileno())
            # A link never replaces a file, unlike a rename.
            os.link(temporary, file)
        except FileExistsError:
            raise ArchiveError(
                f"{file} is there already: another extract writes to {self.path}, too, and has committed the window;"
                " the rows count once, by the other extract; let only one of the two run"
            ) from None
        except OSError as error:
            raise ArchiveError(f"{file} cannot be written: {_reason(error)}; hard links are needed") from error
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        flush_folder(self._folder)

    def counted(self) -> list[ArchivedFile]:
        """Return the files that manifests count, in the order of the windows."""
        return [file for manifest in self.manifests() for file in manifest.files]

    def require(self, files: Iterable[ArchivedFile]) -> None:
        """Raise if a file is missing, or has another size than its manifest says, without reading the files."""
        for path, problem in self._problems(files):
            raise ArchiveError(f"{path}, which a manifest counts, {problem}; restore the file from a backup")

    def clean(self, older_than: timedelta) -> tuple[int, int]:
        """Delete files that no manifest counts, left by a killed extract; return how many, and their bytes.

        The files of a running extract are not counted yet either. So files that are younger than `older_than` stay, and
        so do files of windows after the last committed window.
        """
        # The manifests are read after the files, so that a window that is committed meanwhile counts.
        before = time.time() - older_than.total_seconds()
        paths = (*self.path.glob("topic=*/day=*/*.parquet"), *self._folder.glob("*.tmp"))
        found = {path: path.stat() for path in paths}
        manifests = self.manifests()
        counted = {self.path / file.path for manifest in manifests for file in manifest.files}
        last = manifests[-1].window if manifests else 0
        doomed = [
            path
            for path, stat in found.items()
            if path not in counted and stat.st_mtime < before and _window_of(path) <= last
        ]
        for path in doomed:
            path.unlink(missing_ok=True)
        return len(doomed), sum(found[path].st_size for path in doomed)

    def _require_folder(self) -> None:
        for path in (self._folder, *self._folder.parents):
            if path.exists() and not path.is_dir():
                raise ArchiveError(f"{path} is a file, and an archive is a folder: give the path of a folder")

    def _problems(self, files: Iterable[ArchivedFile]) -> Iterator[tuple[Path, str]]:
        """Yield files that are missing or have another size, for example where an executor has a disk of its own."""
        for file in files:
            path = self.path / file.path
            try:
                size = path.stat().st_size
            except OSError as error:
                yield path, f"is not there ({_reason(error)})"
            else:
                if size != file.bytes:
                    yield path, f"has {size} bytes, but {file.bytes} were written"

    def _newest(self) -> int:
        """Return the number of the newest committed window; 0: there is none."""
        try:
            names = [_NAME.fullmatch(name) for name in os.listdir(self._folder)]  # noqa: PTH208 - names are enough
        except FileNotFoundError:
            return 0
        except OSError as error:
            self._require_folder()
            raise ArchiveError(f"{self._folder} cannot be read: {_reason(error)}") from error
        return max((int(name[1]) for name in names if name is not None), default=0)

    def _back_to(self, is_first: Callable[[Manifest], bool]) -> list[Manifest]:
        """Read manifests from the newest on backwards, up to the first manifest that is wanted."""
        found: list[Manifest] = []
        for number in range(self._newest(), 0, -1):
            found.append(self._read(number))
            if is_first(found[-1]):
                break
        return self._consecutive(reversed(found))

    def _consecutive(self, manifests: Iterable[Manifest]) -> list[Manifest]:
        found = list(manifests)
        for before, after in pairwise(found):
            if after.since != before.until:
                raise ArchiveError(
                    f"{self._file(after.window)} begins at {after.since}, but the manifest before ends at"
                    f" {before.until}: manifests of two archives are mixed; restore the right ones from a backup"
                )
        return found

    def _read(self, number: int) -> Manifest:
        file = self._file(number)
        try:
            manifest = Manifest.from_json(file.read_text())
        except FileNotFoundError as error:
            raise ArchiveError(
                f"{file} is missing, although a later window is there; restore the file from a backup"
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise ArchiveError(f"{file} cannot be read: {_reason(error)}") from error
        except ArchiveError as error:
            raise ArchiveError(f"{file} {error}") from error
        if manifest.window != number:
            raise ArchiveError(f"{file} is the manifest of window {manifest.window}; the name was changed")
        return manifest

    def _file(self, number: int) -> Path:
        return self._folder / f"{number:08}.json"


def partition_of(topic: str, day: str) -> str:
    """Return the folder of a topic's messages of one day, relative to the archive."""
    name = quote(topic, safe="")
    if len(name) > _LONGEST_TOPIC:
        name = f"{name[:200]}~{hashlib.blake2b(topic.encode(), digest_size=16).hexdigest()}"
    return f"topic={name}/day={day}"


def flush_folder(folder: Path) -> None:
    """Flush a folder to disk, where the system can, so that its names survive a crash of the machine."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems refuse this, but have written the name already.
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sorted_files(files: Iterable[ArchivedFile]) -> tuple[ArchivedFile, ...]:
    """Return the files of a window in the order of their ids, then of their paths."""
    return tuple(sorted(files, key=lambda file: (file.first_id, file.path)))


def _local(text: str) -> Path:
    """Return the folder that a path or a `file:` URL names."""
    scheme = _SCHEME.match(text)
    if scheme is None:
        return Path(text).absolute()
    if scheme[1].lower() != "file":
        raise ArchiveError(
            f"{text!r}: an archive lives in a folder that the driver and all executors see, not in {scheme[1]}; mount"
            " the store, or extract to a shared disk and copy the files and then the manifests. (A folder of this name"
            f" is {f'./{text}'!r})"
        )
    # Of `file://host/path` and `file://folder` the text after the slashes is the name of a machine.
    machine = urlsplit(text).netloc
    if machine not in ("", "localhost"):
        raise ArchiveError(f"{text!r}: {machine!r} is the name of a machine there; write file:///absolute/path")
    return Path(unquote(text.removeprefix(scheme[0]).removeprefix(f"//{machine}"))).absolute()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _window_of(path: Path) -> int:
    """Return the window that a file was written for; 0: the name has none."""
    named = _OF_WINDOW.match(path.name)
    return 0 if named is None else int(named[1])
