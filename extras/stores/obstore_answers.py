"""What obstore's errors say, which have no code: by the words of their messages."""

from __future__ import annotations

import re

from flashckpt.errors import FlashckptError, StoreError
from flashckpt.storage.conditional import truncated
from flashckpt.stores.s3_errors import REFUSED, no_credentials, request_error

OF_OTHER_PLACE = re.compile(
    r"<Code>(PermanentRedirect|TemporaryRedirect|IllegalLocationConstraintException)|Malformed</Code>.*region|redirect without LOCATION"
    r"|status code: 30[178]|<Code>InvalidRequest</Code>.*(Content-MD5|x-amz-(sdk-)?checksum)",
    re.DOTALL | re.IGNORECASE,
)
"""Answers to which botocore sends other requests: to the region of the bucket, or with a checksum."""
HEAD_REFUSED = re.compile(r"performing HEAD .*status code: 400", re.DOTALL)
"""One that has no body to say why: another region, or keys that have expired."""
NOT_ABORTED = re.compile(r"performing DELETE \S+[?&]uploadId=([^\s&]+)")
"""The failure of the request that ends a failed upload: obstore lets it hide the one before it."""


def translated(error: BaseException, url: str, bucket: str, key: str) -> FlashckptError:
    """Return the error of the store for one of obstore's."""
    text, _, source = str(error).partition("\n\nDebug source")
    cause = re.search(r"InvalidContentType|InvalidCertificate\([^()]*", source)  # which its message leaves out
    code = next(iter(re.findall(r"<Code>(\w+)</Code>", text)), "")
    status = status_of(text)
    if "no credentials for" in text:
        return no_credentials(url)
    if code == "InvalidRange" or status == 416:
        return truncated(url, key, found="less than the start of the range", needed=0)
    if isinstance(error, FileNotFoundError) and not status:
        status = 404
    found = f"{code or type(error).__name__}: {text[:300]}" + (f" ({cause[0]})" if cause else "")
    if NOT_ABORTED.search(text) and code not in REFUSED and status not in (401, 403):
        return StoreError(
            f"the upload of {key} to {url} failed, and the parts that had arrived could not be removed", found=found
        )
    return request_error(url, bucket, key, code=code, status=status, found=found)


def status_of(text: str) -> int:
    """Return the HTTP status that a message names, 0 where it names none."""
    if found := re.search(r"status code: (\d{3})", text):
        return int(found[1])
    return 301 if "Received redirect" in text else 0
