"""The pages. A view parses, calls one function of recovery, and presents."""
