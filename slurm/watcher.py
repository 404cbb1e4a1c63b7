"""The state of Slurm jobs for submitit, also where there is no accounting.

submitit asks `sacct`, which wants an accounting database that small clusters do not have; its jobs then stay
UNKNOWN for ever. `squeue --states=all` knows every job until some minutes after its end (MinJobAge, 300 s), asks
the controller alone, and tells more: why a job waits, and how often it was requeued. A forgotten job is GONE.
"""

from __future__ import annotations

import subprocess
import time

from submitit.slurm.slurm import SlurmInfoWatcher

FINAL_STATES = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("TIMEOUT", "GONE"),
}
FIELDS = {"JobID": "JobArrayID", "State": "State", "Reason": "Reason", "Restarts": "RestartCnt"}
TIMEOUT_S = 60


class SqueueWatcher(SlurmInfoWatcher):
    """Ask squeue, for all jobs at once: after 2 s, then ever more seldom, down to once in delay_s."""

    def _make_command(self) -> list[str]:
        jobs = {job_id.split("_")[0] for job_id in self._registered - self._finished}
        # Each twice: squeue takes a single id that it does not know for an error.
        names = ",".join(sorted(jobs) * 2)
        fields = ",".join(f"{field}:|" for field in FIELDS.values())
        return ["squeue", "--noheader", "--array", "--states=all", f"--jobs={names}", f"--Format={fields}"]

    def update(self) -> None:
        """Ask for the jobs that have not ended; where squeue does not answer, what was known stays."""
        waiting = self._registered - self._finished
        if not waiting:
            return
        self._num_calls += 1
        self._last_status_check = time.time()
        try:
            shown = subprocess.run(
                self._make_command(), capture_output=True, text=True, timeout=TIMEOUT_S, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            reason = str(getattr(error, "stderr", None) or error).strip().split("\n")[0]
            for job_id in waiting:
                self._info_dict[job_id] = {**self._info_dict.get(job_id, {"State": "UNKNOWN"}), "Reason": reason}
            return
        found = self.read_info(shown.stdout)
        for job_id in waiting:
            self._info_dict[job_id] = found.get(job_id, {"State": "GONE"})
            if self.is_done(job_id, mode="cache"):
                self._finished.add(job_id)

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        """Return the fields of each job by its id."""
        text = string if isinstance(string, str) else string.decode()
        rows = [dict(zip(FIELDS, line.split("|"), strict=False)) for line in text.splitlines()]
        return {row["JobID"]: row for row in rows}

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Whether the job has ended for good: one that was requeued has not."""
        return self.get_state(job_id, mode=mode) in FINAL_STATES
