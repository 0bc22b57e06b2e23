"""Code that runs inside the actors: one module per role, and the process that several roles on a GPU share."""
