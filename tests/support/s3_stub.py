"""An S3 server on the loopback address that lacks what it is told to lack, and remembers who asked it for what.

It is also a proxy for http://, so that a client finds it under any name of a host.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request: where it went, in whose name and with what.

    Attributes:
        place: Host, and the bucket where it is in the path.
        key, region: Of the signature; "" without one.
        headers: Its x-amz-* headers.
    """

    method: str
    place: str
    query: str
    key: str
    region: str
    headers: dict[str, str]


@dataclass
class Stub:
    """What the server holds, lacks and was asked.

    Attributes:
        refused: Status and code for kinds of requests by their names below.
        ignores_conditions: A conditional write is written in any case.
        keeps_folders: A folder is listed after its last object is gone.
        range_error: Answer to a range that begins behind the end.
        silent: Kinds of requests that are never answered.
        passing: As `refused`, with how often.
        expired: Access keys that are refused.
        region: What requests must be signed for; "" any.
        is_locking: Whether a write needs a checksum, as in a bucket with Object Lock.
    """

    endpoint: str = ""
    bucket: str = "bucket"
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    ignores_conditions: bool = False
    keeps_folders: bool = False
    range_error: tuple[int, str] = (416, "InvalidRange")
    silent: set[str] = field(default_factory=set)
    passing: dict[str, tuple[int, str, int]] = field(default_factory=dict)
    expired: set[str] = field(default_factory=set)
    region: str = ""
    is_locking: bool = False
    asked: list[Asked] = field(default_factory=list)
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    uploads: dict[str, tuple[str, dict[int, bytes]]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    ended: threading.Event = field(default_factory=threading.Event)

    def options(self, **changed: Any) -> dict[str, Any]:
        base = {"endpoint_url": self.endpoint, "key": "k", "secret": "s", "client_kwargs": {"region_name": "us-east-1"}}
        return {**base, "retries": 2, "timeout_s": 5.0, **changed}


_WORDS = {"InvalidRequest": "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object with Object Lock"}


def _has_checksum(headers: Any) -> bool:
    return "content-md5" in headers or any(name.lower().startswith("x-amz-checksum-") for name in headers)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: Stub

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _any(self) -> None:
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query, keep_blank_values=True)
        host, path = parts.netloc or self.headers.get("Host", ""), unquote(parts.path).lstrip("/")
        is_virtual = host.startswith(f"{self.stub.bucket}.")
        self.name = path if is_virtual else path.partition("/")[2]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        signed = re.search(r"Credential=([^/]+)/\d+/([^/]+)/", self.headers.get("Authorization", ""))
        found = Asked(
            method=self.command,
            place=host if is_virtual else f"{host}/{path.partition('/')[0]}",
            query=parts.query,
            key=signed.group(1) if signed else "",
            region=signed.group(2) if signed else "",
            headers={k.lower(): v for k, v in self.headers.items() if k.lower().startswith("x-amz-")},
        )
        with self.stub.lock:
            self.stub.asked.append(found)
            kind = self._kind()
            refused = self.stub.refused.get(kind)
            if left := self.stub.passing.get(kind, (0, "", 0))[2]:
                status, code, _ = self.stub.passing[kind]
                refused, self.stub.passing[kind] = (status, code), (status, code, left - 1)
        if found.key in self.stub.expired:
            refused = (400, "ExpiredToken")
        if found.region != (self.stub.region or found.region):
            text = f"the region '{found.region}' is wrong; expecting '{self.stub.region}'"
            more = f"<Region>{self.stub.region}</Region>"
            self._error(400, "AuthorizationHeaderMalformed", text, more)
            return
        if self.stub.is_locking and kind in ("put", "condition", "part") and not _has_checksum(self.headers):
            refused = (400, "InvalidRequest")
        if kind in self.stub.silent:
            self.stub.ended.wait(60)
            self.close_connection = True
            return
        if refused is not None:
            self._error(*refused, _WORDS.get(refused[1], ""))
            return
        with self.stub.lock:
            getattr(self, f"_{kind}")(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _any  # noqa: N815 -- the names http.server calls

    def _kind(self) -> str:
        query, command = self.query, self.command
        if command in ("GET", "HEAD"):
            return "uploads" if "uploads" in query else "get" if self.name else "list"
        if command == "PUT":
            return "part" if "uploadId" in query else "condition" if self.headers.get("If-None-Match") else "put"
        if command == "POST":
            return "batch" if "delete" in query else "begin" if "uploads" in query else "complete"
        return "abort" if "uploadId" in query else "delete"

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: int, code: str, text: str = "", more: str = "") -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{text or code}</Message>{more}</Error>".encode())

    def _put(self, body: bytes) -> None:
        self.stub.objects[self.name] = (body, time.time())
        folders = self.name.split("/")[:-1]
        self.stub.folders |= {"/".join(folders[: depth + 1]) + "/" for depth in range(len(folders))}
        self._answer(200, ETag=f'"{md5(body, usedforsecurity=False).hexdigest()}"')

    def _condition(self, body: bytes) -> None:
        if self.name in self.stub.objects and not self.stub.ignores_conditions:
            self._error(412, "PreconditionFailed")
        else:
            self._put(body)

    def _get(self, _: bytes) -> None:
        if self.name not in self.stub.objects:
            self._error(404, "NoSuchKey")
            return
        data, written = self.stub.objects[self.name]
        common = {
            "ETag": f'"{md5(data, usedforsecurity=False).hexdigest()}"',
            "Last_Modified": formatdate(written, usegmt=True),
        }
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            self._answer(200, data, **common)
            return
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
        if start >= len(data):
            self._error(*self.stub.range_error)
            return
        self._answer(206, data[start:stop], Content_Range=f"bytes {start}-{stop - 1}/{len(data)}", **common)

    def _list(self, _: bytes) -> None:
        prefix, delimiter = self.query.get("prefix", [""])[0], self.query.get("delimiter", [""])[0]
        names = [name for name in sorted(self.stub.objects) if name.startswith(prefix)]
        folders = {n[: n.index("/", len(prefix)) + 1] for n in names if delimiter and "/" in n[len(prefix) :]}
        if self.stub.keeps_folders and delimiter:
            deep = prefix.count("/") + 1
            folders |= {name for name in self.stub.folders if name.startswith(prefix) and name.count("/") == deep}
        after = self.query.get("continuation-token", [""])[0]
        left = [n for n in names if n > after and not (delimiter and "/" in n[len(prefix) :])]
        shown = left[:1000]
        folders = set() if after else folders
        more = f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>" if len(left) > 1000 else ""
        items = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.stub.objects[name][0])}</Size><ETag>x</ETag><LastModified>"
            f"{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(self.stub.objects[name][1]))}</LastModified></Contents>"
            for name in shown
        ) + "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders))
        head = f"<Name>{self.stub.bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(shown) + len(folders)}</KeyCount>"
        self._answer(
            200,
            f"<ListBucketResult>{head}<MaxKeys>1000</MaxKeys><IsTruncated>{str(bool(more)).lower()}"
            f"</IsTruncated>{more}{items}</ListBucketResult>".encode(),
        )

    def _uploads(self, _: bytes) -> None:
        items = "".join(
            f"<Upload><Key>{escape(name)}</Key><UploadId>{number}</UploadId><Initiated>2020-01-01T00:00:00.000Z</Initiated></Upload>"
            for number, (name, _) in self.stub.uploads.items()
        )
        self._answer(
            200,
            f"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>{items}</ListMultipartUploadsResult>".encode(),
        )

    def _delete(self, _: bytes) -> None:
        self.stub.objects.pop(self.name, None)
        self._answer(204)

    def _batch(self, body: bytes) -> None:
        for name in re.findall(r"<Key>(.*?)</Key>", body.decode()):
            self.stub.objects.pop(name, None)
        self._answer(200, b"<DeleteResult></DeleteResult>")

    def _begin(self, _: bytes) -> None:
        number = f"u{len(self.stub.asked)}"
        self.stub.uploads[number] = (self.name, {})
        self._answer(
            200,
            f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>".encode(),
        )

    def _part(self, body: bytes) -> None:
        self.stub.uploads[self.query["uploadId"][0]][1][int(self.query["partNumber"][0])] = body
        self._answer(200, ETag=f'"{md5(body, usedforsecurity=False).hexdigest()}"')

    def _complete(self, _: bytes) -> None:
        name, parts = self.stub.uploads.pop(self.query["uploadId"][0], ("", {}))
        if not name:
            self._error(404, "NoSuchUpload")
            return
        self.stub.objects[name] = (b"".join(parts[number] for number in sorted(parts)), time.time())
        self._answer(200, b'<CompleteMultipartUploadResult><ETag>"x"</ETag></CompleteMultipartUploadResult>')

    def _abort(self, _: bytes) -> None:
        is_there = self.stub.uploads.pop(self.query["uploadId"][0], None)
        self._answer(204) if is_there else self._error(404, "NoSuchUpload")


@contextlib.contextmanager
def s3_stub(**lacks: Any) -> Iterator[Stub]:
    """Run a server for the length of a `with` block; `lacks` as the attributes of `Stub`."""
    stub = Stub(**lacks)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"stub": stub}))
    server.daemon_threads = True
    stub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        stub.ended.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
