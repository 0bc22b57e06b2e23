"""What `solrl validate` does: one model on one device, from loading to an update, each part checked and reported."""
