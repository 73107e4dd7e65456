"""The model profiler: measures each distinct layer of a job on one device."""
