"""Where a request's pictures come from: data URLs, and files under one folder. Only a given `fetch` asks a network."""

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from runtime_min.vision import clips
from runtime_min.vision.items import Media, clip, picture
from runtime_min.vision.picture import opened
from runtime_min.vision.rule import MediaError, Rule

MAX_URL = 384 << 20
IMAGE, VIDEO = ("image", "image_url"), ("video", "video_url")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """root: the folder whose files a request may name, None for no files at all. fetch: (where, address) to bytes, for
    http and https; None for none."""

    rule: Rule
    root: Path | None = None
    fetch: Callable[[str, str], bytes] | None = None

    def media(self, messages: Sequence[Mapping[str, Any]]) -> list[Media]:
        """Every picture and clip of a conversation, in the order in which its prompt names them.

        Raises MediaError that begins with messages[i].content[j] for the first part that cannot be taken.
        """
        return [self._part(where, part) for where, part in parts(messages)]

    def _part(self, where: str, part: Mapping[str, Any]) -> Media:
        kind = part["type"]
        given = part.get(kind)
        if isinstance(given, Mapping):
            given = given.get("url")
        if kind in VIDEO and isinstance(given, list | tuple):
            return self._frames(where, given, part)
        if not isinstance(given, str) or not given:
            raise MediaError(f"{where}.{kind}: found {_brief(given)}, expected a data URL or the path of a file")
        at = f"{where}.{kind}" if given[:5].lower() == "data:" else f"{where}.{kind} {_path(given)}"
        data = self.read(at, given)
        return picture(at, data, self.rule) if kind in IMAGE else clips.from_file(at, data, self.rule)

    def _frames(self, where: str, given: Sequence[Any], part: Mapping[str, Any]) -> Media:
        """A clip given as pictures, with `timestamps` in seconds or at `fps`, by default the rate of sampling."""
        frames = []
        for i, url in enumerate(given):
            at = f"{where} frame {i}"
            if not isinstance(url, str):
                raise MediaError(f"{at}: found {_brief(url)}, expected a data URL or the path of a file")
            frames.append(opened(at, self.read(at, url)))
        times, fps = part.get("timestamps"), part.get("fps", self.rule.fps)
        if times is None:
            if isinstance(fps, bool) or not isinstance(fps, int | float) or not fps > 0:
                raise MediaError(f"{where}.fps: found {_brief(fps)}, expected frames a second above 0")
            times = [i / fps for i in range(len(frames))]
        if not isinstance(times, list) or not all(isinstance(t, int | float) for t in times):
            raise MediaError(f"{where}.timestamps: found {_brief(times)}, expected seconds, one for each frame")
        return clip(where, frames, times, self.rule)

    def read(self, where: str, url: str) -> bytes:
        """The bytes behind a data URL or a file's path; MediaError for anything else."""
        if url[:5].lower() == "data:":
            return _data(where, url)
        scheme = urlsplit(url).scheme.lower() if "://" in url else ""
        if scheme in ("http", "https") and self.fetch is not None:
            return self.fetch(where, url)
        if scheme not in ("", "file"):
            raise MediaError(f"{where}: {scheme} addresses are not fetched; send a data URL")
        if self.root is None:
            raise MediaError(f"{where}: files are not read here; send a data URL, or allow a folder with --media-root")
        return self._file(where, unquote_to_bytes(urlsplit(url).path).decode() if scheme else url)

    def _file(self, where: str, name: str) -> bytes:
        assert self.root is not None
        root = self.root.resolve()
        try:
            # Links are followed before the check, so none leads out.
            path = (root / name).resolve()
            if not path.is_relative_to(root):
                raise MediaError(f"{where}: is outside the allowed folder {self.root}")
            return path.read_bytes()
        except (OSError, ValueError) as e:
            if isinstance(e, MediaError):
                raise
            raise MediaError(f"{where}: cannot be read: {getattr(e, 'strerror', None) or e}") from e


def parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, part) of every picture and clip of a conversation whose form has been checked."""
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list | tuple) else ()):
            if part["type"] in (*IMAGE, *VIDEO):
                yield f"messages[{i}].content[{j}]", part


def _data(where: str, url: str) -> bytes:
    if len(url) > MAX_URL:
        raise MediaError(f"{where}: a data URL of {len(url):,} characters, at most {MAX_URL:,} are taken")
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise MediaError(f"{where}: found {_brief(url)}, expected data:image/TYPE;base64,...")
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as e:
        raise MediaError(f"{where}: its base64 is wrong: {e}") from e


def _brief(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _path(name: str) -> str:
    """A file's name for an error: its end, if it is longer than anyone's."""
    return repr(name if len(name) <= 300 else f"...{name[-297:]}")
