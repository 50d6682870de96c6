"""`make corruptions`: real checkpoints are damaged in every way that storage, people and dying processes know."""
