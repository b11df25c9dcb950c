"""Where an s3:// root is, for both clients by one resolution: botocore's, which s3fs has and obstore is given.

botocore reads the options, the environment (`AWS_ENDPOINT_URL_S3`, `AWS_IGNORE_CONFIGURED_ENDPOINT_URLS`, ...), profiles and their
`services` sections. It is asked for the URL of a request that is never sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

GIVEN_CREDENTIALS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Address:
    """Where the requests for one bucket go.

    Attributes:
        region: Region that requests are signed for.
        url: The part before the key of an object.
        is_virtual: Whether the configuration asks for the bucket in the name of the host.
        is_plain: Whether any client that is given the above goes there. Else only botocore does: it follows the redirects
            of a bucket whose region nothing names, knows access points, acceleration and a `ca_bundle`.
    """

    endpoint: str
    region: str
    url: str
    is_virtual: bool
    is_plain: bool

    def __str__(self) -> str:
        """Return endpoint and region as one phrase."""
        return f"{self.endpoint}, region {self.region}"


class _FoundError(Exception):
    """Ends a request before it is sent."""


def fsspec_defaults() -> dict[str, Any]:
    """Return what fsspec's own configuration (FSSPEC_S3_..., its files) adds to the options of s3://."""
    from fsspec.config import conf

    return {**conf.get("s3", {}), **conf.get("s3a", {})}


def client_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that s3fs makes botocore's client with, but for its `config`."""
    given = {name: options.get(ours) for ours, name in zip(("key", "secret", "token"), GIVEN_CREDENTIALS, strict=True)}
    given["endpoint_url"] = options.get("endpoint_url")
    given["use_ssl"] = options.get("use_ssl", True)
    return {name: value for name, value in given.items() if value is not None} | (options.get("client_kwargs") or {})


def address_of(bucket: str, options: Mapping[str, Any]) -> S3Address:
    """Resolve where a bucket is; nothing is connected to.

    Raises:
        BotoCoreError, ValueError: The configuration is wrong, e.g. names a profile that does not exist.
    """
    import botocore.session
    from botocore import UNSIGNED
    from botocore.config import Config

    session = botocore.session.Session()
    arguments = client_arguments(options)
    wanted = {k: v for k, v in (options.get("config_kwargs") or {}).items() if k in Config.OPTION_DEFAULTS}
    config = Config(**{**wanted, "signature_version": UNSIGNED})
    client = session.create_client("s3", config=config, **arguments)
    found: list[str] = []

    def keep(request: Any, **_: object) -> None:
        found.append(request.url)
        raise _FoundError

    client.meta.events.register_first("request-created.s3", keep)
    try:
        client.head_object(Bucket=bucket, Key="key")
    except _FoundError:
        pass
    finally:
        client.close()
    endpoint, url = client.meta.endpoint_url.rstrip("/"), found[0].removesuffix("/key")
    parts = urlsplit(endpoint)
    has_region = bool(arguments.get("region_name") or config.region_name or session.get_config_variable("region"))
    is_known = url in (f"{endpoint}/{bucket}", f"{parts.scheme}://{bucket}.{parts.netloc}{parts.path}")
    has_bundle = parts.scheme == "https" and bool(session.get_config_variable("ca_bundle"))
    is_of_aws = (parts.hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
    return S3Address(
        endpoint=endpoint,
        region=client.meta.region_name,
        url=url,
        is_virtual=url != f"{endpoint}/{bucket}" and (client.meta.config.s3 or {}).get("addressing_style") == "virtual",
        is_plain=is_known and (has_region or not is_of_aws) and not has_bundle,
    )
