"""One copy of a model, shared by all roles on a GPU: merged, quantised, offloaded and restored."""
