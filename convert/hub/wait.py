"""Patience with the hub: what passes by itself is waited for as long as the hub says; the rest is said plainly."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from specs.errors import InputError

log = logging.getLogger(__name__)

T = TypeVar("T")
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
TRIES = 8
LONGEST = 64.0


class HubError(InputError):
    """The hub refused, could not be reached, or holds something else than expected."""


def pause(error: Exception, failures: int) -> float | None:
    """Seconds to wait before the `failures`-th repetition (from 1 on), or None if repeating would not help.

    Retry-After and RateLimit headers are kept to; without them the wait doubles from one second.
    """
    from huggingface_hub import errors
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    if failures > TRIES:
        return None
    backoff = min(LONGEST, 2.0 ** (failures - 1)) * random.uniform(0.5, 1.0)
    if isinstance(error, errors.HfHubHTTPError):
        headers = error.response.headers
        if error.response.status_code not in TRANSIENT:
            return None
        if (told := headers.get("retry-after", "").strip()).isdigit():
            return float(told)
        limit = parse_ratelimit_headers(headers)
        spent = limit is not None and error.response.status_code == 429 and limit.remaining == 0
        return float(limit.reset_in_seconds) if limit is not None and spent else backoff
    # The transport's errors: refused, cut, timed out. Their root is found here under one name in every version.
    return backoff if isinstance(error, errors.HTTPError) else None  # type: ignore[attr-defined]


def patiently(action: Callable[[], T], what: str) -> T:
    """The action's result, repeated while it fails in ways that pass."""
    for failures in range(1, TRIES + 2):
        try:
            return action()
        except Exception as e:
            if (seconds := pause(e, failures)) is None:
                raise
            _wait(seconds, what, e)
    raise AssertionError("the last failure is raised above")


def _wait(seconds: float, what: str, error: Exception) -> None:
    log.warning("%s: %s; again in %.0f s", what, str(error).splitlines()[0], seconds)
    time.sleep(seconds)


@contextmanager
def refusals(repo: str) -> Iterator[None]:
    """The hub's refusals in plain words."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as e:
        raise HubError(f"{repo}: gated; accept its terms on the hub and log in with `hf auth login`") from e
    except errors.RepositoryNotFoundError as e:
        raise HubError(f"{repo}: no such repository, or your token may not see it; `hf auth login`") from e
    except errors.RevisionNotFoundError as e:
        raise HubError(f"{repo}: the repository has no such revision") from e
    except errors.LocalTokenNotFoundError as e:
        raise HubError(f"{repo}: needs a token; `hf auth login`") from e
    except errors.HTTPError as e:  # type: ignore[attr-defined]
        status = getattr(getattr(e, "response", None), "status_code", None)
        if status in (401, 403):
            raise HubError(f"{repo}: your token may not do that; `hf auth login` with one that may") from e
        told = "" if status is None else f"{status}: "
        raise HubError(
            f"{repo}: the hub failed: {told}{str(e).splitlines()[0]}; run the same command again, it goes on from there"
        ) from e
