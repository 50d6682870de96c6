"""The pure pipeline: every decision of recovery as a function of values. No I/O, no clock, no randomness, no Django."""
