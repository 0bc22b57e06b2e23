"""The client side of the commands that start, query, scale and evaluate runs on Ray."""
