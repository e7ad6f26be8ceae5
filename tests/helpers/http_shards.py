"""A web server that serves the files of a folder, ranges too, and fails as it is told."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

Fault = Literal["503", "403", "reset", "slow", "short", "whole"]


class Server(ThreadingHTTPServer):
    """Attributes:
    url: Of the folder.
    faults: For files whose name ends so, what happens to the next requests, one after the other.
    asked: GET requests by file name.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.faults: dict[str, list[Fault]] = {}
        self.asked: Counter[str] = Counter()
        self.lock = threading.Lock()

    def next_fault(self, name: str) -> Fault | None:
        with self.lock:
            for ending, faults in self.faults.items():
                if name.endswith(ending) and faults:
                    return faults.pop(0)
        return None

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that gave up are no news."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        file = self.server.folder / self.path.lstrip("/")
        if not file.is_file():
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(file.stat().st_size))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        file = self.server.folder / name
        with self.server.lock:
            self.server.asked[name] += 1
        fault = self.server.next_fault(name)
        if fault in ("503", "403"):
            self.send_error(int(fault))
            return
        if not file.is_file():
            self.send_error(404)
            return
        content = file.read_bytes()
        wanted = self.headers.get("Range")
        if wanted and fault != "whole":
            first, last = wanted.removeprefix("bytes=").split("-")
            start, stop = int(first), min(int(last) + 1 if last else len(content), len(content))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
            content = content[start:stop]
        else:
            self.send_response(200)
        if fault == "short":
            content = content[: len(content) // 2]
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if fault == "slow":
            time.sleep(3)
        if fault == "reset":
            self.wfile.write(content[: len(content) // 2])
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        self.wfile.write(content)


@contextlib.contextmanager
def serving(folder: str | os.PathLike[str]) -> Iterator[Server]:
    """A server on a free port of this machine."""
    server = Server(Path(folder))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
