"""Several processes that answer questions: one for a question that takes long, another for what comes meanwhile."""

import threading

from quire.asked_process import AskedProcesses


class Process:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        self.asked: list[bytes] = []
        self.is_closed = False

    def ask(self, question, seconds):
        self.asked += question
        self.has_begun.set()
        assert self.may_end.wait(60)
        if question == [b"fails"]:
            raise TimeoutError
        return bytearray(b"answer")

    def close(self) -> None:
        self.is_closed = True


def test_a_long_question_leaves_room_for_another():
    made: list[Process] = []

    def make() -> Process:
        made.append(Process())
        return made[-1]

    processes = AskedProcesses(2, make)
    ends: list[bytes] = []

    def ask(question: bytes) -> threading.Thread:
        def run() -> None:
            try:
                processes.ask([question], 1.0)
            except TimeoutError:
                ends.append(b"late")
            ends.append(question)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    slow = ask(b"fails")
    while not made:
        pass
    assert made[0].has_begun.wait(60)
    quick = [ask(b"quick")]
    while len(made) < 2:
        pass
    made[1].may_end.set()
    quick[0].join(60)
    quick += [ask(b"next"), ask(b"last")]
    for thread in quick:
        thread.join(60)
    assert made[0].asked == [b"fails"]
    assert len(made) == 2, "one that is idle is used again"
    made[0].may_end.set()
    slow.join(60)
    assert ends[-2:] == [b"late", b"fails"]
    assert processes.ask([b"again"], 1.0) == b"answer"
    processes.close()
    assert all(process.is_closed for process in made)
