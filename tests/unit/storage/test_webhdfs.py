"""webhdfs:// without a server: what is refused, what is tried again, and that nothing secret is shown.

The store on Hadoop's own servers is tested by `make test-hdfs`.
"""

from __future__ import annotations

import http.server
import json
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from support.s3 import free_port

from flashckpt.errors import ConfigError, FlashckptError, RootError, StoreError
from flashckpt.storage.factory import open_store
from flashckpt.stores.webhdfs import HdfsError, _publish

pytest.importorskip("requests")


class NameNode(http.server.ThreadingHTTPServer):
    """Answers everything with one error of Hadoop."""

    def __init__(self, name: str, status: int = 403) -> None:
        super().__init__(("127.0.0.1", 0), _Refusal)
        self.status = status
        self.body = json.dumps({"RemoteException": {"exception": name, "message": "why\n\tat java"}}).encode()
        self.asked = 0


class _Refusal(http.server.BaseHTTPRequestHandler):
    server: NameNode

    def answer(self) -> None:
        self.server.asked += 1
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    do_GET = do_PUT = do_POST = do_DELETE = answer  # noqa: N815 -- the names http.server calls

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def name_node(request: pytest.FixtureRequest) -> Iterator[NameNode]:
    with NameNode(*request.param) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("name_node", "error", "asked"),
    [
        (("SafeModeException",), StoreError, 3),
        (("IOException", 500), StoreError, 3),
        (("DSQuotaExceededException",), StoreError, 1),
        (("ParentNotDirectoryException",), RootError, 1),
        (("AccessControlException",), RootError, 1),
    ],
    indirect=["name_node"],
)
def test_what_may_pass_is_asked_again_and_what_stays_is_not(
    name_node: NameNode, error: type[Exception], asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashckpt.stores.webhdfs.FIRST_PAUSE_S", 0.0)
    store = open_store(f"webhdfs://127.0.0.1:{name_node.server_port}/run", user="me", retries=3)
    with pytest.raises(error) as caught:
        store.folders()
    assert caught.value.found.endswith("Exception: why")  # type: ignore[attr-defined]
    assert name_node.asked == asked


@pytest.mark.parametrize("status", [400, 403, 405, 408, 410, 429, 500, 501, 502, 503])
def test_what_a_gateway_answers_is_permanent_or_not_by_its_status(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashckpt.stores.webhdfs.FIRST_PAUSE_S", 0.0)
    with NameNode("", status) as server:
        server.body = b"<html>Knox</html>"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        store = open_store(f"webhdfs://127.0.0.1:{server.server_port}/run", user="me", retries=3)
        with pytest.raises(FlashckptError) as caught:
            store.get("a")
        server.shutdown()
        thread.join()
    passes = status in (408, 429, 500, 502, 503)
    assert (caught.value.settle(), server.asked) == ((41, 3) if passes else (13, 1))
    store.close()


def test_token_is_not_shown() -> None:
    store = open_store(f"webhdfs://127.0.0.1:{free_port()}/run", token="SECRET", retries=1)
    with pytest.raises(StoreError, match="failed") as caught:
        store.put("a", b"x")
    assert "delegation=..." in caught.value.found
    assert "SECRET" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("url", ["webhdfs://me:SECRET@host:9870/run", "webhdfs://me:@host/run"])
def test_password_in_the_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="webhdfs://me@host") as caught:
        open_store(url)
    assert "SECRET" not in str(caught.value)
    open_store("webhdfs://me@host:9870/run")


class Gateway:
    """Renames as Hadoop's first version of the call does: it has no options, and says false where the target exists."""

    content = b'{"boolean": false}'

    def _call(self, *_: Any, **__: Any) -> Gateway:
        return self

    def json(self) -> dict[str, bool]:
        return {"boolean": False}

    def info(self, path: str) -> dict[str, Any]:
        return {"name": path, "fileId": 7}


def test_server_that_ignores_the_options_of_a_rename_replaces_nothing_and_says_so() -> None:
    assert not _publish(Gateway(), "/new", "/there", 8, "NONE")
    with pytest.raises(HdfsError, match="ignores renameoptions=OVERWRITE") as caught:
        _publish(Gateway(), "/new", "/there", 8, "OVERWRITE")
    assert caught.value.is_final
    assert _publish(Gateway(), "/new", "/there", 7, "OVERWRITE"), "it was done before, and its answer lost"
    assert not _publish(Gateway(), "/new", "/there", 0, "NONE"), "a server without numbers"
