"""The keys of the store.

Long values that are read on demand have prefixes of their own: thousands of agents read and watch
the other keys as a whole.
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
    def orders(self) -> str:
        return f"{self.all}intent/"

    @property
    def jobs(self) -> str:
        return f"{self.all}job/"

    @property
    def outbox(self) -> str:
        """Messages to webhooks, under a prefix that is not watched."""
        return f"/sailor/outbox/v1/{self.cluster}/message/"

    @property
    def cursors(self) -> str:
        return f"/sailor/outbox/v1/{self.cluster}/told/"

    @property
    def capacity(self) -> str:
        """Rented instances, which agents do not read."""
        return f"/sailor/capacity/v1/{self.cluster}/books"

    @property
    def lives(self) -> str:
        """How long instances lived, by pool."""
        return f"/sailor/capacity/v1/{self.cluster}/lives"

    @property
    def news(self) -> str:
        """Capacity events from outside, by the hash of their id."""
        return f"/sailor/capacity/v1/{self.cluster}/news/"

    @property
    def papers(self) -> str:
        return f"/sailor/papers/v1/{self.cluster}/"

    def node(self, id_: NodeId) -> str:
        return f"{self.nodes}{id_}"

    def order(self, id_: str) -> str:
        return f"{self.orders}{id_}"

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
        """Split a key into its job and the part after it; ``None``: it is not below a job."""
        job, slash, part = key.removeprefix(self.jobs).partition("/")
        return (JobId(job), part) if key.startswith(self.jobs) and slash else None
