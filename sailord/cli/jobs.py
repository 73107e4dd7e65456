"""Commands about jobs: list, explain, pause, resume, cancel."""

from __future__ import annotations

from sailord.cli.server import job_question, order_command, question
from sailord.text import cluster_text as text

jobs = question("jobs", lambda v: text.jobs_text(v["jobs"]), "List all jobs.")
history = job_question(
    "history", text.history_text, "Show a job's state transitions, each with its reason."
)
moves = job_question(
    "moves",
    lambda v: text.moves_text(v["moves"]),
    "Show how long each reconfiguration took, measured and predicted.",
)
why = job_question("why", text.why_text, "Explain a job's state, its generation and its plan.")
pause = order_command(
    "job", "pause", "Pause a job at the end of its step; the next queued job gets the cluster."
)
resume = order_command("job", "resume", "Resume a job that is paused or held.")
cancel = order_command("job", "cancel", "End a job for good; its checkpoints stay in storage.")
