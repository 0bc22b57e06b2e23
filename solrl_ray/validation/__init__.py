"""``solrl validate``: one model on one device, from loading to an update, each part checked and reported."""
