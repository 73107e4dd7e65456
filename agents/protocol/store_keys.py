"""The keys of the store.

Long values that are read on demand have prefixes of their own: thousands of agents read and watch
the other keys as a whole.
"""

from __future__ import annotations

from agents.protocol.records import JobId, NodeId


class Keys:
    """The keys of one cluster."""

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.all = f"/sailor/v1/{cluster}/"
        self.leader = f"{self.all}leader"
        self.nodes = f"{self.all}node/"
        self.orders = f"{self.all}intent/"
        self.jobs = f"{self.all}job/"
        self.outbox = f"/sailor/outbox/v1/{cluster}/message/"
        """Messages to webhooks, under a prefix that is not watched."""
        self.cursors = f"/sailor/outbox/v1/{cluster}/told/"
        self.capacity = f"/sailor/capacity/v1/{cluster}/books"
        """Rented instances, which agents do not read."""
        self.lives = f"/sailor/capacity/v1/{cluster}/lives"
        """How long instances lived, by pool."""
        self.goodput = f"/sailor/capacity/v1/{cluster}/goodput"
        """What paid GPU time was spent on."""
        self.goodput_shares = f"/sailor/capacity/v1/{cluster}/goodput-shares/"
        """The same, by day and by job."""
        self.curve = f"/sailor/capacity/v1/{cluster}/curve"
        """Loss and throughput of jobs over time, for the page."""
        self.news = f"/sailor/capacity/v1/{cluster}/news/"
        """Capacity events from outside, by the hash of their id."""
        self.papers = f"/sailor/papers/v1/{cluster}/"

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

    def packages(self, job: JobId) -> str:
        return f"{self.papers}{job}/packages"

    def history(self, job: JobId, number: int) -> str:
        return f"{self.papers}{job}/history/{number:020d}"

    def job_part(self, key: str) -> tuple[JobId, str] | None:
        """Split a key into its job and the part after it; ``None``: it is not below a job."""
        job, slash, part = key.removeprefix(self.jobs).partition("/")
        return (JobId(job), part) if key.startswith(self.jobs) and slash else None
