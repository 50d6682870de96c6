"""`make planted-bugs`: each way in which a resume is known to go wrong is planted, and must be found and named."""
