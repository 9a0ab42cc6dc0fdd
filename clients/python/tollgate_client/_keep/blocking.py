"""What a blocking client keeps."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, Iterable, Optional, Union

from .._decide.effects import Plan, run
from .effects import FOREVER, Await, Begin, Rest, Signal
from .keeping import LONGEST_CLOSE, D, Keeping

if TYPE_CHECKING:
    from .._nodes.blocking import BlockingNodes
    from ..fake import BlockingFake

_OTHER_THREADS = 0.001
"""Real seconds that a waiting caller of a fake leaves to other threads."""


class BlockingKeeping(Keeping[Union["BlockingNodes", "BlockingFake"], D]):
    """What a blocking client keeps, in a thread."""

    def __init__(
        self,
        engine: Union[BlockingNodes, BlockingFake],
        new_desk: Callable[[Callable[[], None]], D],
    ) -> None:
        # Its put may be called at any moment, by finalizers, too.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: Optional[threading.Thread] = None
        self._ended_signal: Optional[threading.Event] = None
        super().__init__(engine, new_desk)

    def new_signal(self) -> Signal:
        """What wakes a thread that waits."""
        return threading.Event()

    def perform(self, effect: Any) -> Any:
        """Performs an effect of the plans of handles and of the keeper."""
        if type(effect) is Await:
            if self.inline is not None:
                self._pass_time(effect)
            else:
                effect.signal.wait(effect.seconds)  # type: ignore[attr-defined]
            return None
        if type(effect) is Rest:
            self._rest(effect.seconds)
            return None
        if type(effect) is Begin:
            self._begin(effect)
            return None
        return self.engine.perform(effect)

    def wait_until(self, end: float) -> None:
        """Waits for the end of the keeper."""
        ended = self._ended_signal
        if ended is not None and self._thread is not threading.current_thread():
            ended.wait(max(end - time.monotonic(), 0.0))

    def _start_keeper(self, plan: Plan[None]) -> None:
        ended = threading.Event()
        name = f"tollgate-client-{self.kind}"
        thread = threading.Thread(target=self._keep, args=(plan, ended), name=name, daemon=True)
        self._thread, self._ended_signal = thread, ended
        try:
            thread.start()
        except BaseException:
            ended.set()
            raise

    def _keep(self, plan: Plan[None], ended: threading.Event) -> None:
        is_regular = False
        try:
            run(plan, self.perform)
            is_regular = True
        finally:
            try:
                self._ended(plan, is_regular)
            finally:
                ended.set()

    def _begin(self, begin: Begin) -> None:
        """In a thread of its own."""
        name = f"tollgate-client-{self.kind}-call"
        try:
            threading.Thread(target=self._call, args=(begin,), name=name, daemon=True).start()
        except (RuntimeError, MemoryError):  # There are too many threads.
            self._call(begin)

    def _call(self, begin: Begin) -> None:
        try:
            run(begin.plan, self.perform)
        finally:
            begin.ended()

    def _wake(self) -> None:
        self._bell.put(None)

    def _rest(self, seconds: float) -> None:
        try:
            self._bell.get(timeout=seconds)
            while True:
                self._bell.get_nowait()
        except queue.Empty:
            pass

    def _pass_time(self, pause: Await) -> None:
        """Lets fake time pass until what is waited for, or until the keeper has something to do."""
        assert self.inline is not None
        if not pause.is_first:
            time.sleep(_OTHER_THREADS)
            return
        self.engine.pass_time(min(pause.seconds, self.inline.pause))
        self.inline.catch_up()
        time.sleep(_OTHER_THREADS if pause.seconds == FOREVER else 0.0)


def close_all(keepings: Iterable[BlockingKeeping[Any]]) -> None:
    """Lets nothing be used any more, and waits for the release of all."""
    end = time.monotonic() + LONGEST_CLOSE
    for keeping in keepings:
        keeping.shut()
    for keeping in keepings:
        keeping.wait_until(end)
