"""`make exactness`: after any fault a run ends where an uninterrupted run ends, bit for bit."""
