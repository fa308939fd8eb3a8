"""One worker in this process; in a thread of its own, if steps are to run while the next one is decided."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from quire.config import WorkerConfig
from quire.engine_core.executor.executor import STEP_TIMES, PendingStep
from quire.engine_core.executor.torch_library import load_torch_library
from quire.messages import SchedulerOutput, StepOutput, WorkerCapacity

if TYPE_CHECKING:
    from quire.worker.layers.ranks import Ranks


def import_worker() -> None:
    """Torch and the worker, which takes a second.

    Nothing that is made meanwhile is garbage, and to look through it again and again takes a tenth of that second.
    """
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        load_torch_library()
        import quire.worker.worker  # noqa: F401 - the core itself knows no torch
    finally:
        if is_collecting:
            _count_as_old()
            gc.enable()


def _count_as_old() -> None:
    """All objects that there are, at once. Else the collector would look through 190,000 of torch's as young ones, and
    through those that live on as older ones, in the middle of what comes next."""
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()


class InProcessExecutor:
    """The simplest executor, and the default on one device.

    A step is done when `execute` returns, until `run_ahead` is called: then one thread runs everything that touches the
    worker, in the order in which it was asked, and a step that waits in its queue begins the moment the last one ends.
    """

    def __init__(self, config: WorkerConfig, ranks: Ranks | None = None) -> None:
        """`ranks`: workers in other processes, with whom this one shares the model."""
        import_worker()
        from quire.worker.worker import Worker

        self._thread: _WorkerThread | None = None
        self.worker = Worker(config, ranks=ranks)
        self.worker.load()

    def run_ahead(self) -> None:
        """From now on `execute` returns at once."""
        self._thread = _WorkerThread()

    def measure_capacity(self, num_sharing: int = 1) -> WorkerCapacity:
        """`num_sharing`: workers of this engine on this machine."""
        measured: WorkerCapacity = self._run(self.worker.measure_capacity, num_sharing)
        return measured

    def initialize_cache(
        self, groups: list[list[str]], num_blocks: int, num_host_blocks: int = 0, num_state_blocks: int = 0
    ) -> None:
        """`num_state_blocks`: of a sequence, where other workers have layers with states as well."""
        self._run(self.worker.initialize_cache, groups, num_blocks, num_host_blocks, num_state_blocks)

    def execute(self, output: SchedulerOutput, answers: Sequence[StepOutput] = ()) -> PendingStep:
        """`answers`: of the last stage of a pipeline to earlier steps."""
        arguments = (output, answers) if answers else (output,)
        if self._thread is not None:
            return self._thread.submit(self.worker.execute, *arguments)
        future: Future[StepOutput] = Future()
        future.set_result(self.worker.execute(*arguments))
        return future

    def control(self, name: str, args: dict[str, Any]) -> Any:
        if name == STEP_TIMES:
            # sums that the worker's thread alone writes: whoever reads them waits for no step
            return self.worker.control(name, args)
        return self._run(self.worker.control, name, args)

    def keep(self, blocks: Mapping[bytes, bytes]) -> None:
        """As of `Worker.keep`; waits for no step."""
        self.worker.keep(blocks)

    def loss_descriptors(self) -> tuple[int, ...]:
        # it is lost with this process
        return ()

    def check_workers(self) -> None: ...

    def shutdown(self) -> None:
        self._run(self.worker.shutdown)
        if self._thread is not None:
            self._thread.end()
            self._thread = None

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args) if self._thread is None else self._thread.submit(function, *args).result()


class _WorkerThread:
    """Calls functions in the order in which they were handed in.

    A thread pool of one would do the same in 20 microseconds a call, of which this needs a third: it hands a step over
    while another one runs, and what it spends with the interpreter's lock the running step must wait for.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="quire-worker", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., Any], *args: Any) -> _Call:
        call = _Call(function, args)
        self._calls.put(call)
        return call

    def end(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()


class _Call:
    """What one thread does for another. A lock is all its state: held until there is a result."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function = function
        self._args = args
        self._value: Any = None
        self._error: BaseException | None = None
        self._pending = threading.Lock()
        self._pending.acquire()

    def run(self) -> None:
        try:
            self._value = self._function(*self._args)
        except BaseException as error:
            self._error = error
        self._pending.release()

    def result(self, timeout: float | None = None) -> Any:
        if not self._pending.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError
        self._pending.release()
        if self._error is not None:
            raise self._error
        return self._value
