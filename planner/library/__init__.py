"""The plans of a job for each availability of a cluster: searched once, then looked up."""
