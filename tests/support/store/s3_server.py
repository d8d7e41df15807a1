"""An S3 server on this machine, and a proxy before it whose connections break."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep

from tests.support.processes import free_port

_LIMIT_S = 60.0


@contextmanager
def s3_server() -> Iterator[int]:
    """Run moto's server in a process of its own. Yields its port."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        deadline = monotonic() + _LIMIT_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert server.poll() is None, "the server has ended"
            assert monotonic() < deadline, "the server did not start"
            sleep(0.05)
        yield port
    finally:
        server.kill()
        server.wait()


class CuttingProxy:
    """Passes bytes on to a port, and cuts connections off.

    Args:
        port: Where the bytes go.
        num_cuts: Connections that are cut; later ones are not.
        after_bytes: Bytes of an answer after which a connection is cut.
    """

    def __init__(self, port: int, num_cuts: int, after_bytes: int) -> None:
        self._port, self._cuts_left, self._after_bytes = port, num_cuts, after_bytes
        self.num_cut = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> "CuttingProxy":
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for each in self._sockets:
            _close(each)
        for thread in self._threads[1:]:
            thread.join()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [near, far]
                for source, target, is_answer in ((near, far, False), (far, near, True)):
                    arguments = (source, target, is_answer)
                    thread = threading.Thread(target=self._pass_on, args=arguments)
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        num_bytes = 0
        with suppress(OSError):
            while data := source.recv(2**14):
                if is_answer and self._is_cut(num_bytes + len(data)):
                    target.sendall(data[: max(0, self._after_bytes - num_bytes)])
                    break
                target.sendall(data)
                num_bytes += len(data)
        for each in (source, target):
            _close(each)

    def _is_cut(self, num_bytes: int) -> bool:
        with self._lock:
            if not self._cuts_left or num_bytes < self._after_bytes:
                return False
            self._cuts_left -= 1
            self.num_cut += 1
            return True


def _close(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
