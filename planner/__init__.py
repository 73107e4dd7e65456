"""Which plan should the job run on? Pure search, judged by the simulator."""
