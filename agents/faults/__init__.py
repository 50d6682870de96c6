"""Faults that the agent injects for drills: each at most once, each with a deadline kept on this node."""
