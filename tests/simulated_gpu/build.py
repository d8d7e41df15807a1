"""Builds the library of simulated devices: once for each version of torch and of its source."""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_FOLDER = Path(__file__).with_name("library")
_SOURCE = _FOLDER / "cuda.cpp"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-DTORCH_API_INCLUDE_EXTENSION_H")


class UnavailableError(RuntimeError):
    """The devices cannot be simulated here. The message says why."""


def build_library() -> Path:
    """The path of the library, which is built if it is not in the cache: this takes about 30 s.

    It is kept below ``$XDG_CACHE_HOME``, or ``~/.cache``.

    Raises:
        UnavailableError: There is no compiler, or torch has CUDA itself.
        RuntimeError: The source does not compile against this version of torch.
    """
    version = importlib.metadata.version("torch")
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise UnavailableError("torch is not installed")
    folder = Path(torch.origin).parent
    if (folder / "lib" / "libtorch_cuda.so").exists():
        raise UnavailableError(f"torch {version} is built for real ones: run pytest -m gpu")
    compiler = shutil.which("g++")
    if compiler is None:
        raise UnavailableError("there is no g++ to compile them with: install it")
    key = hashlib.sha256(f"{version} {folder} {_FLAGS}".encode())
    for source in sorted(_FOLDER.iterdir()):
        key.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "lightning_memmap" / f"simulated_gpu-{version}-{key.hexdigest()[:16]}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as made_in:
        made = Path(made_in) / path.name
        include = folder / "include"
        command = [compiler, *_FLAGS, f"-I{include}", f"-I{include}/torch/csrc/api/include"]
        command += [str(_SOURCE), "-o", str(made), f"-L{folder}/lib", "-lc10", "-ltorch_cpu"]
        command += [f"-Wl,-rpath,{folder}/lib"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line][:5]
            raise RuntimeError(
                f"{_SOURCE.name} does not compile against torch {version}: " + "; ".join(errors)
            )
        # Others may build it at the same time: the last one wins, and all are alike.
        made.replace(path)
    return path


def load_library() -> ctypes.CDLL:
    """Load the library. torch takes its devices for real ones if it is imported after this."""
    path = os.environ.get("SIMULATED_GPU_LIBRARY") or build_library()
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
