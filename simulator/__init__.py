"""What would happen if this job ran under that plan: time, memory and money, with their sources."""
