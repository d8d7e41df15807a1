"""Has the server run a program, and ends as the program ends. Imports little: it starts at once.

Arguments: the server's socket, then those of a Python.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress

_PASSED_ON = {
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
}


def open_for_the_program() -> Iterator[int]:
    """The standard streams, and what else a starter passes on, such as multiprocessing's pipes."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # The listing's own is closed by now.
            if os.get_inheritable(number):
                yield number


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.connect(sys.argv[1])
    descriptors = [*open_for_the_program()]
    request = {
        "arguments": sys.argv[2:],
        "directory": os.getcwd(),
        "environment": dict(os.environ),
        "descriptors": descriptors,
    }
    data = json.dumps(request).encode()
    socket.send_fds(server, [len(data).to_bytes(8, "little")], descriptors)
    server.sendall(data)
    answers = server.makefile("r")
    program = int(answers.readline())
    for number in _PASSED_ON:
        signal.signal(number, lambda passed, frame: os.kill(program, passed))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    status = int(answers.readline())
    if status < 0:
        if -status in _PASSED_ON:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
