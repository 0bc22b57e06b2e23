"""The distributed system: Ray actors around the classes of `solrl_ray`, each a thin layer in a file of its name."""
