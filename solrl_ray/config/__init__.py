"""The configuration: schema, YAML parts and overrides, checks across keys, and the arithmetic of a run."""
