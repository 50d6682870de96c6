"""The headless demo: a real system, one drill, and an auditor that believes only the ranks. See `make demo-check`."""
