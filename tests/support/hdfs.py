"""A small HDFS on this machine: one NameNode, one DataNode, killed and started again (tests/integration/hdfs/hadoop.sh)."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store
from support.paths import ROOT
from support.ranks import wait_for
from support.s3 import free_port

JARS = Path(os.environ.get("HADOOP_JARS") or ROOT / ".hadoop-jars")
USER = getpass.getuser()
"""Who starts the NameNode may do everything there."""
_SERVERS = {
    "namenode": "org.apache.hadoop.hdfs.server.namenode.NameNode",
    "datanode": "org.apache.hadoop.hdfs.server.datanode.DataNode",
}
_LOG = """\
log4j.rootLogger=WARN,err
log4j.appender.err=org.apache.log4j.ConsoleAppender
log4j.appender.err.target=System.err
log4j.appender.err.layout=org.apache.log4j.PatternLayout
log4j.appender.err.layout.ConversionPattern=%d %p %c{1}: %m%n
"""
# Hadoop 2.7 is of the time of Java 8: it reads the version in that form, and looks into classes of Java itself
_JAVA = [
    "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.version=1.8.0", "-Djava.net.preferIPv4Stack=true",
    *(f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in ("java.lang", "java.util", "java.net", "java.nio", "sun.nio.ch")),
]  # fmt: skip


def missing() -> str:
    """Name what is not installed, "" where all is there."""
    if not (JARS / "complete").exists():
        return str(JARS)
    return "" if java() else "Java 11, 17 or 21"


def java() -> str:
    """Return a Java that Hadoop 2.7 runs on: 24 has no security manager."""
    for version in (17, 21, 11):
        for path in sorted(Path("/usr/lib/jvm").glob(f"java-{version}-*/bin/java")):
            return str(path)
    return ""


class Hdfs:
    """Its state is in a folder; `kill` and `start` keep the addresses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self.data_port, rpc = free_port(), free_port(), free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("conf", "webapps/hdfs/WEB-INF", "webapps/datanode/WEB-INF", "webapps/static"):
            (folder / name).mkdir(parents=True)
        for name in ("hdfs", "datanode"):
            (folder / "webapps" / name / "WEB-INF" / "web.xml").write_text("<web-app/>")
        (folder / "conf" / "log4j.properties").write_text(_LOG)
        local = "127.0.0.1"
        self._configure("core", {"fs.defaultFS": f"hdfs://{local}:{rpc}", "hadoop.tmp.dir": f"{folder}/tmp"})
        self._configure("hdfs", {
            "dfs.namenode.http-address": f"{local}:{self.port}",
            "dfs.namenode.name.dir": f"file://{folder}/name",
            "dfs.namenode.safemode.extension": "0",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.datanode.data.dir": f"file://{folder}/data",
            "dfs.datanode.address": f"{local}:0",
            "dfs.datanode.ipc.address": f"{local}:0",
            "dfs.datanode.http.address": f"{local}:{self.data_port}",
            "dfs.datanode.hostname": local,
            "dfs.replication": "1",
            "dfs.client.block.write.locateFollowingBlock.initial.delay.ms": "10",
        })  # fmt: skip
        done = subprocess.run(
            [*self._command("namenode"), "-format", "-nonInteractive"], capture_output=True, check=False, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def data_endpoint(self) -> str:
        return f"http://127.0.0.1:{self.data_port}"

    def url(self, path: str) -> str:
        return f"webhdfs://127.0.0.1:{self.port}/{path}"

    def options(self, **changed: Any) -> dict[str, Any]:
        return {"user": USER, **changed}

    def open(self, path: str, **changed: Any) -> Store:
        return open_store(self.url(path), **self.options(**changed))

    def start(self, *servers: str) -> None:
        """Start those that do not run, and wait until files can be written."""
        for name in servers or _SERVERS:
            with (self.folder / f"{name}.log").open("ab") as log:
                self._processes[name] = subprocess.Popen(
                    self._command(name), stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
        wait_for(self._is_ready, deadline_s=120, what="the NameNode and the DataNode")

    def kill(self, *servers: str) -> None:
        for name in servers or tuple(self._processes):
            process = self._processes.pop(name)
            process.kill()
            process.wait(60)

    def _command(self, server: str) -> list[str]:
        classes = [self.folder / "conf", self.folder, *sorted(JARS.glob("*.jar"))]
        temporary = f"-Djava.io.tmpdir={self.folder}"  # where Jetty leaves folders
        return [java(), *_JAVA, temporary, "-cp", ":".join(map(str, classes)), _SERVERS[server]]

    def _configure(self, name: str, values: dict[str, str]) -> None:
        lines = (f"<property><name>{key}</name><value>{value}</value></property>" for key, value in values.items())
        (self.folder / "conf" / f"{name}-site.xml").write_text(f"<configuration>{''.join(lines)}</configuration>")

    def _is_ready(self) -> bool:
        for name, process in self._processes.items():
            assert process.poll() is None, (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]
        with contextlib.suppress(OSError, LookupError):
            state = self._bean("FSNamesystemState")
            info = self._bean("NameNodeInfo")
            with urllib.request.urlopen(self.data_endpoint + "/jmx?qry=none", timeout=10):
                return bool(state["NumLiveDataNodes"] == 1 and not info["Safemode"])
        return False

    def _bean(self, name: str) -> dict[str, Any]:
        with urllib.request.urlopen(
            f"{self.endpoint}/jmx?qry=Hadoop:service=NameNode,name={name}", timeout=10
        ) as answer:
            found: dict[str, Any] = json.load(answer)["beans"][0]
        return found


@contextlib.contextmanager
def hdfs(folder: Path) -> Iterator[Hdfs]:
    """Give a running one."""
    server = Hdfs(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
