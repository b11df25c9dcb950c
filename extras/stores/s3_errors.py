"""Errors of S3 requests, shared by both clients: distinguishes a missing bucket, refused access and a dead endpoint."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from flashckpt.errors import ConfigError, FlashckptError, ObjectMissingError, RootError, StoreError, is_passing_status
from flashckpt.storage.conditional import UnknownRequestError

MISSING_KEY = ("NoSuchKey", "404", "NotFound")
REFUSED = (
    "AccessDenied",
    "AllAccessDisabled",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
    "401",
    "403",
)
_SKEWED = "RequestTimeTooSkewed"
_ELSEWHERE = ("PermanentRedirect", "TemporaryRedirect", "IllegalLocationConstraintException", "301", "307", "308")
_MALFORMED = "AuthorizationHeaderMalformed"
"""Answers of a server that does not have the bucket; the last one also to keys that are none, where it names no region."""
_TLS = {
    r"WRONG_VERSION_NUMBER|InvalidContentType": ("does not speak TLS", "http:// in endpoint_url, or the port for https://"),
    r"CERTIFICATE_VERIFY_FAILED|InvalidCertificate": (
        "has a certificate that is not trusted", "AWS_CA_BUNDLE=FILE of who issued it, or the host name that it is for",
    ),
}  # fmt: skip
"""Words of OpenSSL and of obstore's rustls, with problem and remedy."""
_CHECKSUM = re.compile(r"content-md5|x-amz-checksum|x-amz-sdk-checksum", re.IGNORECASE)
STALE = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId")
"""Answers to credentials that may have been replaced where they come from."""
_BUSY = (
    "SlowDown",
    "RequestTimeout",
    "OperationAborted",
    "ConditionalRequestConflict",
    "BadDigest",
    "IncompleteBody",
    "XAmzContentSHA256Mismatch",
)
"""Answers of a server that is busy, or to bytes that arrived otherwise than they were sent."""
_LOST_UPLOAD = ("NoSuchUpload", "InvalidPart")  # somebody aborted it: another one may succeed
_PERMANENT = (
    "NoSuchBucket",
    "NoSuchUpload",
    "InvalidBucketName",
    "PreconditionFailed",
    "412",
    "MethodNotAllowed",
    "NotImplemented",
)
_UNKNOWN_REQUEST = ("NotImplemented", "MethodNotAllowed")
_REFUSED_BATCH = ("NotImplemented", "MethodNotAllowed", "MissingContentMD5", "InvalidRequest", "MalformedXML")
"""Answers of servers that have no batch delete, or want other checksums for it than the client sends."""


def translate(error: BaseException, url: str, bucket: str, key: str) -> FlashckptError:
    """Return our error for one of botocore or aiohttp."""
    code, status, name = error_code(error), http_status(error), type(error).__name__
    if name in ("CredentialRetrievalError", "TokenRetrievalError"):  # their service does not answer now
        return StoreError(f"the credentials for {url} cannot be obtained now", found=str(error))
    if name in ("NoCredentialsError", "PartialCredentialsError"):
        return no_credentials(url, str(error))
    if name in ("ProfileNotFound", "ConfigParseError"):
        return unknown_place(url, error)
    words = str(error).replace(" (reached max retries: 0)", "")  # botocore's: they are counted here
    found = f"{code or (f'HTTP {status}' if status else name)}: {words}"
    return request_error(url, bucket, key, code=code, status=status, found=found)


def request_error(url: str, bucket: str, key: str, *, code: str, status: int, found: str) -> FlashckptError:
    """Return the error for a failed request; distinguishes a missing bucket, refused access and a dead endpoint.

    Args:
        url: The root.
        bucket: Its bucket.
        key: The object the request was about; "" for the root itself.
        code: S3's error code, "" where the answer had none.
        status: HTTP status, 0 where there was no answer.
        found: The part of the answer to show.
    """
    if code == "NoSuchBucket" or (not key and status == 404):
        problem, remedy = f"the bucket {bucket} does not exist", f"create it, or correct the root {url}"
        return RootError(problem, found=found, remedy=remedy)
    if code in MISSING_KEY or (status == 404 and code != "NoSuchUpload"):
        return ObjectMissingError(f"the object {key} of {url} is missing", found=found)
    if code == "QuotaExceeded":
        return StoreError(
            f"no room is left for {url}", found=found, remedy="raise the quota, or delete old checkpoints"
        )
    if (refusal := _refusal(url, bucket, code, status, found)) is not None:
        return refusal
    if status == 0 and not code:
        return _no_answer(url, found)
    kind: type[FlashckptError] = RootError  # another service: it stays so
    if code in _UNKNOWN_REQUEST or status in (405, 501):
        kind = UnknownRequestError
    elif code in _LOST_UPLOAD or is_transient_answer(code, status) or (not status and is_transient_code(code)):
        kind = StoreError
    return kind(f"the request for {key or 'the root'} of {url} failed", found=found, expected="HTTP 200")


def _refusal(url: str, bucket: str, code: str, status: int, found: str) -> RootError | None:
    """Return the error for an answer to who asks, when and where, rather than to what; None for another one."""
    if code == _SKEWED:
        return RootError(
            f"the clock of this machine is not that of the server of {url}",
            found=found,
            expected="at most 15 minutes between them",
            remedy="set the clock (timedatectl set-ntp true); persisting then resumes automatically",
        )
    if code in _ELSEWHERE or status in (301, 307, 308) or (code == _MALFORMED and "region" in found.lower()):
        return elsewhere(url, bucket, found)
    if code in (*REFUSED, _MALFORMED) or status in (401, 403):
        return RootError(
            f"the credentials for {url} were refused",
            found=found,
            expected="read, write, list and delete in the bucket",
            remedy="renew or correct the credentials; persisting then resumes automatically",
        )
    return None


def _no_answer(url: str, found: str) -> FlashckptError:
    for words, (problem, remedy) in _TLS.items():
        if re.search(words, found):
            return RootError(f"the endpoint of {url} {problem}", found=found, remedy=remedy)
    return StoreError(
        f"the endpoint of {url} cannot be reached",
        found=found,
        remedy="check network and endpoint_url; persisting then resumes automatically",
    )


def elsewhere(url: str, bucket: str, found: str) -> RootError:
    """Return the error for a bucket that is not where it was asked for."""
    return RootError(
        f"the bucket {bucket} is not at the endpoint and in the region that {url} was given",
        found=found,
        remedy="name its region (AWS_DEFAULT_REGION, or client_kwargs={'region_name': ...}), or correct endpoint_url, "
        "e.g. https:// in place of http://",
    )


def no_credentials(url: str, found: str = "") -> RootError:
    """Return the error for a root to which no credentials were found at all."""
    remedy = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or storage_options"
    return RootError(f"no credentials for {url}", found=found, remedy=remedy)


def unknown_place(url: str, error: BaseException) -> ConfigError:
    """Return the error for a configuration that does not say where the root is."""
    remedy = "correct AWS_PROFILE, its file, AWS_ENDPOINT_URL or endpoint_url"
    return ConfigError(
        f"{url} cannot be found: the configuration names no place for it", found=str(error), remedy=remedy
    )


def _response(error: BaseException) -> dict[str, Any]:
    response = getattr(error, "response", None)
    return response if isinstance(response, dict) else {}


def error_code(error: BaseException) -> str:
    """Return S3's error code; "" where there was no answer."""
    return str(_response(error).get("Error", {}).get("Code") or "")


def http_status(error: BaseException) -> int:
    """Return the HTTP status; 0 where there was no answer."""
    return int(_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_network(error: BaseException) -> bool:
    """Return whether an exception can come from the network and its clients rather than from a bug here."""
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, (OSError, asyncio.TimeoutError)) or package in ("aiohttp", "botocore", "aiobotocore")


def is_transient_code(code: str) -> bool:
    """Return whether a key of a batch that failed with this code may succeed a moment later."""
    return code in (*_BUSY, "InternalError", "ServiceUnavailable", "OperationAborted", "500", "503")


def is_transient_answer(code: str, status: int) -> bool:
    """Return whether the same request may be answered otherwise a moment later."""
    if code in REFUSED or code in _PERMANENT or code in MISSING_KEY:
        return False
    return is_passing_status(status) or code in _BUSY


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed a moment later."""
    code, status, name = error_code(error), http_status(error), type(error).__name__
    if "Credential" in name or "Param" in name or any(re.search(words, str(error)) for words in _TLS):
        return False
    return is_transient_answer(code, status) if status else is_network(error)


def wants_checksum(code: str, words: str) -> bool:
    """Return whether a server takes no object without a checksum of the request, as for one that Object Lock protects."""
    return code in ("InvalidRequest", "MissingContentMD5") and _CHECKSUM.search(words) is not None


def has_no_batch_delete(error: BaseException) -> bool:
    """Return whether a server refused the request as such, so that keys have to be deleted one by one."""
    return error_code(error) in _REFUSED_BATCH or http_status(error) in (405, 501)


def undeleted(url: str, bucket: str, key: str, code: str, message: str) -> RootError | StoreError | None:
    """Return the error of one key; None where it was not there."""
    error = request_error(url, bucket, key, code=code, status=500, found=f"{code}: {message}")
    if isinstance(error, ObjectMissingError):
        return None
    assert isinstance(error, (RootError, StoreError))
    return error
