"""What the agent senses: GPUs, the host, and what its ranks say. Kept empty, since the GPU child imports it too."""
