"""Everything behind `solrl plan`: the arithmetic of a run, GPU memory, prices and times."""
