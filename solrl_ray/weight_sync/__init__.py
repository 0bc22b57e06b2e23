"""Policy revisions: how they are built, sent, applied and verified."""
