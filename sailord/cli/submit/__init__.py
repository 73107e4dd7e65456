"""The command ``submit``, for job files and for scripts with their folder."""
