"""The system: Ray actors around the classes of `solrl_ray`. One actor a file, each a thin shell."""
