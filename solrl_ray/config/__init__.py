"""The configuration: schema, YAML parts, overrides and checks across keys."""
