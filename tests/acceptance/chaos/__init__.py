"""Recovery while workers die at named places and Redis is flushed or gone. See `make chaos`."""
