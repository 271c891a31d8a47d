"""Where jobs run. Every executor keeps one promise: the same key is the same job, submitted once whatever crashes."""

from a3r.executor.base import Executor, JobSpec, JobState, JobStatus
from a3r.executor.local import LocalExecutor

__all__ = ["Executor", "JobSpec", "JobState", "JobStatus", "LocalExecutor"]
