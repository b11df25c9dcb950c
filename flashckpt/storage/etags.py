"""Entity tags (ETags) of an S3 server as evidence of what it stored: if they are MD5 digests, they are checked.

They need not be: with KMS keys, in directory buckets and on some servers they are arbitrary. A server is assumed to
return digests once one has matched; before that, a tag that does not match is checked by reading the object back.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from flashckpt.errors import StoreError

_DIGEST = re.compile(r"[0-9a-f]{32}")
_OF_PARTS = re.compile(r"[0-9a-f]{32}-\d+")


class Tags:
    """The knowledge about one server's tags; None: nothing yet, True: they are MD5 digests, False: they are not."""

    def __init__(self) -> None:
        self.are_digests: bool | None = None

    def doubt(self, tag: str | None, body: bytes) -> bool:
        """Return whether an object must be read back: its tag is not the digest of `body`, and tags may be digests here."""
        text = (tag or "").strip('"').lower()
        if self.are_digests is False or not _DIGEST.fullmatch(text):
            return False
        if text != _md5(body).hexdigest():
            return True
        self.are_digests = True
        return False

    def settle(self, url: str, key: str, *, tag: str | None, body: bytes, stored: bytes) -> None:
        """Resolve a doubt with the bytes that were read back.

        Raises:
            StoreError: They differ.
        """
        if stored == body:
            if self.are_digests is None:
                self.are_digests = False
            return
        raise StoreError(
            f"the server of {url} holds other bytes under {key} than were sent",
            found=f"{len(stored)} bytes, ETag {tag}",
            expected=f"{len(body)} bytes, MD5 {_md5(body).hexdigest()}",
            state="The object counts as not written.",
            remedy="persisting is retried; if this persists, check the server and the network path to it",
        )

    def check_parts(self, url: str, key: str, *, tag: str | None, parts: Sequence[str]) -> None:
        """Check the tag of an object that was assembled from parts with these tags.

        Raises:
            StoreError: It belongs to other parts.
        """
        text, digests = (tag or "").strip('"').lower(), [part.strip('"').lower() for part in parts]
        if self.are_digests is not True or not _OF_PARTS.fullmatch(text) or not all(map(_DIGEST.fullmatch, digests)):
            return
        expected = f"{_md5(b''.join(map(bytes.fromhex, digests))).hexdigest()}-{len(parts)}"
        if text != expected:
            raise StoreError(
                f"the server of {url} assembled {key} from other parts than were sent",
                found=f"ETag {text}",
                expected=f"ETag {expected}",
                state="The object counts as not written.",
                remedy="persisting is retried; if this persists, check the server",
            )


def _md5(data: bytes) -> hashlib._Hash:
    return hashlib.md5(data, usedforsecurity=False)
