"""Workers: their life cycle and replacement, pools, and the creation of actors."""
