"""The data that a job file names: token files, images, synthetic samples."""
