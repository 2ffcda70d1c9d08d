"""Functions of fixed shapes and addresses as CUDA graphs."""

from __future__ import annotations

import gc
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..utils.progress import Progress

log = logging.getLogger(__name__)
_capturing = threading.Lock()
SOON = 2.0  # seconds before a progress bar appears: most captures end earlier, and a user may be reading an answer
# Graphs of one pair of caches. A graph of an 8B model takes some MB besides the shared pool. Batches of eight rows need
# some 100: for one tree, with and without copies and a rule, each number of rows and each bucket has its own.
MOST_PROGRAMS = 256


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from freeing a graph, which would invalidate the capture of another."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Inputs(TorchDispatchMode):
    """Collects the tensors that operations read and that no operation before has made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()  # addresses of storages
        self.read: dict[int, Tensor] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and (storage := value.untyped_storage()._cdata) not in self.made:
                self.read[storage] = value
        out = function(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and (storage := value.untyped_storage()._cdata) not in self.read:
                self.made.add(storage)
        return out


class Program:
    """A function of tensors of fixed shapes and addresses. A call runs it, or replays its graph once there is one.

    The function must not wait for the device, and must read and write the same addresses at each call.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[Tensor] = []  # a graph reads their addresses: they must not be freed

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        self.function()


class Pool:
    """Programs that run one after the other, by key, with a memory pool for their graphs. On CUDA the first run of a
    program captures it.

    No program refers back to the pool. So its graphs are freed with the last reference to it; left to the garbage
    collector, they might outlive the free memory.

    Args:
        most: number of programs; the least recently used one is dropped.
    """

    def __init__(self, device: torch.device, most: int = MOST_PROGRAMS) -> None:
        self.device, self.most = device, most
        self.programs: OrderedDict[Hashable, Program] = OrderedDict()
        self.failed: Exception | None = None  # the error of a capture, after which nothing more is captured
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # of captures
        self.bar: Progress | None = None  # from the first capture of a cycle to its end

    def handle(self) -> tuple[int, int]:
        """The handle of the memory pool, from an existing graph: a pool without graphs may have been freed."""
        graph = next((program.graph for program in self.programs.values() if program.graph is not None), None)
        return torch.cuda.graph_pool_handle() if graph is None else graph.pool()

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Run the program of this key; make it from the function if there is none."""
        program = self.programs.get(key)
        if program is None:
            while len(self.programs) >= self.most:
                self.programs.popitem(last=False)
            program = self.programs[key] = Program(function)
        self.programs.move_to_end(key)
        captures = program.graph is None and self.device.type == "cuda" and self.failed is None
        if captures and self.bar is None:
            self.bar = Progress(desc="capturing cycles", unit=" graph", leave=False, delay=SOON)
        program()  # before its capture: libraries allocate and choose their kernels in the first call
        if captures:
            self._capture(program)
            self.bar.update()

    def _capture(self, program: Program) -> None:
        graph, inputs = torch.cuda.CUDAGraph(), Inputs()
        try:
            # Other threads, such as those of a server, may use the device during a capture.
            options = {"stream": self.stream, "pool": self.handle(), "capture_error_mode": "thread_local"}
            with _capturing, uncollected(), torch.cuda.graph(graph, **options), inputs:
                program.function()
        except Exception as error:  # a kernel can raise any exception
            log.warning("cycles run without CUDA graphs, because a capture failed: %r", error, exc_info=True)
            self.failed = error.with_traceback(None)  # its frames refer to the pool
            return
        program.graph, program.inputs = graph, list(inputs.read.values())

    def close_bar(self) -> None:
        """Close the bar at the end of a cycle: a user may be reading an answer."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def clear(self) -> None:
        """Drop all programs."""
        self.programs.clear()
