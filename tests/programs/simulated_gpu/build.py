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


def _torch_folder() -> Path:
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    return Path(torch.origin).parent


def why_unavailable() -> str:
    """Why devices cannot be simulated here, and what to do; empty where they can."""
    if (_torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "this torch is built for real GPUs: run pytest -m gpu on them"
    if shutil.which("g++") is None:
        return "there is no g++ to compile simulated GPUs with: install it"
    return ""


def build_library() -> Path:
    """The path of the library, which is built if it is not in the cache: this takes about 30 s.

    It is kept below ``$XDG_CACHE_HOME``, or ``~/.cache``.

    Raises:
        RuntimeError: `why_unavailable` says why, or the source does not compile against this torch.
    """
    version = importlib.metadata.version("torch")
    folder = _torch_folder()
    if why := why_unavailable():
        raise RuntimeError(why)
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
        command = ["g++", *_FLAGS, f"-I{include}", f"-I{include}/torch/csrc/api/include"]
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
