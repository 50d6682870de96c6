"""Checkpoints: what decides the next step, written so that half a checkpoint can never be taken for a whole one."""
