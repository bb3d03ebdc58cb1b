"""Whole programs on free loopback ports: one coordinator, its fold process, agents, workers."""
