"""What is measured, and under which names it is exported."""
