"""Units out to workers, answers back to the selector."""
