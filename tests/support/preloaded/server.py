"""Imports what takes long, then forks a process for each program that a client asks for.

Arguments: the socket to listen at, and the command that programs see as ``sys.executable``. Prints
a line when it listens, and ends when its standard input does.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[3]

_MODULES = (
    "PIL.Image",
    "attrs",
    "jsonargparse",
    "lightning",
    "lightning.pytorch.cli",
    "lightning_memmap.callbacks",
    "lightning_memmap.cli",
    "pytest",
    "rich.console",
    # Lightning imports it where it saves a checkpoint.
    "s3fs",
    "sklearn.datasets",
    "tensordict",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "torch.utils.data",
    "torchmetrics",
    "xxhash",
)
#: As in `tests.support.preloaded`, which is not there before the path is set.
END_WHOLLY = "PRELOADED_END_WHOLLY"
_PR_SET_PDEATHSIG = 1
#: As many as a process of multiprocessing is started with, and more.
_MAX_DESCRIPTORS = 32
#: Exit status of this process, if it is a program that ends by itself.
_status = 1


def end_at_once() -> None:
    """End without taking all modules apart, which is half a second of a core."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(_status)


def main() -> None:
    address, command = sys.argv[1:]
    # Before everything that is imported does so: it is then the last to run.
    atexit.register(end_at_once)
    # The project of these tests, even if another copy of it is installed. In place of this file's
    # folder, which is what the interpreter has put there.
    sys.path[0] = str(_ROOT)
    if "SIMULATED_GPU_LIBRARY" in os.environ:
        # Programs of tests that run on simulated GPUs have them, too: torch must not be there yet.
        sys.path.append(str(_ROOT))
        importlib.import_module("tests.programs.simulated_gpu.nccl")
    for name in _MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    request = serve(address)
    # From here on in a program's own process.
    global _status
    try:
        run(request, command)
        _status = 0
    except SystemExit as end:
        _status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except KeyboardInterrupt:
        # It ends by its signal, which is up to the interpreter.
        atexit.unregister(end_at_once)
        raise


def serve(address: str) -> dict[str, Any]:
    """Fork for each client. Returns in the programs' processes alone, with what is to be run."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return supervise(client)
        client.close()


def supervise(client: socket.socket) -> dict[str, Any]:
    """Fork the program, tell the client how it ends, and end it if the client is gone first."""
    size, received, _, _ = socket.recv_fds(client, 8, _MAX_DESCRIPTORS)
    request = json.loads(_receive(client, int.from_bytes(size, "little")))
    # Out of the way of the numbers that they get.
    streams = [fcntl.fcntl(stream, fcntl.F_DUPFD_CLOEXEC, 1000) for stream in received]
    for stream in received:
        os.close(stream)
    program = os.fork()
    if program == 0:
        os.setsid()
        # With whoever would end it: a test may take that one for the program's parent.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        client.close()
        for number, stream in zip(request["descriptors"], streams, strict=True):
            os.dup2(stream, number)
            os.close(stream)
        found: dict[str, Any] = request
        return found
    for stream in (*streams, 0, 1, 2):
        os.close(stream)
    watched = os.pidfd_open(program)
    try:
        client.sendall(f"{program}\n".encode())
        ready, _, _ = select.select([client, watched], [], [])
    except BrokenPipeError:
        # The client was killed before it was answered.
        ready = []
    if watched not in ready:
        for end in (os.killpg, os.kill):
            try:
                end(program, signal.SIGKILL)
            except ProcessLookupError:
                continue
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    try:
        client.sendall(f"{status}\n".encode())
    except BrokenPipeError:
        os._exit(1)
    os._exit(0)


def _receive(client: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        received = client.recv(num_bytes - len(data))
        if not received:  # Killed while it asked.
            os._exit(1)
        data += received
    return data


def run(request: dict[str, Any], command: str) -> None:
    """Run a program as ``python`` with these arguments does."""
    os.chdir(request["directory"])
    for name in ("_compat.independent", "strategies.members.processes"):
        if (module := sys.modules.get(f"lightning_memmap.{name}")) is not None:
            # The package was imported elsewhere.
            module.BEGAN_IN = request["directory"]  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(request["environment"])
    if END_WHOLLY in os.environ:
        atexit.unregister(end_at_once)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.executable = command
    arguments = list(request["arguments"])
    while arguments[0] in ("-u", "-W", "-B"):
        option = arguments.pop(0)
        if option == "-u":
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        elif option == "-W":
            warnings.filterwarnings(arguments.pop(0))  # type: ignore[arg-type]
    kind = arguments[0] if arguments[0] in ("-c", "-m") else ""
    first = os.getcwd() if kind else os.path.dirname(os.path.abspath(arguments[0]))
    search = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first, *search, *sys.path[1:]]
    if kind == "-m":
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
