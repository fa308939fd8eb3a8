"""Files to the processes of pytest-xdist as `--dist loadfile` does it, also when a process was lost.

xdist 3.8 then hands out again, file by file, all that the lost process ever had. The test that ended it would end the
next one. And a process begins a test when it knows the next, so one that gets a file without two open tests would do
nothing, and never ask for another.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class FileScheduling(LoadFileScheduling):
    def remove_node(self, node: WorkerController) -> str | None:
        """Says which test it ran when it was lost."""
        files = self.assigned_work[node]
        running = next((test for tests in files.values() for test, is_done in tests.items() if not is_done), None)
        for file, tests in list(files.items()):
            if running in tests:
                tests[running] = True
            if all(tests.values()):
                del files[file]
        super().remove_node(node)
        return running

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:
            # it has just been started, and does not know the tests yet
            return
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)
