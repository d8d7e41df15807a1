"""The paths of the package that only GPUs take, on simulated CUDA devices.

``python -m tests.programs.simulated_gpu`` runs pytest on them: all tests marked ``gpu``, and those
of this folder. It needs g++ and a torch without CUDA.

- `build` compiles the C++ sources of ``library/`` once and keeps the result.
- ``library/`` registers a backend at torch's CUDA dispatch key. Tensors are of ``cuda:0`` and
  ``cuda:1``; kernels run on the CPU at once, so that results are those of the CPU bit for bit.
  Streams, events and allocators keep account of what waits for what.
- `devices` completes ``torch.cuda``.
- `nccl` lets processes, of which each has a device of its own, exchange device memory.

What would come too early on a GPU is reported: memory that is read or overwritten while another
stream may still work on it, memory that is used again without ``record_stream``, host memory that
changes while a device may copy from it. A report fails the test.

Time passes for streams and events: each operation takes as long as `devices.operations_take` says.
Not simulated: cuDNN, peer-to-peer copies. Uses are compared by allocation
and not by byte. What several threads of the program enqueue counts as one order.
"""
