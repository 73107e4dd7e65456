"""Where what stands in the store."""

from __future__ import annotations

from dataclasses import dataclass

from agents.protocol import JobId


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one cluster."""

    cluster: str

    @property
    def all(self) -> str:
        return f"/sailor/v1/{self.cluster}/"

    @property
    def leader(self) -> str:
        return f"{self.all}leader"

    @property
    def nodes(self) -> str:
        return f"{self.all}node/"

    @property
    def intents(self) -> str:
        return f"{self.all}intent/"

    @property
    def jobs(self) -> str:
        return f"{self.all}job/"

    def intent(self, id_: str) -> str:
        return f"{self.intents}{id_}"

    def spec(self, job: JobId) -> str:
        return f"{self.jobs}{job}/spec"

    def state(self, job: JobId) -> str:
        return f"{self.jobs}{job}/state"

    def generation(self, job: JobId) -> str:
        return f"{self.jobs}{job}/gen"

    def plan(self, job: JobId, sha: str) -> str:
        return f"{self.jobs}{job}/plan/{sha}"

    def about(self, job: JobId, sha: str) -> str:
        return f"{self.jobs}{job}/about/{sha}"

    def history(self, job: JobId, number: int) -> str:
        return f"{self.jobs}{job}/history/{number:020d}"

    def job_part(self, key: str) -> tuple[JobId, str] | None:
        """The job that a key belongs to, and what of it."""
        job, slash, part = key.removeprefix(self.jobs).partition("/")
        return (JobId(job), part) if key.startswith(self.jobs) and slash else None
