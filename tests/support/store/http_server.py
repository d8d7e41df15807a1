"""An HTTP server of files on this machine, whose answers can be spoilt."""

import gzip
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

#: What an answer can be made: a status, or one of these words.
Fault = int | str | None
DROPPED, CUT, SHORT, GARBLED, WHOLE = "dropped", "cut", "short", "garbled", "whole"
#: Answers that say nothing of their length; that go on and on, plain or packed; that stop.
CHUNKED, ENDLESS, PACKED, STALLED = "chunked", "endless", "packed", "stalled"
FAULTS: tuple[Fault, ...] = (
    *(DROPPED, CUT, SHORT, GARBLED, WHOLE, CHUNKED, ENDLESS, PACKED, STALLED),
    *(206, 301, 403, 404, 416, 429, 500, 503),
)
#: Bytes after which an endless answer ends, so that a test ends too.
ENDLESS_BYTES = 64 * 2**20
_PACKED = gzip.compress(bytes(ENDLESS_BYTES))


class FileServer(ThreadingHTTPServer):
    """Serves the files of a directory, in parts where it is asked for parts.

    Args:
        directory: The directory.

    Attributes:
        fault: Says what is wrong with the answer to a request for a path; nothing by default.
        asked: The paths that were asked for.
        num_sent: Bytes that endless answers had when nobody listened any more.
    """

    daemon_threads = True

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.directory = directory
        self.fault: Callable[[str], Fault] = lambda path: None
        self.asked: list[str] = []
        self.num_sent = 0
        self.may_go_on = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def wait(self) -> None:
        """Serve until this process is ended."""
        self._thread.join()

    def stop(self) -> None:
        """Answer no more. A second call does nothing."""
        self.may_go_on.set()
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
            self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        fault = self.server.fault(self.path)
        path = self.server.directory / unquote(self.path).lstrip("/")
        if fault == DROPPED:
            self._hang_up()
        elif isinstance(fault, int):
            self._head(fault, 0)
        elif not path.is_file():
            self._head(404, 0)
        else:
            self._give(path.read_bytes(), fault)

    def _give(self, data: bytes, fault: Fault) -> None:
        status = 200
        if fault != WHOLE and (asked := self.headers["Range"]):
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            data, status = data[first : last + 1], 206
        if fault in (CHUNKED, ENDLESS, PACKED, STALLED):
            self._give_unbounded(data, status, str(fault))
            return
        if fault == SHORT:
            data = data[: len(data) // 2]
        if fault == GARBLED:
            data = bytes(byte ^ 1 for byte in data)
        self._head(status, len(data))
        self.wfile.write(data[: len(data) // 2] if fault == CUT else data)
        if fault == CUT:
            self._hang_up()

    def _give_unbounded(self, data: bytes, status: int, fault: str) -> None:
        self.close_connection = True
        self.send_response(status)
        if fault == PACKED:
            self.send_header("Content-Encoding", "gzip")
            data = _PACKED
        elif fault == STALLED:
            self.send_header("Content-Length", str(len(data)))
            data = data[: len(data) // 2]
        elif fault == ENDLESS:
            data = bytes(2**20)
        self.end_headers()
        with suppress(OSError):  # Nobody listens any more.
            self.wfile.write(data)
            while fault == ENDLESS and self.server.num_sent < ENDLESS_BYTES:
                self.wfile.write(data)
                self.server.num_sent += len(data)
        if fault == STALLED:
            self.server.may_go_on.wait(60)

    def do_HEAD(self) -> None:
        if self.server.fault(self.path) == CHUNKED:
            self.send_response(200)
            self.end_headers()
            return
        self._head(
            200 if (self.server.directory / unquote(self.path).lstrip("/")).is_file() else 404, 0
        )

    def _head(self, status: int, num_bytes: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(num_bytes))
        self.end_headers()

    def _hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
