"""The engine room: runs an experiment, keeps its state on disk, resumes it."""
