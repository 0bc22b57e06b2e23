"""One copy of a model for all roles of a GPU: merged, quantised, offloaded and restored."""
