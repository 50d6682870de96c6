"""Starting ranks: one runner per generation and node, which starts them through torch elastic."""
