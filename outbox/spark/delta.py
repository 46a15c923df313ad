"""An archive as a Delta table, too: the same files, committed window by window after their manifests.

The manifests decide which messages the archive holds, and the table follows. Each commit stores the number of the
window as the version of an application's transaction. So a window that was committed before a crash is not committed
again.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from outbox.errors import ArchiveError, MissingExtraError
from outbox.spark.manifest import Archive, ArchivedFile, Manifest
from outbox.spark.tables import arrow_schema
from outbox.store.log.extraction import MESSAGES, columns_of

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from deltalake.transaction import AddAction

#: The name under which the table stores the number of its last window.
APPLICATION = "outbox-extract"
_FIX = "restore both from the same backup, or delete _delta_log"


def commit_missing(archive: Archive) -> int:
    """Commit the windows that the Delta table in an archive's folder does not have yet; return how many."""
    try:
        from deltalake.exceptions import DeltaError
    except ImportError as error:
        raise MissingExtraError("a Delta table needs an extra: pip install 'outbox-log[delta]'") from error
    newest = archive.last()
    if newest is None:
        return 0
    try:
        table = _table(archive)
        # Manifests of earlier windows are not read: there may be years of them.
        manifests = {each.window: each for each in archive.manifests(first=_version(table))}
        _require_same_window(archive, table, manifests.get(_version(table)))
        committed = 0
        # The version is read each time: another extract may have committed the next window meanwhile.
        while (version := _version(table)) + 1 in manifests:
            _commit(table, manifests[version + 1])
            table.update_incremental()
            committed += 1
    except DeltaError as error:
        raise ArchiveError(
            f"the Delta table at {archive.path} was not written: {error}; the manifests are, and the next run commits"
            " the missing windows"
        ) from error
    if version > newest.window:
        raise ArchiveError(
            f"the Delta table at {archive.path} has window {version}, but the last manifest is that of"
            f" {newest.window}: the table is of another archive; {_FIX}"
        )
    return committed


def _version(table: DeltaTable) -> int:
    """Return the last window that the table has; 0: none."""
    return table.transaction_version(APPLICATION) or 0


def _require_same_window(archive: Archive, table: DeltaTable, last: Manifest | None) -> None:
    """Refuse a table whose last window ends elsewhere than in its manifest.

    Then manifests were lost, and their windows were written again without the table.
    """
    if last is None:
        return
    ends = (each["outbox.until"] for each in table.history() if each.get("outbox.window") == str(last.window))
    if next(ends, str(last.until)) != str(last.until):
        raise ArchiveError(
            f"the Delta table at {archive.path} has another window {last.window} than the manifests, with rows that no"
            f" manifest counts; {_FIX}"
        )


def _table(archive: Archive) -> DeltaTable:
    from deltalake import DeltaTable

    return DeltaTable.create(
        str(archive.path), arrow_schema(MESSAGES, tuple(columns_of(MESSAGES))), mode="ignore", partition_by=["topic"]
    )


def _commit(table: DeltaTable, manifest: Manifest) -> None:
    from deltalake import CommitProperties, Transaction

    # A second extract that commits the same window fails: the version that the transaction saw has moved.
    table.create_write_transaction(
        actions=[_added(file, manifest) for file in manifest.files],
        mode="append",
        schema=table.schema(),
        partition_by=["topic"],
        commit_properties=CommitProperties(
            custom_metadata={
                "outbox.window": str(manifest.window),
                "outbox.since": str(manifest.since),
                "outbox.until": str(manifest.until),
            },
            app_transactions=[Transaction(APPLICATION, manifest.window)],
        ),
    )


def _added(file: ArchivedFile, manifest: Manifest) -> AddAction:
    from deltalake.transaction import AddAction

    return AddAction(
        # The library encodes the path as a URL, so that a % of ours stays a % when the path is decoded.
        path=file.path,
        size=file.bytes,
        partition_values={"topic": file.topic},
        modification_time=int(manifest.captured_at.timestamp() * 1000),
        data_change=True,
        stats=json.dumps(
            {
                "numRecords": file.rows,
                "minValues": {"id": file.first_id},
                "maxValues": {"id": file.last_id},
                "nullCount": {"id": 0},
            }
        ),
    )
