"""Producing and operating: connections of a mesh, queues, jobs, events, dead letters, statistics. Nothing here runs tasks."""
