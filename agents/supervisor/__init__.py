"""How the agent acts: orders become runs of a generation, and runs end with a proof that nothing is left."""
