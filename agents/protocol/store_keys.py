"""Where what stands in the store.

What is long or many, and is only read when somebody asks for it, stands apart: thousands of
agents read and watch the rest as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from agents.protocol.records import JobId, NodeId


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

    @property
    def outbox(self) -> str:
        """Apart from the rest, which is read as a whole again and again."""
        return f"/sailor/outbox/v1/{self.cluster}/message/"

    @property
    def cursors(self) -> str:
        return f"/sailor/outbox/v1/{self.cluster}/told/"

    @property
    def capacity(self) -> str:
        """The books of rented machines; agents need not read them."""
        return f"/sailor/capacity/v1/{self.cluster}/books"

    @property
    def lives(self) -> str:
        """How long machines lived, by pool."""
        return f"/sailor/capacity/v1/{self.cluster}/lives"

    @property
    def news(self) -> str:
        """What others told of capacity, by the hash of its id."""
        return f"/sailor/capacity/v1/{self.cluster}/news/"

    @property
    def papers(self) -> str:
        return f"/sailor/papers/v1/{self.cluster}/"

    def node(self, id_: NodeId) -> str:
        return f"{self.nodes}{id_}"

    def intent(self, id_: str) -> str:
        return f"{self.intents}{id_}"

    def spec(self, job: JobId) -> str:
        return f"{self.jobs}{job}/spec"

    def state(self, job: JobId) -> str:
        return f"{self.jobs}{job}/state"

    def durable(self, job: JobId) -> str:
        return f"{self.jobs}{job}/durable"

    def generation(self, job: JobId) -> str:
        return f"{self.jobs}{job}/gen"

    def plan(self, job: JobId, sha: str) -> str:
        return f"{self.papers}{job}/plan/{sha}"

    def about(self, job: JobId, sha: str) -> str:
        return f"{self.papers}{job}/about/{sha}"

    def history(self, job: JobId, number: int) -> str:
        return f"{self.papers}{job}/history/{number:020d}"

    def job_part(self, key: str) -> tuple[JobId, str] | None:
        """The job that a key belongs to, and what of it."""
        job, slash, part = key.removeprefix(self.jobs).partition("/")
        return (JobId(job), part) if key.startswith(self.jobs) and slash else None
