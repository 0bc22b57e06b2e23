"""Workers: their lives and replacements, pools, and how actors are made."""
