"""Work in the loop's thread ends with the caller, at whatever moment the caller is interrupted."""

import asyncio
import threading

import pytest

from quire.interfaces.loop_thread import LoopThread


@pytest.mark.parametrize("is_handed_over", [True, False])
def test_ctrl_c_while_work_is_handed_over(monkeypatch: pytest.MonkeyPatch, is_handed_over: bool):
    thread = LoopThread()
    began = threading.Event()
    ended = []

    async def work() -> None:
        try:
            began.set()
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    hand_over = thread._loop.call_soon_threadsafe

    def interrupted(call):
        monkeypatch.undo()
        if is_handed_over:
            hand_over(call)
            assert began.wait(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(thread._loop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        thread.run(work())
    # what has begun was cancelled, and has cleaned up
    assert ended == [True] * is_handed_over
    thread.close(lambda: None)
