"""Commands from outside: a run is started, submitted, asked, scaled, evaluated."""
