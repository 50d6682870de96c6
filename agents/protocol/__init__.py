"""The wire between agents and server: typed messages, codec and sans-I/O sessions. Stdlib and msgspec only."""
