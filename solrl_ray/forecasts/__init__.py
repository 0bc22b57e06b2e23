"""How long a run takes, for `solrl plan`."""
