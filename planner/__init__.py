"""Finds the plan for a training job: pure search, judged by the simulator."""
