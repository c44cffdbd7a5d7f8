"""Bytes of hub files, in order: a connection that is cut goes on where it stopped, a busy hub is waited for."""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from convert.hub.wait import HubError, pause
from convert.shard.writer import output_errors, sync_folder, write_all

log = logging.getLogger(__name__)

# Not the suffix of unfinished files, which a conversion clears away.
PARTIAL = ".partial"
PIECE = 1 << 20
HASHED = 8 << 20
TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """A file of a pinned commit."""

    repo: str
    commit: str
    path: str

    def __str__(self) -> str:
        return f"{self.repo}/{self.path}"


def stream(place: Place, low: int, high: int) -> Iterator[bytes]:
    """Bytes low..high of a hub file, in pieces.

    Raises HubError if the server sends anything but these bytes, and its last error when waiting did not help.
    """
    from huggingface_hub import errors

    at, failures = low, 0
    while at < high:
        before = at
        try:
            for data in _pieces(place, at, high):
                at += len(data)
                yield data
            if at < high:
                raise errors.HTTPError(f"ended {high - at} bytes early")  # type: ignore[attr-defined]
        except errors.HTTPError as e:  # type: ignore[attr-defined]
            failures = 1 if at > before else failures + 1
            if (seconds := pause(e, failures)) is None:
                raise
            log.warning("%s: %s at byte %d; again in %.0f s", place, str(e).splitlines()[0], at, seconds)
            time.sleep(seconds)


def _pieces(place: Place, low: int, high: int) -> Iterator[bytes]:
    """One request's answer; HubError if it is another one than was asked for."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

    url = hf_hub_url(place.repo, place.path, revision=place.commit)
    headers = {**build_hf_headers(), "Range": f"bytes={low}-{high - 1}", "Accept-Encoding": "identity"}
    left = high - low
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as response:
        hf_raise_for_status(response)
        told = response.headers.get("content-range", "")
        if response.status_code != 206 or not told.startswith(f"bytes {low}-"):
            raise HubError(f"{place}: the server ignores byte ranges; a mirror or proxy may be at fault")
        for data in response.iter_bytes(PIECE):
            left -= len(data)
            if left < 0:
                raise HubError(f"{place}: the server sent more than the {high - low} bytes at {low} it was asked for")
            yield data


Bytes = Callable[[Place, int, int], Iterator[bytes]]


def download(
    place: Place, target: Path, size: int, sha256: str, progress: Callable[[int], None], source: Bytes = stream
) -> None:
    """A hub file as `target`, which appears only once its sha256 is right. What an earlier try left is gone on with.

    Raises HubError if the bytes are wrong even from the beginning, and then keeps none of them.
    """
    draft = target.with_name(target.name + PARTIAL)
    with output_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        found = _append(place, draft, size, progress, source)
        if found != sha256:
            # What was left from an earlier run, or what came this time: read all of it once more.
            draft.unlink()
            progress(-size)
            found = _append(place, draft, size, progress, source)
        if found != sha256:
            draft.unlink()
            raise HubError(f"{place}: {size} bytes with sha256 {found}, expected {sha256}; the hub's copy is damaged")
        draft.rename(target)
        sync_folder(target.parent)


def _append(place: Place, draft: Path, size: int, progress: Callable[[int], None], source: Bytes) -> str:
    """Brings the draft to its full size; the sha256 of all of it."""
    digest = hashlib.sha256()
    handle = os.open(draft, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if os.fstat(handle).st_size > size:
            os.ftruncate(handle, 0)
        done = 0
        while data := os.read(handle, HASHED):
            digest.update(data)
            done += len(data)
        progress(done)
        for data in source(place, done, size):
            write_all(handle, memoryview(data))
            digest.update(data)
            progress(len(data))
        os.fsync(handle)
    finally:
        os.close(handle)
    return digest.hexdigest()
