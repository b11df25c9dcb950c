"""Exit codes say whether trying again can help, not which module failed: every final class x what may pass and what cannot."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import botocore.exceptions
import pytest
import torch
from support.agents import pretend_agent
from torch.distributed import DistNetworkError, DistStoreError

from flashckpt import Checkpointer, errors
from flashckpt.checkpoint import catalog
from flashckpt.daemon.launcher.budget import LONGEST_PAUSE_S, Budget
from flashckpt.daemon.launcher.failure import FailureReport, WorkerExit
from flashckpt.daemon.launcher.options import LaunchOutcome
from flashckpt.daemon.launcher.reporting import _cause
from flashckpt.daemon.zygote import worker
from flashckpt.errors import FINAL_CODES, PASSING_CODES, DataError, FlashckptError, RootError, StoreError
from flashckpt.restore import gather
from flashckpt.shm.agent_folder import read_permanent_error, waited_at
from flashckpt.storage.conditional import UnknownRequestError
from flashckpt.storage.posix import PosixStore
from flashckpt.stores.fsspec_store import FsspecStore
from flashckpt.stores.s3_errors import request_error, translate
from flashckpt.trainer.hub.source import read_json
from flashckpt.trainer.train.nonfatal import report_once


def answer(status: int, code: str = "Code") -> Exception:
    response: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error: Exception = botocore.exceptions.ClientError(response, "GetObject")
    return error


PASSING = {
    **{
        name: OSError(getattr(errno, name), name) for name in ("EIO", "ESTALE", "ENOTCONN", "ETIMEDOUT", "EHOSTUNREACH")
    },
    "refused connection": ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
    "reset": ConnectionResetError("reset"),
    "name service": socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    "no such host yet": socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    "time-out": TimeoutError("timed out"),
    "endpoint": botocore.exceptions.EndpointConnectionError(endpoint_url="http://x"),
    "read time-out": botocore.exceptions.ReadTimeoutError(endpoint_url="http://x"),
    "credentials not there now": botocore.exceptions.CredentialRetrievalError(provider="x", error_msg="y"),
    **{f"HTTP {status}": answer(status) for status in (500, 503, 429, 408, 409)},
    "a storage operation": StoreError("away"),
}
PERMANENT = {
    **{name: OSError(getattr(errno, name), name) for name in ("ENOENT", "EACCES", "ENOTDIR", "EROFS", "EINVAL")},
    "no credentials at all": botocore.exceptions.NoCredentialsError(),
    **{f"HTTP {status}": answer(status) for status in (301, 400, 401, 403, 404, 405, 501)},
    "a wrong value": ValueError("connection"),
    "a request that the server does not have": UnknownRequestError("list"),
    "a missing object": errors.ObjectMissingError("gone"),
    "nothing": None,
}
FINAL = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, FlashckptError)]
FINAL = [cls for cls in FINAL if cls.exit_code in FINAL_CODES]


def raised(cls: type[FlashckptError], cause: BaseException | None) -> FlashckptError:
    """The error as a module raises it: from one more of its own, which stands between it and the cause."""
    try:
        try:
            raise DataError("cannot be read") from cause  # noqa: TRY301 -- as a module that calls another
        except DataError as error:
            raise cls("cannot be used", found="x", remedy="y") from error
    except FlashckptError as error:
        return error


def run_as_worker(folder: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the exit code of a rank whose script raises this, and what its agent finds recorded."""
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", pretend_agent(folder))

    def explode(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(worker, "_run_script", explode)
    code = worker.run_recorded({"argv": ["x"], "module": False, "stderr": "", "error_file": str(folder / "error")})
    return code, read_permanent_error(folder)


@pytest.mark.parametrize("cls", FINAL, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("cause", [*PASSING, *PERMANENT])
def test_a_final_code_is_for_what_cannot_pass(
    cls: type[FlashckptError], cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = cause in PASSING and cause not in PERMANENT
    error = raised(cls, PASSING[cause] if passes else PERMANENT[cause])
    wanted = StoreError.exit_code if passes else cls.exit_code
    assert run_as_worker(tmp_path, error, monkeypatch) == (wanted, 0 if passes else wanted)
    assert str(error).endswith(f"exit code {wanted}")


def test_the_trainer_ends_with_the_same_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", pretend_agent(tmp_path))
    report_once(error := raised(DataError, PASSING["EIO"]))
    assert (error.exit_code, read_permanent_error(tmp_path)) == (41, 0)
    assert "exit code 41" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["EIO", "ESTALE", "ENOTCONN", "ENOENT", "EACCES"])
def test_a_tokenizer_folder_that_is_away_is_not_a_wrong_configuration(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "config.json").write_text("{}")
    error = OSError(getattr(errno, name), name)

    def away(_: Path) -> bytes:
        raise error

    monkeypatch.setattr(Path, "read_bytes", away)
    with pytest.raises(FlashckptError) as caught:
        read_json(path)
    assert caught.value.settle() == (StoreError.exit_code if name in PASSING else errors.ConfigError.exit_code)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (0, "", StoreError),
        (500, "InternalError", StoreError),
        (503, "SlowDown", StoreError),
        (400, "RequestTimeout", StoreError),
        (429, "", StoreError),
        (301, "PermanentRedirect", RootError),
        (400, "InvalidBucketName", RootError),
        (403, "AccessDenied", RootError),
        (404, "NoSuchBucket", RootError),
        (405, "MethodNotAllowed", UnknownRequestError),
    ],
)
def test_answer_about_the_root_itself(status: int, code: str, kind: type[FlashckptError]) -> None:
    assert type(request_error("s3://b/r", "b", "", code=code, status=status, found="x")) is kind


class AnsweredError(Exception):
    """As clients of fsspec's file systems raise what a server answered, each by another name."""

    def __init__(self, **said: int) -> None:
        self.__dict__.update(said)


@pytest.mark.parametrize("key", ["", "a"])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        *((AnsweredError(code=status), 13) for status in (400, 401, 403, 405, 410, 501)),
        *((AnsweredError(status_code=status), 41) for status in (408, 409, 429, 500, 503)),
        (AnsweredError(status=425), 41),
        (OSError("Forbidden: https://storage.googleapis.com/b/a"), 13),
        (ValueError("Bad Request: https://storage.googleapis.com/b/a"), 13),
        (OSError("connection lost"), 41),
    ],
    ids=lambda one: f"{type(one).__name__} {vars(one) or one}" if isinstance(one, Exception) else str(one),
)
def test_answer_of_a_server_through_fsspec(error: Exception, code: int, key: str) -> None:
    def ask(_: Any) -> None:
        raise error

    with pytest.raises(FlashckptError) as caught:
        FsspecStore("memory://may-pass", {})._do(key, ask)
    assert caught.value.settle() == code


def test_answer_without_a_code_is_shown_by_its_status() -> None:
    response: Any = {"Error": {"Code": None}, "ResponseMetadata": {"HTTPStatusCode": 405, "MaxAttemptsReached": True}}
    response["ResponseMetadata"]["RetryAttempts"] = 0
    found = translate(botocore.exceptions.ClientError(response, "ListObjectsV2"), "s3://b/r", "b", "").found
    assert found.startswith("HTTP 405: ")
    assert "max retries" not in found


def test_credentials_whose_service_does_not_answer_are_no_refusal() -> None:
    assert type(translate(PASSING["credentials not there now"], "s3://b/r", "b", "")) is StoreError
    assert type(translate(botocore.exceptions.NoCredentialsError(), "s3://b/r", "b", "")) is RootError


def begin(root: Path, job: str, **wanted: Any) -> Any:
    ckpt = Checkpointer(root, job=job)
    ckpt.track(model=torch.nn.Linear(2, 2))
    try:
        return ckpt.restore(**wanted)
    finally:
        ckpt.close()


@pytest.mark.parametrize("method", ["list", "folders", "put_if_absent"])
@pytest.mark.parametrize("name", ["EIO", "ESTALE", "ETIMEDOUT", "EACCES", "EROFS"])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_start_waits_for_a_root_that_is_away_and_not_for_one_that_refuses(
    method: str, name: str, fresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Whatever the root is first asked for at a start: three failures that may pass cost a moment, one refusal the start."""
    monkeypatch.setattr(gather, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", pretend_agent(tmp_path))
    left, real = [3], getattr(PosixStore, method)

    def away(self: PosixStore, key: str = "", *args: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            self._raise(OSError(getattr(errno, name), name), key, "write" if method == "put_if_absent" else "list")
        return real(self, key, *args)

    monkeypatch.setattr(PosixStore, method, away)
    job = f"away-{method}-{name}-{fresh}"
    if name in PASSING:
        assert begin(tmp_path / "root", job, fresh=fresh) is None
        assert left[0] < 0
        assert waited_at(tmp_path) > 0
        assert sum("trying again for" in record.message for record in caplog.records) == 1
        return
    with pytest.raises(RootError) as caught:
        begin(tmp_path / "root", job, fresh=fresh)
    assert caught.value.settle() == RootError.exit_code
    assert waited_at(tmp_path) == 0


def test_a_root_that_stays_away_ends_with_the_code_that_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "PATIENCE_S", 0.01)

    def away(self: PosixStore, key: str = "") -> Any:
        self._raise(OSError(errno.ETIMEDOUT, "x"), key, "list")

    monkeypatch.setattr(PosixStore, "list", away)
    with pytest.raises(StoreError) as caught:
        begin(tmp_path / "root", "stays-away")
    assert caught.value.settle() == StoreError.exit_code
    assert catalog.read_root(str(tmp_path / "root"), {}).may_pass


def ended_with(code: int, error: BaseException | None = None) -> FailureReport:
    text = "" if error is None else f"{type(error).__name__}: {error}"
    trace = f"Traceback\n{text}" if text else ""
    first = WorkerExit(local_rank=0, rank=0, pid=1, code=code, at_ns=1, summary=text, traceback=trace)
    return FailureReport(first=first, host="a", cause="x")


WAITS: dict[str, Callable[[], FailureReport]] = {
    "root": lambda: ended_with(41, StoreError("x")),
    "no checkpoint taken": lambda: ended_with(40, errors.PersistError("x")),
    "name service": lambda: ended_with(1, PASSING["name service"]),
    "rendezvous store": lambda: ended_with(1, DistNetworkError("failed to connect to (host, 29500)")),
    "store": lambda: ended_with(1, DistStoreError("wait timeout after 300000ms")),
    "stale": lambda: ended_with(1, OSError(errno.ESTALE, "Stale file handle")),
}


@pytest.mark.parametrize("what", WAITS)
def test_what_may_pass_is_no_crash_loop_and_is_restarted_with_growing_pauses(what: str) -> None:
    report, budget = WAITS[what](), Budget(None)
    assert report.first.may_pass
    verdicts = [budget.spend(fingerprint=report.fingerprint, step=-1, may_pass=True) for _ in range(11)]
    assert [one.restart for one in verdicts] == [True] * 10 + [False]
    pauses = [one.pause_s for one in verdicts[:-1]]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (1.0, LONGEST_PAUSE_S)
    assert Budget(None).spend(fingerprint="", step=-1, ran_s=60.0, may_pass=True).pause_s == 0  # it has waited itself


@pytest.mark.parametrize("error", [ValueError("x"), FileNotFoundError(2, "No such file"), RuntimeError("shapes")])
def test_what_cannot_pass_is_a_crash_loop_as_before(error: BaseException) -> None:
    report, budget = ended_with(1, error), Budget(None)
    assert not report.first.may_pass
    assert budget.spend(fingerprint=report.fingerprint, step=-1).pause_s == 0
    assert budget.spend(fingerprint=report.fingerprint, step=-1).repeats


HINTS = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
"""Torch says so below each error of a device."""


@pytest.mark.parametrize(
    "says",
    [
        "CUDA error: unspecified launch failure",
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: unknown error",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "HIP error: unspecified launch failure",
        "NPU error: device lost",
    ],
)
def test_a_device_that_fails_at_one_step_again_and_again_is_no_error_of_the_script(says: str) -> None:
    report, budget = ended_with(1, torch.AcceleratorError(f"{says}\n{HINTS}", 719)), Budget(None)
    context: Any = SimpleNamespace(standing=[])
    verdicts = [budget.spend(fingerprint=report.fingerprint, step=5) for _ in range(11)]
    assert [one.restart for one in verdicts] == [True] * 10 + [False]
    assert not any(one.repeats for one in verdicts)
    assert _cause(report.first, context, 0).endswith("an error of the device, its driver or a kernel")


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(f"CUDA error: device-side assert triggered\n{HINTS}", 710),
        torch.AcceleratorError(f"CUDA error: invalid device ordinal\n{HINTS}", 101),
        torch.AcceleratorError(f"CUDA error: an illegal memory access was encountered\n{HINTS}", 700),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 65536.00 GiB."),
    ],
)
def test_what_a_program_does_to_a_device_is_an_error_of_the_script(error: BaseException) -> None:
    report, budget = ended_with(1, error), Budget(None)
    assert budget.spend(fingerprint=report.fingerprint, step=5).restart
    assert budget.spend(fingerprint=report.fingerprint, step=5).repeats


@pytest.mark.parametrize("code", sorted(PASSING_CODES))
def test_without_restarts_dlrun_ends_with_the_code_of_what_may_pass(code: int) -> None:
    error = LaunchOutcome(passing=code).error()
    assert error is not None
    assert error.exit_code == code
    assert code not in FINAL_CODES
    assert f"exit code {code}" in str(error)
