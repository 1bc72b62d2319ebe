"""The delivery of one entry of the queue."""

from __future__ import annotations

import functools
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from .config import UploadConfig
from .queue import Artifact, Entry, Queue, Receipt, UploadedFile
from .targets import Shipment, Target
from .wire import (
    Contradicted,
    FileFacts,
    Interrupted,
    Refused,
    Wire,
    artifact_payload,
    encode,
    facts_of,
    file_url,
    idempotency_key,
    remote_name,
)

__all__ = ["Delivery", "receipt_key"]

CONTRADICTIONS_ALLOWED = 4
"""How often a store may report another digest than ours for one entry, before it counts as final."""


def receipt_key(kind: str, local_path: str) -> str:
    """The key of the receipt of an artifact."""
    return f"{kind}:{local_path}"


@functools.lru_cache(maxsize=1024)
def _facts_once(path: Path, _size: int, _mtime_ns: int) -> FileFacts:
    """`facts_of` a file that has not changed since, which is not read again for each of its parts."""
    return facts_of(path)


class Delivery:
    """Brings entries to their destinations. Threads may deliver different entries at the same time.

    An artifact is delivered in parts (each file, each target, the message), and each part that arrived is noted in the
    queue, so that neither a failure nor a restart sends it again.
    """

    def __init__(
        self,
        config: UploadConfig,
        queue: Queue,
        wire: Wire,
        targets: Mapping[str, Target],
        interrupted: Callable[[], bool],
    ) -> None:
        self._config = config
        self._queue = queue
        self._wire = wire
        self._targets = targets
        self._interrupted = interrupted
        self._root = queue.directory.parent
        self._contradictions = Counter[int]()

    def deliver(self, entry: Entry) -> None:
        """Make the requests that are left to make for `entry`, which stays in the queue.

        Raises:
            TryAgain: A request failed in a way that may pass.
            Refused: It can't succeed.
            Interrupted: The uploader is closing.
        """
        if isinstance(entry.body, Artifact):
            self._deliver_artifact(entry, entry.body)
            return
        self._wire.post(self._config.url_of(entry.kind) or "", encode(entry.body.payload), entry.body.key)
        if entry.kind == "terminal":
            self._queue.add_receipt(Receipt(entry.body.key))

    def _deliver_artifact(self, entry: Entry, artifact: Artifact) -> None:
        if self._is_superseded(entry, artifact) or self._was_delivered(entry, artifact):
            return
        parts = self._parts(entry, artifact)
        # Again from the first: a file may be replaced while others are sent.
        while part := next((part for part in parts if not self._has_arrived(entry, artifact, part)), None):
            if self._interrupted():
                raise Interrupted
            entry.parts[part] = parts[part]()
            self._queue.save(entry)
        self._remember(entry, artifact)

    def _parts(self, entry: Entry, artifact: Artifact) -> dict[str, Callable[[], UploadedFile | None]]:
        """The transfers, in order, each with the function that sends it and returns its receipt."""
        parts: dict[str, Callable[[], UploadedFile | None]] = {}
        indices = range(len(artifact.files))
        if self._config.stores_files():
            parts |= {f"put:{index}": functools.partial(self._put, entry, artifact, index) for index in indices}
        shipment = self._shipment(entry, artifact)
        parts |= {f"to:{name}": functools.partial(target.deliver, shipment) for name, target in self._targets.items()}
        if self._config.url_of(entry.kind) and entry.kind == "sample":  # a picture can be shown by itself
            parts |= {
                f"post:{index}": functools.partial(self._post_about, entry, artifact, index, file.path, file.name)
                for index, file in enumerate(artifact.files)
            }
        elif self._config.url_of(entry.kind):
            path = artifact.local_path
            name = f"final/{Path(path).name}" if artifact.final else Path(path).name
            parts["post"] = functools.partial(self._post_about, entry, artifact, artifact.subject, path, name)
        return parts

    def _has_arrived(self, entry: Entry, artifact: Artifact, part: str) -> bool:
        uploaded = entry.parts.get(part)
        if uploaded is None:
            return part in entry.parts
        now = self._facts_of(artifact, int(part[4:]))
        return uploaded.sha256 == now.sha256  # else the file was replaced meanwhile

    def _put(self, entry: Entry, artifact: Artifact, index: int) -> UploadedFile:
        file, facts = artifact.files[index], self._facts_of(artifact, index)
        name = remote_name(entry.step, file.name, final=artifact.final)
        config = self._config
        url = file_url(config.file_store_url or "", config.owner, config.run_id, entry.kind, name)
        key = idempotency_key(config.run_id, "file", entry.step, name, facts.sha256 or "")
        try:
            return self._wire.put_file(url, file.location(self._root), facts, key)
        except Contradicted as error:
            _facts_once.cache_clear()  # the file itself may have been replaced
            self._contradictions[entry.seq] += 1
            if self._contradictions[entry.seq] > CONTRADICTIONS_ALLOWED:
                raise Refused(error.reason) from error
            raise

    def _post_about(self, entry: Entry, artifact: Artifact, index: int | None, path: str, name: str) -> None:
        """The message about a file of an artifact, or about the directory that it reports."""
        facts, uploaded = self._facts_of(artifact, index), entry.parts.get(f"put:{index}")
        where, record = str(self._root / path), self._facts_of(artifact, len(artifact.files) - 1)
        payload = artifact_payload(
            self._config.run_id, entry.kind, entry.step, where, facts, uploaded, final=artifact.final
        )
        digest = facts.sha256 or record.sha256 or ""
        key = idempotency_key(self._config.run_id, entry.kind, entry.step, name, digest)
        self._wire.post(self._config.url_of(entry.kind) or "", encode(payload), key)

    def _shipment(self, entry: Entry, artifact: Artifact) -> Shipment:
        title = "final" if artifact.final else f"step-{entry.step:08d}"
        files = tuple((file.layout, file.location(self._root)) for file in artifact.files)
        return Shipment(self._config.run_id, f"{entry.kind}s", title, files, self._interrupted)

    def _facts_of(self, artifact: Artifact, index: int | None) -> FileFacts:
        if index is None:
            return FileFacts(artifact.subject_bytes, None)
        path = artifact.files[index].location(self._root)
        try:
            found = os.stat(path)
        except OSError as error:
            raise Refused(f"{path.name} cannot be read: {error.strerror}") from error
        return _facts_once(path, found.st_size, found.st_mtime_ns)

    def _is_superseded(self, entry: Entry, artifact: Artifact) -> bool:
        """Whether the files were replaced and a later entry delivers what is there now."""
        if all(file.is_unchanged(self._root) for file in artifact.files):
            return False
        later = (other for other in self._queue.entries(entry.kind) if other.seq > entry.seq)
        return any(other.body.local_path == artifact.local_path for other in later)

    def _was_delivered(self, entry: Entry, artifact: Artifact) -> bool:
        """Whether exactly this was delivered before: a resumed run writes the same checkpoint again."""
        receipt = self._queue.receipt(receipt_key(entry.kind, artifact.local_path))
        if receipt is None or entry.parts:
            return False
        return receipt.content == self._content_digest(entry, artifact)

    def _content_digest(self, entry: Entry, artifact: Artifact) -> str:
        sends_all = self._config.stores_files() or self._targets or entry.kind == "sample"
        indices = range(len(artifact.files)) if sends_all else {artifact.subject or 0, len(artifact.files) - 1}
        digests = [self._facts_of(artifact, index).sha256 for index in sorted(indices)]
        identity = [entry.step, artifact.final, digests, list(self._parts(entry, artifact))]
        return hashlib.sha256(msgspec.json.encode(identity)).hexdigest()

    def _remember(self, entry: Entry, artifact: Artifact) -> None:
        """Under the name that the message reports, and under that of the record, which may differ."""
        content = self._content_digest(entry, artifact)
        main = len(artifact.files) - 1
        subject = artifact.subject
        about = {artifact.local_path: (self._facts_of(artifact, subject), entry.parts.get(f"put:{subject}"))}
        if artifact.main != artifact.local_path and artifact.files[main].layout == Path(artifact.main).name:
            about[artifact.main] = self._facts_of(artifact, main), entry.parts.get(f"put:{main}")
        for path, (facts, uploaded) in about.items():
            sha256 = uploaded.sha256 if uploaded else facts.sha256
            ref = uploaded.ref if uploaded else None
            key = receipt_key(entry.kind, path)
            self._queue.add_receipt(Receipt(key, content, ref, sha256, facts.size_bytes))
