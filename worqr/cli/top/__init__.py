"""``worqr top``: a mesh on a terminal, live. Tables of queues, running tasks, workers, failed tasks, schedules and the log."""
